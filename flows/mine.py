"""Hard negatives for a collection's queries, written as a file of judgements.

    collection -> candidates (BM25 or a model) -> choose -> (judge) -> Parquet: query-id, corpus-id, score

The file stands as `qrels` beside the collection in a source of training data. What ranks high without
having been judged is often relevant, so a judge can be asked to read every pick first.
"""

from __future__ import annotations

import shutil
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import orjson

from gradeloom.flows.concurrency import Thread, in_parallel
from gradeloom.flows.evaluate import bm25_ranker, encoder_ranker, reporter
from gradeloom.flows.orchestrate import Named, Orchestration, facts_artifact
from gradeloom.flows.progress import Progress
from gradeloom.schemas.config import TREC_LEVELS, JudgeConfig, content_view
from gradeloom.schemas.errors import InputError, RunIncomplete
from gradeloom.schemas.retriever import Bm25Miner, MineConfig
from gradeloom.schemas.rows import JudgedRow, ListRow, Passage, digest
from gradeloom.tasks.engine.types import UNREACHABLE
from gradeloom.tasks.run import RunDirectory, write_whole

if TYPE_CHECKING:
    from gradeloom.tasks.collection import Collection
    from gradeloom.tasks.engine.engine import Engine
    from gradeloom.tasks.label.judge import Judge
    from gradeloom.tasks.train.negatives import Negative

_SHARD = 500


@dataclass(frozen=True)
class MineResult:
    """How mining ended.

    Attributes:
        out: the file, None when none was written.
        accounting: queries; candidates and why they fell (see `choose_negatives`); what the judge left
            out, by reason; negatives; queries with none.
        stopped: why no file was written.
    """

    out: Path | None
    accounting: dict[str, int]
    seconds: float
    stopped: str | None = None

    @property
    def exit_code(self) -> int:
        return RunIncomplete.exit_code if self.stopped else 0

    @property
    def ended(self) -> str:
        return f"mined: {self.out}"

    async def report(self, tasks: Orchestration) -> None:
        facts: dict[str, Any] = {"file": self.out, **self.accounting, "no file, because": self.stopped}
        await facts_artifact(tasks, "mine-report", facts, "How many negatives, and where they lie.")


def mine_named(config: MineConfig) -> Named:
    """What Prefect shows of mining."""
    return Named("mine", "Hard negatives for a collection's queries.", Path(config.out).name)


async def run_mine(config: MineConfig, *, progress: Progress, tasks: Orchestration) -> MineResult:
    """Mine negatives and write them whole or not at all.

    Raises:
        InputError: a collection, model or engine is not there, or the file cannot be written.
        EngineUnavailable: the judge stopped answering for good.
    """
    started = time.time()
    out = Path(config.out)
    if out.suffix != ".parquet":
        raise InputError("expected a file name that ends in .parquet", field="out")
    if config.judge is not None and config.judge.engine is None:
        raise InputError("a judge of mined passages needs an engine of its own", field="judge.engine")
    collection, picks, accounting = await _picks(config, progress, tasks)
    if config.judge is not None:
        picks = await _judged(config, config.judge, collection, picks, accounting, progress, tasks)
    accounting["negatives"] = len(picks)
    found = {pick.query_id for pick in picks}
    accounting["queries without a negative"] = accounting["queries"] - len(found)
    seconds = round(time.time() - started, 3)
    if not picks:
        return MineResult(None, dict(accounting), seconds, "there is no negative left")
    write_whole(out, lambda temporary: _write(temporary, picks, config.grade))
    return MineResult(out, dict(accounting), seconds)


async def _picks(
    config: MineConfig, progress: Progress, tasks: Orchestration
) -> tuple[Collection, list[Negative], Counter[str]]:
    from gradeloom.tasks.collection import read_collection
    from gradeloom.tasks.train.negatives import choose_negatives

    thread = Thread()
    report = reporter(progress, thread, "search", "passages")
    found: list[tuple[Collection, list[Negative], Counter[str]]] = []

    def work() -> None:
        collection = read_collection(config.collection, releases=config.releases)
        by = config.by
        ranker = bm25_ranker() if isinstance(by, Bm25Miner) else encoder_ranker("encoder", by)
        run = ranker.rank(collection, config.depth, False, None, report)
        if config.max_score is not None:  # which is about positives, wherever they rank
            judged = ranker.rank(collection, len(collection.passages), True, None, lambda *_: thread.alive())
            run = {query_id: judged.get(query_id, {}) | scores for query_id, scores in run.items()}
        accounting = Counter({"queries": len(run)})
        picks = choose_negatives(run, collection.qrels, config, accounting=accounting)
        found.append((collection, picks, accounting))

    await tasks.shard("search", 0, lambda: thread.run(work))
    return found[0]


async def _judged(
    config: MineConfig, settings: JudgeConfig, collection: Collection, picks: Sequence[Negative],
    accounting: Counter[str], progress: Progress, tasks: Orchestration,
) -> list[Negative]:  # fmt: skip
    """The picks that the judge takes for negatives; the others are counted by reason."""
    from gradeloom.tasks.engine.engine import Engine
    from gradeloom.tasks.engine.models import home
    from gradeloom.tasks.engine.store import Ledger, RequestCache
    from gradeloom.tasks.label.judge import Judge
    from gradeloom.tasks.prompts import Prompt

    assert settings.engine is not None
    out = Path(config.out)
    work = out.with_name(f".{out.name}.run")  # what was asked, until the file stands
    kept: list[Negative] = []
    async with AsyncExitStack() as stack:
        run = stack.enter_context(RunDirectory(work).locked())
        ledger = stack.enter_context(Ledger(run.ledger))
        cache = stack.enter_context(RequestCache(home() / "cache"))
        engine = Engine(
            settings.engine, folder=run.path / "judge", ledger=ledger, cache=cache, say=progress.say
        )
        stack.push_async_callback(engine.stop)
        prompt = Prompt.load(settings.prompt).digest
        view = content_view(settings) | {"engine": engine.identity, "prompt": prompt, "seed": config.seed}
        print_ = digest(orjson.dumps(view, option=orjson.OPT_SORT_KEYS))
        judge = Judge.create(settings, TREC_LEVELS, seed=config.seed, fingerprint=print_)
        engine.check_labels(judge.labels)
        progress.stage("judge", len(picks), unit="passages")
        for start in range(0, len(picks), _SHARD):
            shard = picks[start : start + _SHARD]
            rows = [_row(start + i, pick, collection) for i, pick in enumerate(shard)]
            readings = await tasks.shard(
                "judge",
                start // _SHARD,
                lambda rows=rows: _read(judge, engine, rows, progress),  # type: ignore[misc]
            )
            for pick, reading in zip(shard, readings, strict=True):
                reason = _left_out(reading, config.positive_grade)
                if reason is None:
                    kept.append(pick)
                else:
                    accounting[reason] += 1
    shutil.rmtree(work, ignore_errors=True)
    return kept


def _row(ordinal: int, pick: Negative, collection: Collection) -> ListRow:
    query, text = collection.queries[pick.query_id], collection.passages[pick.passage_id]
    return ListRow(
        id=digest(pick.query_id, pick.passage_id, query, text), ordinal=ordinal, query_id=pick.query_id,
        query=query, passages=[Passage(grade=0, text=text)],
    )  # fmt: skip


async def _read(judge: Judge, engine: Engine, rows: Sequence[ListRow], progress: Progress) -> list[JudgedRow]:
    async def one(row: ListRow) -> JudgedRow:
        reading = await judge(engine, row)
        progress.advance("judge")
        return reading

    return await in_parallel(one(row) for row in rows)


def _left_out(reading: JudgedRow, positive_grade: float) -> str | None:
    """Why a pick is no negative by this reading; None when it is one.

    Raises:
        RunIncomplete: the judge could not be reached.
    """
    if reading.reason == UNREACHABLE:
        raise RunIncomplete("the judge could not be reached; the same command goes on from here")
    if reading.status != "kept":
        return f"left out: {reading.reason}"
    (judgement,) = reading.judgements
    if judgement.abstained or judgement.judged is None:
        return "left out: judge abstains"
    return "left out: judged positive" if judgement.judged >= positive_grade else None


def _write(path: Path, picks: Sequence[Negative], grade: float) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    table = pa.table(
        {
            "query-id": pa.array([pick.query_id for pick in picks], pa.string()),
            "corpus-id": pa.array([pick.passage_id for pick in picks], pa.string()),
            "score": pa.array([float(grade)] * len(picks), pa.float64()),
        }
    )
    pq.write_table(table, path, compression="zstd", write_page_checksum=True)
