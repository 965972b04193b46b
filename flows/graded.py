"""The graded flow (SyCL): queries in, a verified, versioned release of graded passages out.

    source -> generate -> filter -> near_duplicates -> judge -> label -> release

Rows go in shards. Several shards are in progress at once; near-duplicates are decided shard after
shard, in order. What a shard's stage has written is not computed again (but for rows that no server
could be reached for), so a killed run goes on where it was. The first N accepted rows (target) and
the token budget are applied to finished shards in order, so neither timing nor the number of shards
in progress decides what is released.
"""

from __future__ import annotations

import asyncio
import platform
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any, TypeVar

from gradeloom.flows.concurrency import InOrder, cancelled, in_parallel
from gradeloom.flows.estimate import Count, expected_tokens
from gradeloom.flows.orchestrate import Named, Orchestration, facts_artifact
from gradeloom.flows.pacing import Estimate, Pace
from gradeloom.flows.progress import Progress
from gradeloom.flows.recipe import Recipe, graded_recipe, steps
from gradeloom.flows.shard import Shard, kept, reading
from gradeloom.schemas.config import (
    DecontaminateFilter,
    GradedConfig,
    NearDuplicatesFilter,
    ReplayEngine,
    VllmEngine,
    content_view,
)
from gradeloom.schemas.errors import InputError, RunIncomplete
from gradeloom.schemas.manifest import Manifest, StageAccount, accept_rate
from gradeloom.schemas.rows import DecisionRow, JudgedRow, LabelRow, ListRow, QueryRow, Row
from gradeloom.tasks.engine.engine import Engine
from gradeloom.tasks.engine.store import Ledger, RequestCache
from gradeloom.tasks.engine.types import UNREACHABLE
from gradeloom.tasks.evaluate.grades import quality
from gradeloom.tasks.filter.decontaminate import Contamination
from gradeloom.tasks.filter.near_duplicates import NearDuplicateIndex
from gradeloom.tasks.filter.rules import filter_list
from gradeloom.tasks.generate.graded import GradedGenerator
from gradeloom.tasks.label.judge import Judge
from gradeloom.tasks.label.policy import label_list
from gradeloom.tasks.release.catalog import next_version
from gradeloom.tasks.release.write import Facts, Released, Story, cut_release, existing, make_place
from gradeloom.tasks.run import Accounting, RunDirectory, Stage
from gradeloom.tasks.sources import read_queries

R = TypeVar("R", bound=Row)
In = TypeVar("In", bound=Row)


@dataclass(frozen=True)
class GradedResult:
    """How a run ended.

    Attributes:
        release: the release's folder, or None when none was cut.
        already: the very same release was there before; nothing was done.
        stopped: why no release was cut, in words.
        usage: tokens and requests of this run so far, with `tokens_per_second`.
        sample: one released list: query, passages, grades, judged grades.
    """

    release: Path | None
    already: bool
    version: str
    digest: str | None
    accounting: list[StageAccount]
    accept_rate: float | None
    usage: dict[str, Any]
    quality: dict[str, Any] = field(default_factory=dict)
    sample: dict[str, Any] | None = None
    stopped: str | None = None

    @property
    def exit_code(self) -> int:
        return RunIncomplete.exit_code if self.stopped else 0

    @property
    def ended(self) -> str:
        return f"already released: {self.release}" if self.already else f"released: {self.release}"

    async def report(self, tasks: Orchestration) -> None:
        """Publish the accounting and how the run ended."""
        rows = [
            {
                "stage": account.stage, "rows": account.rows, "kept": account.kept,
                "rejected": account.rejected, "failed": account.failed, "unused": account.unused,
                "reasons": ", ".join(f"{n} {reason}" for reason, n in account.reasons.items()),
            }
            for account in self.accounting
        ]  # fmt: skip
        if rows:
            await tasks.table("graded-accounting", rows, "Where every row went, stage by stage.")
        facts: dict[str, Any] = {"release": self.release, "version": self.version, "digest": self.digest}
        if self.accept_rate is not None:
            facts["accept rate"] = f"{self.accept_rate:.1%}"
        facts |= {name.replace("_", " "): number for name, number in self.usage.items()}
        if self.stopped is not None:
            facts["no release, because"] = self.stopped
        await facts_artifact(tasks, "graded-report", facts, "How the run ended.")


def graded_named(config: GradedConfig) -> Named:
    """What Prefect shows of a graded run, e.g. `graded-demo 0.1.0`."""
    does = "Queries in, a verified, versioned release of graded passages out."
    return Named("graded", does, f"{config.release.name} {config.release.version}")


async def run_graded(config: GradedConfig, *, progress: Progress, tasks: Orchestration) -> GradedResult:
    """Run the graded flow to its end, going on from whatever an earlier start left.

    Raises:
        InputError: the configuration, the source, a model or the disk is not as it must be; or the
            release version exists with other content.
        EngineUnavailable: the engine stopped answering for good.
    """
    async with AsyncExitStack() as stack:
        run = stack.enter_context(RunDirectory(Path(config.run.root) / config.release.name).locked())
        graded = await GradedRun.open(config, run, stack, progress, tasks)
        released = existing(config.release)
        if released is not None:
            return already_released(config, graded.recipe, released)
        make_place(config.release)
        await graded.work()
        return await graded.finish()


def already_released(config: GradedConfig, recipe: Recipe, manifest: Manifest) -> GradedResult:
    """The release is there: the same recipe is done, another one must take another version."""
    folder = Path(config.release.root) / config.release.name / config.release.version
    if manifest.content.recipe != recipe.digest:
        free = next_version(Path(config.release.root), config.release.name, config.release.version)
        raise InputError(
            f"version {config.release.version} was released with other settings, source or model; "
            f"release versions never change. The next free one: --set release.version={free}",
            file=folder,
        )
    accounting = manifest.content.accounting
    return GradedResult(
        folder, True, config.release.version, manifest.digest, accounting, accept_rate(accounting), {},
        manifest.content.quality,
    )  # fmt: skip


class GradedRun:
    """One run of the graded flow: its engines, its stages, and the way of a shard through them."""

    def __init__(
        self,
        config: GradedConfig,
        run: RunDirectory,
        recipe: Recipe,
        ledger: Ledger,
        engines: tuple[Engine, Engine | None],
        contamination: Contamination | None,
        progress: Progress,
        tasks: Orchestration,
    ) -> None:
        self.config, self.run, self.recipe, self.ledger = config, run, recipe, ledger
        self.engine, self.judge_engine = engines
        self.contamination = contamination
        self.progress, self.tasks = progress, tasks
        prints = recipe.fingerprints
        self.generator = GradedGenerator.create(config, prints["generate"])
        self.judge = (
            Judge.create(config.judge, config.levels, seed=config.run.seed, fingerprint=prints["judge"])
            if config.judge
            else None
        )
        self.sources = run.stage("source", prints["source"], QueryRow)
        self.lists = run.stage("generate", prints["generate"], ListRow)
        self.filtered = run.stage("filter", prints["filter"], DecisionRow)
        self.labels = run.stage("label", prints["label"], LabelRow)
        self.judged = run.stage("judge", prints["judge"], JudgedRow) if self.judge else None
        self.index: NearDuplicateIndex | None = None
        self.deduplicated: Stage[DecisionRow] | None = None
        self.plan: list[Path] = []
        self.rows = 0
        self.decided: list[str] = []  # names of the shards that the cross-row stage is done with
        self.pace = Pace(config.run, 0, Estimate(0, 0))  # until the source is read
        self.accounting = Accounting()
        self._arrived: Counter[str] = Counter()
        self.started = time.time()

    @classmethod
    async def open(
        cls,
        config: GradedConfig,
        run: RunDirectory,
        stack: AsyncExitStack,
        progress: Progress,
        tasks: Orchestration,
    ) -> GradedRun:
        """Open ledger, cache and engines (none is started before it has something to do)."""
        ledger = stack.enter_context(Ledger(run.ledger))
        cache = None
        if config.cache.enabled:
            cache = stack.enter_context(RequestCache(Path(config.cache.root)))
        shared: dict[str, Any] = {"ledger": ledger, "cache": cache, "say": progress.say}
        engine = Engine(config.engine, folder=run.path / "generator", **shared)
        stack.push_async_callback(engine.stop)
        judge = None
        if config.judge is not None:
            judge = engine
            if config.judge.engine is not None and config.judge.engine != config.engine:
                judge = Engine(config.judge.engine, folder=run.path / "judge", **shared)
                stack.push_async_callback(judge.stop)
        sets = [f for f in config.filters if isinstance(f, DecontaminateFilter)]
        contamination = Contamination.load(sets[0]) if sets else None
        recipe = graded_recipe(
            config,
            generator=engine.identity,
            judge=judge.identity if judge else None,
            contamination=contamination,
        )
        graded = cls(config, run, recipe, ledger, (engine, judge), contamination, progress, tasks)
        graded._open_index(stack)
        return graded

    def _open_index(self, stack: AsyncExitStack) -> None:
        near = [f for f in self.config.filters if isinstance(f, NearDuplicatesFilter)]
        if near:
            print_ = self.recipe.fingerprints["near_duplicates"]
            self.index = stack.enter_context(NearDuplicateIndex(self.run.index(print_), near[0]))
            self.deduplicated = self.run.stage("near_duplicates", print_, DecisionRow)

    # --- the work -------------------------------------------------------------------------

    async def work(self) -> None:
        """Bring shards through all stages until the rows, the target or the budget are done."""
        self._describe()
        self._read_source()
        if self.judge and self.judge_engine:
            self.judge_engine.check_labels(self.judge.labels)
        self.pace = Pace(self.config.run, self.rows, self._estimate())
        self._say_what_to_expect()
        if self._one_model_at_a_time():
            await self._drive_phase_by_phase()
        else:
            await self._drive()

    def _describe(self) -> None:
        self.run.describe(
            {
                "name": self.config.release.name,
                "version": self.config.release.version,
                "config": content_view(self.config),
                "stages": self.recipe.fingerprints,
                "started": datetime.now(UTC).isoformat(timespec="seconds"),
                "flow_run": self.tasks.flow_run_url or self.tasks.flow_run,
            }
        )

    def _read_source(self) -> None:
        """Cut the source into shards on disk; only their paths stay in memory."""
        self.rows = 0
        for ordinal, rows in enumerate(self._source_shards()):
            ids = [row.id for row in rows]
            path = self.sources.path(ordinal, ids)
            if not path.exists():
                self.sources.write(path, ids, rows)
            self.plan.append(path)
            self.rows += len(rows)

    def _source_shards(self) -> Iterator[list[QueryRow]]:
        canary = self.config.run.canary
        size = canary.rows if canary else self.config.run.shard_rows
        shard: list[QueryRow] = []
        for row in read_queries(self.config.source, limit=self.config.run.limit):
            shard.append(row)
            if len(shard) == size:
                yield shard
                shard, size = [], self.config.run.shard_rows
        if shard:
            yield shard

    def _one_model_at_a_time(self) -> bool:
        """Two managed servers do not fit one device."""
        judge = self.judge_engine
        return (
            judge is not None
            and judge is not self.engine
            and isinstance(self.config.engine, VllmEngine)
            and isinstance(judge.config, VllmEngine)
        )

    async def _drive(self) -> None:
        """Keep up to `run.wave` shards in progress, started and finished in order."""
        deduplicated, finished = InOrder(), InOrder()

        async def whole(ordinal: int) -> None:
            shard = await self._until_deduplicated(ordinal, deduplicated)
            await self._judge_and_label(shard)
            async with finished.turn(ordinal):
                self._finish_shard(shard)

        running: set[asyncio.Task[None]] = set()
        started = 0
        try:
            while True:
                while self._room_for_another(started, len(running)):
                    running.add(asyncio.create_task(whole(started)))
                    started += 1
                if not running or self.pace.enough:
                    return
                done, running = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    task.result()
        finally:
            await cancelled(running)

    async def _drive_phase_by_phase(self) -> None:
        """Generator and judge take turns on the device: a batch is generated, then judged."""
        assert self.judge_engine is not None
        started = 0
        while self._room_for_another(started, 0):
            batch = range(started, min(len(self.plan), started + self.pace.batch()))
            order, slots = InOrder(started), asyncio.Semaphore(self.config.run.wave)
            await in_parallel(self._first_phase(ordinal, order, slots) for ordinal in batch)
            await self.engine.stop()
            for ordinal in batch:
                if not self.pace.enough:
                    shard = self.load(ordinal)
                    await self._judge_and_label(shard)
                    self._finish_shard(shard)
            await self.judge_engine.stop()
            started = batch.stop

    async def _first_phase(self, ordinal: int, order: InOrder, slots: asyncio.Semaphore) -> None:
        async with slots:
            await self._until_deduplicated(ordinal, order)

    def _room_for_another(self, started: int, running: int) -> bool:
        return started < len(self.plan) and self.pace.room_for_another(started, running)

    def _finish_shard(self, shard: Shard) -> None:
        """Count a shard, in order; rows after the cut are surplus and count as unused later."""
        if self.pace.enough:
            return
        if not self.pace.finished(shard.tally(), [row.ordinal for row in kept(shard.labels)]):
            return
        cut = self.pace.cut
        for stage, rows in shard.stages():
            if stage in self.recipe.fingerprints:
                self.accounting.add(stage, [row for row in rows if cut is None or row.ordinal <= cut])

    async def _until_deduplicated(self, ordinal: int, order: InOrder) -> Shard:
        source = self.sources.read(self.plan[ordinal])
        assert source is not None
        shard = Shard(ordinal, source)
        shard.lists = await self._rows(
            self.lists, ordinal, shard.queries, lambda row: self.generator(self.engine, row)
        )
        shard.filtered = await self._rows(self.filtered, ordinal, kept(shard.lists), self._filter)
        async with order.turn(ordinal):
            if self.deduplicated is not None:
                shard.deduplicated = self._deduplicate(shard)
        return shard

    async def _filter(self, row: ListRow) -> DecisionRow:
        return filter_list(
            self.config.filters, row, grades=self.config.grades, contamination=self.contamination
        )

    def _deduplicate(self, shard: Shard) -> list[DecisionRow]:
        """Sequential: a shard is decided after all before it; its name vouches for theirs."""
        assert self.index is not None
        assert self.deduplicated is not None
        rows = shard.passing(shard.filtered)
        ids = [row.id for row in rows]
        self._expect("near_duplicates", len(rows))
        before = self.decided[shard.ordinal - 1] if shard.ordinal else ""
        path = self.deduplicated.path(shard.ordinal, ids, before)
        decisions = self.deduplicated.read(path)
        if decisions is None:
            self.index.sync(self.decided, self._kept_of)
            decisions = self.index.decide(path.stem, rows)
            self.deduplicated.write(path, ids, decisions)
        self.decided.append(path.stem)
        self.progress.advance("near_duplicates", len(rows), kept=len(kept(decisions)))
        return decisions

    def _kept_of(self, name: str) -> list[ListRow]:
        """The lists that the cross-row stage kept in a finished shard, read again from the files."""
        shard = self.load(self.decided.index(name))
        return shard.passing(shard.deduplicated or [])

    async def _judge_and_label(self, shard: Shard) -> None:
        rows = shard.passing(shard.filtered if shard.deduplicated is None else shard.deduplicated)
        judge, engine = self.judge, self.judge_engine
        if judge is not None and engine is not None and self.judged is not None:
            shard.judged = await self._rows(self.judged, shard.ordinal, rows, lambda row: judge(engine, row))
            rows = shard.passing(shard.judged)
        judged = {row.id: row for row in shard.judged}

        async def label(row: ListRow) -> LabelRow:
            return label_list(self.recipe.policy, row, judged.get(row.id))

        shard.labels = await self._rows(self.labels, shard.ordinal, rows, label)

    async def _rows(
        self, stage: Stage[R], ordinal: int, inputs: Sequence[In], work: Callable[[In], Awaitable[R]]
    ) -> list[R]:
        """One shard of a per-row stage: from its file, or worked out and written as one task.

        A file with rows that no server could be reached for is worked out once more: the ledger answers
        for the others.
        """
        self._expect(stage.name, len(inputs))
        ids = [row.id for row in inputs]
        path = stage.path(ordinal, ids)
        rows = stage.read(path)
        if rows is not None and not any(row.reason == UNREACHABLE for row in rows):
            self.progress.advance(stage.name, len(rows), kept=len(kept(rows)))
            return rows

        async def one(row: In) -> R:
            done = await work(row)
            spent = done.completion_tokens if isinstance(done, ListRow) else 0
            numbers = {"kept": done.status == "kept"} | ({"tokens": spent} if spent else {})
            self.progress.advance(stage.name, 1, **numbers)
            return done

        async def compute() -> list[R]:
            rows = await in_parallel(one(row) for row in inputs)
            stage.write(path, ids, rows)
            return rows

        return await self.tasks.shard(stage.name, ordinal, compute)

    def _expect(self, stage: str, rows: int) -> None:
        """More rows have come to a stage: all are known for `generate`, the rest as they are kept."""
        if stage != self.lists.name:
            self._arrived[stage] += rows
            self.progress.stage(stage, self._arrived[stage])

    def load(self, ordinal: int) -> Shard:
        """A shard as far as its stages are written."""
        source = self.sources.read(self.plan[ordinal])
        assert source is not None
        shard = Shard(ordinal, source)
        shard.lists = self._read(self.lists, ordinal, shard.queries)
        shard.filtered = self._read(self.filtered, ordinal, kept(shard.lists))
        rows = shard.passing(shard.filtered)
        if self.deduplicated is not None:
            before = self.decided[ordinal - 1] if ordinal else ""
            shard.deduplicated = self._read(self.deduplicated, ordinal, rows, before)
            rows = shard.passing(shard.deduplicated)
        if self.judged is not None:
            shard.judged = self._read(self.judged, ordinal, rows)
            rows = shard.passing(shard.judged)
        shard.labels = self._read(self.labels, ordinal, rows)
        return shard

    def _read(self, stage: Stage[R], ordinal: int, inputs: Sequence[Row], after: str = "") -> list[R]:
        return stage.read(stage.path(ordinal, [row.id for row in inputs], after)) or []

    # --- the end --------------------------------------------------------------------------

    async def finish(self) -> GradedResult:
        """Cut the release, or say why not."""
        await self.engine.stop()
        if self.judge_engine is not None:
            await self.judge_engine.stop()
        unused = self.rows - sum(account.rows for account in self.accounting.stages()[:1])
        if unused:
            self.accounting.count("source", "unused", self.pace.cut_reason or "run_stopped", unused)
        accounting = self.accounting.stages()
        stopped = self.pace.verdict(accounting)
        if stopped is not None:
            stopped += self._for_example()
            return GradedResult(
                None, False, self.config.release.version, None, accounting, accept_rate(accounting),
                self.usage(), stopped=stopped,
            )  # fmt: skip
        released = self._cut(accounting)
        content = released.manifest.content
        return GradedResult(
            released.path, released.already, content.version, released.manifest.digest, accounting,
            accept_rate(accounting), self.usage(), content.quality, self._sample(),
        )  # fmt: skip

    def _for_example(self) -> str:
        """The first row that failed, else that was rejected, with all that is known of why."""
        for status in ("failed", "rejected"):
            for story in self._stories():
                row = story.decision
                if row.status == status:
                    detail = f" ({row.detail[:200]})" if row.detail else ""
                    return f"; for example query {story.query.query_id}: {row.reason}{detail}"
        return ""

    def _cut(self, accounting: list[StageAccount]) -> Released:
        config, recipe = self.config, self.recipe
        facts = Facts(
            kind="graded",
            recipe=recipe.digest,
            config=recipe.config,
            prompts=recipe.prompts,
            models=recipe.models,
            steps=steps(recipe),
            accounting=accounting,
            grades=config.grades,
            policy=recipe.policy,
            judge_independent=recipe.judge_independent,
            levels=config.levels,
        )
        return cut_release(
            config.release,
            self._stories(),
            facts,
            quality=lambda folder: quality(folder, config.grades),
            observed=self._observed,
        )

    def _stories(self) -> Iterator[Story]:
        for ordinal in range(self.pace.tally.shards):
            for story in self.load(ordinal).stories():
                if self.pace.cut is not None and story.query.ordinal > self.pace.cut:
                    return
                yield story

    def _sample(self) -> dict[str, Any] | None:
        """The first released list, for people to look at."""
        for story in self._stories():
            if story.generated is not None and story.label is not None and story.label.status == "kept":
                judged = {j.grade: j for j in story.judged.judgements} if story.judged else {}
                return {
                    "query_id": story.query.query_id,
                    "query": story.query.query,
                    "passages": [
                        {"grade": label, "text": passage.text, **reading(judged.get(passage.grade))}
                        for passage, label in zip(story.generated.passages, story.label.labels, strict=True)
                    ],
                }
        return None

    def usage(self) -> dict[str, Any]:
        """What this run has spent.

        `tokens` by the rows that count, whoever answered them (a target's or a budget's measure),
        `tokens_paid` by this run directory since it was made, surplus included; the rest by this process.
        """
        engines = [self.engine]
        if self.judge_engine is not None and self.judge_engine is not self.engine:
            engines.append(self.judge_engine)
        completion = sum(engine.usage.completion_tokens for engine in engines)
        busy = sum(engine.usage.busy_seconds for engine in engines)
        return {
            "tokens": self.pace.tally.tokens,
            "tokens_paid": self.ledger.spent(list(self.recipe.fingerprints.values())),
            "expected_tokens": self.pace.expected.tokens,
            "prompt_tokens_sent": sum(engine.usage.prompt_tokens for engine in engines),
            "completion_tokens_sent": completion,
            "requests_sent": sum(engine.usage.sent for engine in engines),
            "requests_cached": sum(e.usage.from_cache + e.usage.from_ledger for e in engines),
            "retries": sum(engine.usage.retries for engine in engines),
            "restarts": sum(engine.usage.restarts for engine in engines),
            "busy_seconds": round(busy, 3),
            "tokens_per_second": round(completion / busy, 1) if busy else None,
            "seconds": round(time.time() - self.started, 3),
        }

    def _observed(self) -> dict[str, Any]:
        return {
            **self.usage(),
            "finished": datetime.now(UTC).isoformat(timespec="seconds"),
            "host": platform.node(),
            "platform": platform.platform(),
            "python": platform.python_version(),
            "gradeloom": version("gradeloom"),
            "run": str(self.run.path),
            "stages": self.recipe.fingerprints,  # with `run`: where `release lineage` finds a row's shards
            "examples": {"path": self.config.generation.examples, "digest": self.generator.examples_digest},
            "flow_run": self.tasks.flow_run_url or self.tasks.flow_run,
            "engine_flags": list(self.engine.flags),
        }

    # --- what to expect -------------------------------------------------------------------

    def _estimate(self) -> Estimate:
        """From the first 16 queries; what is replayed costs nothing."""
        sample = kept(self.sources.read(self.plan[0]) or [])[:16]
        return expected_tokens(
            sample, self.rows, self.generator, self.judge,
            count=_counter(self.engine), count_judge=_counter(self.judge_engine),
        )  # fmt: skip

    def _say_what_to_expect(self) -> None:
        expected, run = self.pace.expected, self.config.run
        wanted = f", until {run.target:,} lists are accepted" if run.target else ""
        budget = f"; budget {run.budget_tokens:,}" if run.budget_tokens else ""
        cost = "from a recording, nothing to pay for"
        if expected.tokens:
            cost = (
                f"about {expected.prompt_tokens:,} prompt and {expected.completion_tokens:,} completion "
                f"tokens expected for all{budget}"
            )
        self.progress.say(f"{self.rows:,} queries{wanted}: {cost}")
        self.progress.stage(self.lists.name, self.rows)


def _counter(engine: Engine | None) -> Count | None:
    """What counts an engine's prompt tokens; None when none is paid for."""
    return None if engine is None or isinstance(engine.config, ReplayEngine) else engine.count_tokens
