"""Requests in, completions out: what every step that asks a language model is given.

An `Engine` puts the same things around any backend: the ledger (an attempt is never asked twice), the
request cache, the token count before sending, a bounded window, a lazy start, and sending again after
transport faults. A backend sends one request once.
"""

from __future__ import annotations

import asyncio
import time
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Protocol, Self

from gradeloom.schemas.config import EngineConfig, FaultEngine, OpenAIEngine, ReplayEngine, VllmEngine
from gradeloom.schemas.errors import EngineUnavailable, GradeloomError, InputError
from gradeloom.tasks.engine.http import HttpBackend, RetryLater
from gradeloom.tasks.engine.replay import ReplayBackend
from gradeloom.tasks.engine.store import Ledger, RequestCache
from gradeloom.tasks.engine.types import Asked, Completion, Message, Request, Sampling, TransportFault
from gradeloom.tasks.run import crash_point

if TYPE_CHECKING:
    from gradeloom.tasks.engine.tokens import TokenCounter

LONGEST_PAUSE = 30.0
"""Seconds between two sendings of one attempt at most, whatever a server asks for."""


class Backend(Protocol):
    """A way to have a server.

    Attributes:
        identity: what the model is; enters cache keys and fingerprints; known without starting anything.
        restarts: times a managed server was started again.
        flags: the arguments that a managed server was started with.
    """

    identity: str
    restarts: int
    flags: tuple[str, ...]

    async def start(self) -> None:
        """Make ready. Called again it does nothing.

        Raises:
            InputError: something that the user configured is wrong or missing.
            EngineUnavailable: the server does not come up.
        """

    async def send(self, asked: Asked, request: Request) -> Completion:
        """Send one request, once.

        Raises:
            TransportFault: no outcome came back; the request may be sent again.
            EngineUnavailable: the engine is gone for good.
            InputError: no request would succeed: wrong key, model or endpoint.
        """

    async def stop(self) -> None:
        """Stop everything that `start` started and wait until it is gone."""


_PROBE = Asked(stage="probe", fingerprint="", row="probe")
_PROBE_REQUEST = Request(({"role": "user", "content": "Say yes."},), Sampling(max_tokens=1, temperature=0.0))


@dataclass
class Usage:
    """What an engine has done since it was made.

    Attributes:
        asked: requests that steps asked for.
        from_ledger: of them, answered by the run's ledger.
        from_cache: of them, answered by the request cache.
        sent: of them, sent to a server.
        retries: further sendings after transport faults.
        restarts: times the server was started again.
        prompt_tokens: of the requests sent.
        completion_tokens: of the requests sent.
        busy_seconds: wall time with at least one request outstanding.
        outcomes: of all requests asked for.
    """

    asked: int = 0
    from_ledger: int = 0
    from_cache: int = 0
    sent: int = 0
    retries: int = 0
    restarts: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    busy_seconds: float = 0.0
    outcomes: Counter[str] = field(default_factory=Counter)


class Engine:
    """A language model, as configured. Belongs to one event loop.

    As an async context manager it stops its server on exit; it starts by itself when something must
    really be sent, and after `stop` again when need be.

    Args:
        config: which kind of engine.
        ledger: the run's ledger.
        cache: the request cache, None for none. Replay never uses it: its answers hang on the source
            id, which a request does not hold.
        folder: where logs and sockets of a managed server may lie.
        say: is told when a managed server starts and when it is ready.

    Raises:
        InputError: the configuration names something that is not there.
    """

    def __init__(
        self,
        config: EngineConfig,
        *,
        ledger: Ledger,
        cache: RequestCache | None,
        folder: Path,
        say: Callable[[str], None] = lambda _: None,
    ) -> None:
        self.config = config
        self.usage = Usage()
        self._say = say
        self._ledger = ledger
        self._cache = None if isinstance(config, ReplayEngine) else cache
        self._backend = _backend(config, folder)
        self._window = asyncio.Semaphore(config.window)
        self._starting = asyncio.Lock()
        self._running = False
        self._start_failure: GradeloomError | None = None
        self._outstanding = 0
        self._busy_since = 0.0
        self._answered = 0
        self._counter: TokenCounter | None = None

    @property
    def identity(self) -> str:
        """What the model is."""
        return self._backend.identity

    @property
    def max_model_len(self) -> int | None:
        """Tokens of prompt and completion together at most; None when not known."""
        return None if isinstance(self.config, ReplayEngine) else self.config.max_model_len

    @property
    def flags(self) -> tuple[str, ...]:
        """The arguments that a managed server was started with; empty before, and for other engines."""
        return self._backend.flags

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.stop()

    async def start(self) -> None:
        """Start the backend, once, however many ask; a failure to start is not tried again until `stop`.

        Raises:
            InputError, EngineUnavailable: as `Backend.start`.
        """
        async with self._starting:
            if self._start_failure is not None:
                raise self._start_failure
            if self._running:
                return
            since = time.monotonic()
            managed = isinstance(self.config, VllmEngine)
            if managed:
                self._say("starting vLLM; on a CPU this takes about a minute")
            try:
                await self._backend.start()
            except GradeloomError as error:
                self._start_failure = error
                raise
            self._running = True
            if managed:
                self._say(f"vLLM is ready after {time.monotonic() - since:.0f} s")

    async def stop(self) -> None:
        """Stop the backend, also one that is half started."""
        async with self._starting:
            self._running = False
            self._start_failure = None
            await self._backend.stop()

    # --- completions ------------------------------------------------------------------------

    async def complete(self, asked: Asked, request: Request) -> Completion:
        """The outcome of one attempt: from the ledger, the cache, or the model.

        Returns when the outcome is committed to the ledger. Requests wait for their place in the
        window in the order of the calls, so that neighbours with a shared prefix stay neighbours.

        Raises:
            EngineUnavailable: the engine does not answer anybody.
            InputError: the configuration is wrong, or ledger or cache cannot be written.
        """
        self.usage.asked += 1
        completion = self._ledger.get(asked)
        if completion is not None:
            self.usage.from_ledger += 1
        else:
            completion = await self._new(asked, request)
        self.usage.outcomes[completion.outcome] += 1
        return completion

    async def _new(self, asked: Asked, request: Request) -> Completion:
        """An attempt that the ledger does not know."""
        key = request.digest(self.identity) if self._cache is not None else ""
        completion = self._cache.get(key) if self._cache is not None else None
        if completion is not None:
            self.usage.from_cache += 1
        else:
            completion = self._too_long(request)
        if completion is not None:
            await self._ledger.record(asked, completion)
            return completion
        async with self._window:
            completion = await self._ask(asked, request)
            if completion.outcome in ("not_recorded", "unreachable"):
                return completion
            # Committed before the window lets the next one out: what is in flight is never more
            # than the window.
            await self._ledger.record(asked, completion)
        if self._cache is not None and completion.outcome == "stop":
            await self._cache.put(key, completion)
        return completion

    def _too_long(self, request: Request) -> Completion | None:
        """The outcome of a prompt that cannot fit, found without sending it."""
        if self.max_model_len is None:
            return None
        tokens = self.count_tokens(request.messages)
        if tokens is None or tokens + request.sampling.max_tokens <= self.max_model_len:
            return None
        room = f"{tokens} prompt tokens and {request.sampling.max_tokens} to be written"
        return Completion("prompt_too_long", f"{room} exceed the model's {self.max_model_len}")

    async def _ask(self, asked: Asked, request: Request) -> Completion:
        await self.start()
        self.usage.sent += 1
        with self._busy():
            completion = await self._send(asked, request)
        self.usage.prompt_tokens += completion.prompt_tokens
        self.usage.completion_tokens += completion.completion_tokens
        return completion

    async def _send(self, asked: Asked, request: Request) -> Completion:
        """Send one attempt until there is an outcome, `transport_retries` + 1 times at most."""
        answered_before: int | None = None
        retries = self.config.transport_retries
        for sending in range(retries + 1):
            try:
                completion = await self._backend.send(asked, request)
            except TransportFault as fault:
                last = fault
            else:
                self._answered += 1
                crash_point("after-response")
                return completion
            finally:
                self.usage.restarts = self._backend.restarts
            if answered_before is None:
                answered_before = self._answered
            if sending < retries:
                self.usage.retries += 1
                await asyncio.sleep(self._pause(asked, sending, last))
        assert answered_before is not None
        if self._answered > answered_before or await self._answers_at_all():
            return Completion("unreachable", f"{last} (sent {retries + 1} times)")
        raise EngineUnavailable(
            f"the engine does not answer: {last} (sent {retries + 1} times); "
            "run the same command again to go on"
        )

    async def _answers_at_all(self) -> bool:
        """Whether the engine answers a request that nothing can be wrong with.

        The last request of a run, when it is the one that the server chokes on, has no others beside
        it to tell whether the engine is alive.
        """
        try:
            await self._backend.send(_PROBE, _PROBE_REQUEST)
        except TransportFault:
            return False
        return True

    def _pause(self, asked: Asked, sending: int, fault: TransportFault) -> float:
        """Seconds before the next sending: doubling, up to a quarter longer so that not all come at once."""
        jitter = zlib.crc32(f"{asked.row}/{asked.part}/{asked.attempt}/{sending}".encode()) / 2**32
        pause = self.config.retry_delay * 2.0 ** min(sending, 16) * (1 + jitter / 4)
        if isinstance(fault, RetryLater):
            pause = max(pause, fault.seconds)
        return min(pause, LONGEST_PAUSE)

    @contextmanager
    def _busy(self) -> Iterator[None]:
        if self._outstanding == 0:
            self._busy_since = time.monotonic()
        self._outstanding += 1
        try:
            yield
        finally:
            self._outstanding -= 1
            if self._outstanding == 0:
                self.usage.busy_seconds += time.monotonic() - self._busy_since

    # --- tokens -----------------------------------------------------------------------------

    def count_tokens(self, messages: Sequence[Message]) -> int | None:
        """Tokens of the rendered prompt; None when the engine has no tokenizer here.

        Raises:
            InputError: the tokenizer cannot be loaded.
        """
        counter = self._tokens()
        return None if counter is None else counter.count(messages)

    def check_labels(self, labels: Sequence[str]) -> None:
        """Make sure that each label is a single token, for one is all that a judge may answer.

        Raises:
            InputError: a label is not. Without a tokenizer nothing is checked.
        """
        counter = self._tokens()
        if counter is None:
            return
        for label in labels:
            if not counter.single_token(label):
                raise InputError(
                    f"the label {label!r} is not a single token of this model, which answers with one; use "
                    "another judge, or other grades",
                    field="judge.engine",
                )

    def _tokens(self) -> TokenCounter | None:
        """What counts tokens for this engine: the tokenizer that is set, else that of a managed model."""
        if self._counter is None:
            from gradeloom.tasks.engine.tokens import TokenCounter

            config = self.config
            if config.tokenizer is not None:
                self._counter = TokenCounter.load(config.tokenizer)
            elif isinstance(config, VllmEngine):
                from gradeloom.tasks.engine.models import resolve

                model = str(resolve(config.model, config.revision))
                self._counter = TokenCounter.load(model, config.revision)
        return self._counter


def _backend(config: EngineConfig, folder: Path) -> Backend:
    match config:
        case OpenAIEngine():
            return HttpBackend.of(config)
        case ReplayEngine():
            return ReplayBackend(config)
        case FaultEngine():
            from gradeloom.tasks.engine.fault import FaultBackend

            return FaultBackend(config, folder=folder)
        case VllmEngine():
            from gradeloom.tasks.engine.vllm import VllmBackend

            return VllmBackend(config, folder=folder)
