"""Prefect, or its absence: the same composition as a Prefect flow run or as plain functions.

With an API (`PREFECT_API_URL`, or the local server that `gradeloom ui` starts) a run is a flow run,
its shards are task runs, its accounting and progress are artifacts. Without one nothing of Prefect
is imported and no server is started. Prefect is a window on the run and never its memory: nothing is
cached or resumed there, and an API that stops answering in the middle does not stop the run.
"""

from __future__ import annotations

import asyncio
import base64
import logging
import os
import re
import signal
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

from gradeloom.flows import server
from gradeloom.flows.progress import Progress, harmless
from gradeloom.schemas.config import Settings
from gradeloom.schemas.errors import GradeloomError, InputError

if TYPE_CHECKING:
    from uuid import UUID

    from prefect import State

T = TypeVar("T")
C_contra = TypeVar("C_contra", bound=Settings, contravariant=True)
R_co = TypeVar("R_co", bound="Result", covariant=True)
C = TypeVar("C", bound=Settings)
R = TypeVar("R", bound="Result")

_SECONDS_BETWEEN_UPDATES = 3.0


class Orchestration:
    """What a composition asks of Prefect. This one is its absence: work is awaited, artifacts are dropped.

    Attributes:
        flow_run: the id of the Prefect flow run, None without one.
        flow_run_url: where people look at it, None without one.
    """

    flow_run: str | None = None
    flow_run_url: str | None = None

    async def shard(self, stage: str, ordinal: int, work: Callable[[], Awaitable[T]]) -> T:
        """Do one shard of a stage; with Prefect as a task run named `generate 12`."""
        return await work()

    async def table(self, key: str, rows: list[dict[str, Any]], description: str = "") -> None:
        """A table artifact. Text in cells is data: it is escaped here.

        Args:
            key: lower-case letters, digits, `-`.
        """

    async def markdown(self, key: str, text: str, description: str = "") -> None:
        """A markdown artifact. `text` is rendered: put data into it through `plain`."""

    async def progress(self, key: str, fraction: float, description: str = "") -> None:
        """A progress artifact, made once and then updated. `fraction` is 0 to 1."""

    async def link(self, key: str, url: str, text: str, description: str = "") -> None:
        """A link artifact."""

    async def image(self, key: str, png: Path, description: str = "") -> None:
        """An image artifact that holds the picture itself: some ten kB of PNG."""


class Result(Protocol):
    """How a composition ended."""

    @property
    def stopped(self) -> str | None:
        """Why it did not come to its end, in words; None when it did."""

    @property
    def ended(self) -> str:
        """How it ended, in a few words: the message of the flow run's state."""

    async def report(self, tasks: Orchestration) -> None:
        """Publish the artifacts of a run that has ended."""


class Composition(Protocol[C_contra, R_co]):
    """A flow's work, e.g. `run_graded`."""

    async def __call__(self, config: C_contra, *, progress: Progress, tasks: Orchestration) -> R_co: ...


def plain(text: str) -> str:
    """Text of a model, a file or a user, so that markdown shows it and never interprets it."""
    text = re.sub(r"([\\`*_\[\]<>#|~!&$])", r"\\\1", harmless(text))
    return " ".join(text.replace("://", r":\/\/").split())


def api_url() -> str | None:
    """The Prefect API to report to: `PREFECT_API_URL`, else the local server if it is alive, else None."""
    return os.environ.get("PREFECT_API_URL") or server.running_api_url()


# --- a run from the command -------------------------------------------------------------------


@dataclass(frozen=True)
class Ran(Generic[R]):
    """A finished run; `flow_run_url` is where Prefect shows it, None without an API."""

    result: R
    flow_run_url: str | None = None


@dataclass(frozen=True)
class Named:
    """What Prefect shows of a flow: its name, what it does in a line, and the name of this run."""

    flow: str
    does: str
    run: str


async def run_flow(config: C, *, named: Named, progress: Progress, compose: Composition[C, R]) -> Ran[R]:
    """Run a composition: as a Prefect flow run when there is an API, else plainly.

    Raises:
        InputError: `PREFECT_API_URL` is set and nothing answers there.
        GradeloomError: whatever the composition raises; the flow run is then Failed with that line.
    """
    url = api_url()
    if url is None:
        with _cancelled_by_sigterm():
            return Ran(await compose(config, progress=progress, tasks=Orchestration()))
    server.settle_environment(url)
    from prefect.settings import temporary_settings

    # The environment counts when Prefect is imported for the first time, this one also later.
    # A server that is gone is asked again for a quarter of a minute, not for two.
    with temporary_settings({"api.url": url, "client.max_retries": 3}):
        await _check_api(url)
        return await _as_flow_run(config, named, progress, compose)


async def _check_api(url: str) -> None:
    from prefect.client.orchestration import get_client

    async with get_client() as client:
        problem = await client.api_healthcheck()
        why = type(problem).__name__
        if problem is None:
            try:  # any web server may say 200, and only Prefect its version
                await client.raise_for_api_version_mismatch()
                return
            except RuntimeError as error:
                why = " ".join(str(error).split())
    raise InputError(
        f"no Prefect API answers at {server.without_password(url)} ({why}); "
        "start it, or unset PREFECT_API_URL"
    )


async def _as_flow_run(config: C, named: Named, progress: Progress, compose: Composition[C, R]) -> Ran[R]:
    import httpx
    from prefect import flow
    from prefect.logging.handlers import APILogHandler

    outcome: Outcome[R] = Outcome()
    for name in ("prefect.flow_runs", "prefect.task_runs", "prefect.engine"):
        # What they say of the run goes to the API; on stderr the command speaks for itself.
        logging.getLogger(name).propagate = False
    logging.getLogger("EventsWorker").setLevel(logging.ERROR)  # else it counts down what it still has to send

    async def work(config: Any) -> State[None]:
        with _cancelled_by_sigterm():  # here, for Prefect has just put its own handler in place
            await inside_flow_run(config, progress, compose, outcome)
        return outcome.state()

    work.__annotations__["config"] = type(config)  # Prefect validates and records it as what it is
    run = flow(
        name=named.flow, description=named.does, flow_run_name=named.run, persist_result=False, retries=0
    )(work)
    try:
        await run(config, return_state=True)
        await APILogHandler.aflush()
    except httpx.HTTPError as error:
        if outcome.result is None and outcome.error is None:
            raise InputError(
                f"the Prefect API did not take the run ({type(error).__name__}: {error}); "
                "start the same command again, or unset PREFECT_API_URL"
            ) from error
        progress.say(f"The Prefect API stopped answering ({type(error).__name__}); the run is unharmed.")
    if outcome.error is not None:
        raise outcome.error
    assert outcome.result is not None
    return Ran(outcome.result, outcome.flow_run_url)


@contextmanager
def _cancelled_by_sigterm() -> Iterator[None]:
    """While it is open, SIGTERM cancels the current task, as Ctrl-C does under `asyncio.run`.

    Elsewhere than in the main thread signals belong to somebody else, and this does nothing.
    """
    task = asyncio.current_task()
    if task is None or threading.current_thread() is not threading.main_thread():
        yield
        return
    loop, before = asyncio.get_running_loop(), signal.getsignal(signal.SIGTERM)
    loop.add_signal_handler(signal.SIGTERM, task.cancel)
    try:
        yield
    finally:
        loop.remove_signal_handler(signal.SIGTERM)
        signal.signal(signal.SIGTERM, before)


# --- inside a flow run ------------------------------------------------------------------------


@dataclass
class Outcome(Generic[R]):
    """How a composition ended, beside what Prefect makes of it."""

    result: R | None = None
    error: Exception | None = None
    flow_run_url: str | None = None

    def state(self) -> State[None]:
        """Completed, or Failed with the reason that the command prints too."""
        from prefect.states import Completed, Failed

        if self.error is not None:
            return Failed(message=f"{type(self.error).__name__}: {self.error}")
        assert self.result is not None
        if self.result.stopped is not None:
            return Failed(message=self.result.stopped)
        return Completed(message=self.result.ended)


async def inside_flow_run(
    config: C, progress: Progress, compose: Composition[C, R], outcome: Outcome[R]
) -> None:
    """Run a composition within the flow run that is under way, and publish its progress and accounting.

    A `GradeloomError` ends in `outcome` alone, for Prefect would log its traceback; a defect is raised, too.
    """
    from prefect.logging import get_run_logger

    logger = get_run_logger()
    tasks = PrefectOrchestration(progress)

    def log(text: str) -> None:
        logger.info("%s", harmless(text))

    progress.listeners.append(log)
    outcome.flow_run_url = tasks.flow_run_url
    if tasks.flow_run_url:
        progress.say(f"Prefect flow run: {tasks.flow_run_url}")
    try:
        async with _published(progress, tasks):
            outcome.result = await compose(config, progress=progress, tasks=tasks)
        await outcome.result.report(tasks)
    except GradeloomError as error:
        outcome.error = error
        logger.error("%s", harmless(str(error)))
    except Exception as error:
        outcome.error = error
        raise
    finally:
        progress.listeners.remove(log)


@asynccontextmanager
async def _published(progress: Progress, tasks: Orchestration) -> AsyncIterator[None]:
    """While open, every stage's progress is an artifact, brought up to date every few seconds."""

    async def publish() -> None:
        for stage in progress.snapshot():
            if stage.total:
                words = f"{stage.name}: {stage.done:,} of {stage.total:,} {stage.unit} {stage.figures}"
                key = f"progress-{re.sub('[^a-z0-9]+', '-', stage.name)}"
                await tasks.progress(key, min(1.0, stage.done / stage.total), words)

    async def publish_again_and_again() -> None:
        while True:
            await asyncio.sleep(_SECONDS_BETWEEN_UPDATES)
            await publish()

    task = asyncio.create_task(publish_again_and_again())
    try:
        yield
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task
    await publish()


async def facts_artifact(tasks: Orchestration, key: str, facts: dict[str, Any], description: str) -> None:
    """A markdown artifact of two columns; facts that are None are left out."""
    lines = ["| | |", "|---|---|"]
    lines += [f"| {plain(name)} | {plain(str(fact))} |" for name, fact in facts.items() if fact is not None]
    await tasks.markdown(key, "\n".join(lines), description)


class PrefectOrchestration(Orchestration):
    """Shards as task runs, artifacts as artifacts, of the flow run that is under way.

    Args:
        run_progress: is told, once, when the API stops answering; from then on work is done plainly.
    """

    def __init__(self, run_progress: Progress) -> None:
        from prefect.context import FlowRunContext
        from prefect.utilities.urls import url_for

        context = FlowRunContext.get()
        assert context is not None, "not inside a Prefect flow run"
        assert context.flow_run is not None
        self.flow_run = str(context.flow_run.id)
        self.flow_run_url = url_for("flow-run", obj_id=context.flow_run.id)
        self._progress = run_progress
        self._bars: dict[str, UUID] = {}
        self._lost = False

    async def shard(self, stage: str, ordinal: int, work: Callable[[], Awaitable[T]]) -> T:
        import httpx
        from prefect import task
        from prefect.cache_policies import NO_CACHE

        if self._lost:
            return await work()
        done: list[T] = []
        raised: list[BaseException] = []

        async def one_shard() -> None:
            # Nothing goes in and nothing comes out through Prefect, which would keep it for the
            # length of the flow run.
            try:
                done.append(await work())
            except BaseException as error:
                raised.append(error)
                raise

        as_task = task(
            name=stage, task_run_name=f"{stage} {ordinal}", cache_policy=NO_CACHE, persist_result=False,
            retries=0,
        )(one_shard)  # fmt: skip
        try:
            await as_task()
        except httpx.HTTPError as error:
            if raised:
                raise
            self._give_up(error)
            if not done:
                return await work()
        return done[0]

    async def table(self, key: str, rows: list[dict[str, Any]], description: str = "") -> None:
        from prefect.artifacts import acreate_table_artifact

        cells = [{plain(k): plain(v) if isinstance(v, str) else v for k, v in row.items()} for row in rows]
        await self._publish(lambda: acreate_table_artifact(cells, key, plain(description)))

    async def markdown(self, key: str, text: str, description: str = "") -> None:
        from prefect.artifacts import acreate_markdown_artifact

        await self._publish(lambda: acreate_markdown_artifact(text, key, plain(description)))

    async def progress(self, key: str, fraction: float, description: str = "") -> None:
        from prefect.artifacts import acreate_progress_artifact, aupdate_progress_artifact

        percent, words = round(100 * fraction, 1), plain(description)
        if key in self._bars:
            await self._publish(lambda: aupdate_progress_artifact(self._bars[key], percent, words))
            return
        made = await self._publish(lambda: acreate_progress_artifact(percent, key, words))
        if made is not None:
            self._bars[key] = made

    async def link(self, key: str, url: str, text: str, description: str = "") -> None:
        from prefect.artifacts import acreate_link_artifact

        await self._publish(lambda: acreate_link_artifact(url, plain(text), key, plain(description)))

    async def image(self, key: str, png: Path, description: str = "") -> None:
        from prefect.artifacts import acreate_image_artifact

        url = "data:image/png;base64," + base64.b64encode(png.read_bytes()).decode()
        await self._publish(lambda: acreate_image_artifact(url, key, plain(description)))

    async def _publish(self, artifact: Callable[[], Awaitable[UUID]]) -> UUID | None:
        import httpx

        if self._lost:
            return None
        try:
            return await artifact()
        except httpx.HTTPError as error:
            self._give_up(error)
            return None

    def _give_up(self, error: Exception) -> None:
        if not self._lost:
            self._lost = True
            self._progress.say(
                f"The Prefect API stopped answering ({type(error).__name__}); the run goes on without it."
            )
