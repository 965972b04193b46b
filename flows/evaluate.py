"""Evaluation of retrievers: several of them, and BM25, on several test collections.

One retriever on one set is a cell: the run it retrieved and its values per query, two files named by
everything that decides them (the model's weights, the collection's content, the settings). What is
there is not computed again, so a killed evaluation goes on where it was, and the start of a training
is measured once however often it is trained from.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import orjson

from gradeloom.flows.concurrency import Thread
from gradeloom.flows.orchestrate import Named, Orchestration, facts_artifact
from gradeloom.flows.progress import Progress, following
from gradeloom.schemas.config import content_view
from gradeloom.schemas.errors import InputError
from gradeloom.schemas.retriever import (
    EncoderConfig,
    EvaluateConfig,
    EvaluationSet,
    MeasuresConfig,
    NamedEncoder,
)
from gradeloom.schemas.rows import digest
from gradeloom.tasks.run import RunDirectory, write_bytes_whole

if TYPE_CHECKING:
    from gradeloom.tasks.collection import Collection, Qrels, Run
    from gradeloom.tasks.encoder import Encoder
    from gradeloom.tasks.evaluate.retrieval import Evaluation, Row

VERSION = "1"
"""Raise it when search or measures give other values for the same input."""

BM25 = "bm25"
_PLACES = {"release", "path", "split", "queries", "corpus", "qrels", "exclude", "name"}

Report = Callable[[int, int], None]
"""Called with how much is done, and of how much."""


# --- what is ranked by ----------------------------------------------------------------------


@dataclass(frozen=True)
class Ranker:
    """One row of an evaluation.

    Attributes:
        name: of the row.
        identity: what decides its runs, apart from the collection.
        rank: (collection, k, pool, exclude, report) -> run.
    """

    name: str
    identity: str
    rank: Callable[[Collection, int, bool, Qrels | None, Report], Run]


def bm25_ranker() -> Ranker:
    """BM25 as the row `bm25`."""

    def rank(collection: Collection, k: int, pool: bool, exclude: Qrels | None, report: Report) -> Run:
        from gradeloom.tasks.evaluate.bm25 import bm25_run

        return bm25_run(collection, k=k, pool=pool, exclude=exclude)

    return Ranker(BM25, "bm25 lucene 0.9 0.4 en", rank)


def encoder_ranker(name: str, config: EncoderConfig, *, load: Callable[[], Encoder] | None = None) -> Ranker:
    """A sentence-transformers model as a row; it is loaded when the first cell needs it.

    Args:
        name: of the row.
        config: the model.
        load: gives it, when somebody holds it already.

    Raises:
        InputError: there is no such model.
    """
    from gradeloom.tasks.encoder import encoder_identity, load_encoder

    encoder = cache(load or (lambda: load_encoder(config)))

    def rank(collection: Collection, k: int, pool: bool, exclude: Qrels | None, report: Report) -> Run:
        from gradeloom.tasks.evaluate.search import dense_run

        return dense_run(encoder(), collection, k=k, pool=pool, exclude=exclude, progress=report)

    view = {key: value for key, value in content_view(config).items() if key not in ("model", "name")}
    settings = orjson.dumps(view, option=orjson.OPT_SORT_KEYS)
    return Ranker(name, f"{encoder_identity(config)} {settings.decode()}", rank)


# --- cells ----------------------------------------------------------------------------------


class Cells:
    """The cells under one root, computed when they are not there.

    Args:
        root: of the retrievers or evaluations that share them; they lie in its `.cells`.
        sets: the test collections.
        measures: what is computed of a run.
        releases: folder of releases.
        progress: hears of searches.
        tasks: each cell is one shard of the stage `evaluate`.
    """

    def __init__(
        self, root: Path, sets: Sequence[EvaluationSet], measures: MeasuresConfig, releases: str,
        progress: Progress, tasks: Orchestration,
    ) -> None:  # fmt: skip
        self.folder, self.sets, self.measures, self.releases = root / ".cells", sets, measures, releases
        self.progress, self.tasks = progress, tasks
        self._shards = 0

    async def rows(self, rankers: Sequence[Ranker]) -> list[Row]:
        """The rows of these rankers on every set, set after set.

        Raises:
            InputError: a collection cannot be read or holds no judged query, or a model is not there.
        """
        rows = []
        for one in self.sets:
            collection = await Thread().run(lambda one=one: read_set(one, self.releases))  # type: ignore[misc]
            exclude = excluded(one)
            for ranker in rankers:
                rows.append(await self._row(one, collection, exclude, ranker))
        return rows

    async def _row(
        self, one: EvaluationSet, collection: Collection, exclude: Qrels | None, ranker: Ranker
    ) -> Row:
        from gradeloom.tasks.evaluate.retrieval import Row

        path = self.folder / f"{one.name}.{ranker.name}.{self._key(one, collection, exclude, ranker)}.json"
        if not path.exists():
            thread = Thread()
            name = f"{ranker.name} on {one.name}"
            report = reporter(self.progress, thread, name, "passages")

            async def compute() -> None:
                await thread.run(lambda: self._compute(path, one, collection, exclude, ranker, report))

            self.progress.say(f"searching: {name} ({len(collection.passages):,} passages)")
            await self.tasks.shard("evaluate", self._shards, compute)
            self._shards += 1
        return Row(one.name, ranker.name, _read(path), path.with_suffix(".trec"))

    def _key(self, one: EvaluationSet, collection: Collection, exclude: Qrels | None, ranker: Ranker) -> str:
        identity = set_identity(one, collection, exclude)
        seen = [VERSION, ranker.identity, *identity, self.measures.measures, self.measures.depth]
        return digest(orjson.dumps(seen, option=orjson.OPT_SORT_KEYS))

    def _compute(
        self, path: Path, one: EvaluationSet, collection: Collection, exclude: Qrels | None, ranker: Ranker,
        report: Report,
    ) -> None:  # fmt: skip
        from gradeloom.tasks.evaluate.measures import measure
        from gradeloom.tasks.evaluate.trec import write_run

        run = ranker.rank(collection, self.measures.depth, one.pool, exclude, report)
        values = measure(
            run,
            collection.qrels,
            self.measures.measures,
            binary_at=one.binary_at,
            gain_offset=one.gain_offset,
        )
        path.parent.mkdir(parents=True, exist_ok=True)
        write_run(path.with_suffix(".trec"), run, ranker.name)
        write_bytes_whole(path, orjson.dumps(values))


def read_set(one: EvaluationSet, releases: str, place: str = "sets") -> Collection:
    """A test collection that has something to measure.

    Raises:
        InputError: it cannot be read, or no query of it is judged.
    """
    from gradeloom.tasks.collection import read_collection

    collection = read_collection(one, releases=releases, name=one.name)
    # A judged query whose text is not here was not asked; it is no query without an answer.
    qrels = {
        query_id: grades for query_id, grades in collection.qrels.items() if query_id in collection.queries
    }
    if not any(qrels.values()):
        raise InputError("no query of this set has a judgement", field=f"{place}.{one.name}")
    return replace(collection, qrels=qrels)


def set_identity(one: EvaluationSet, collection: Collection, exclude: Qrels | None) -> list[Any]:
    """What a test collection is, wherever its files lie: their digests, its settings, what it leaves out."""
    settings = {key: value for key, value in content_view(one).items() if key not in _PLACES}
    return [collection.identity, settings, exclude]


def excluded(one: EvaluationSet) -> Qrels | None:
    """What a set leaves out of its queries' rankings.

    Raises:
        InputError: it cannot be read.
    """
    from gradeloom.tasks.collection import read_qrels

    return read_qrels(one.exclude) if one.exclude is not None else None


def reporter(progress: Progress, thread: Thread, stage: str, unit: str) -> Report:
    """What blocking work calls with (done, total): shown as a stage, and where it notices it is unwanted.

    To be called on the event loop's thread; the reporter then is called from another.
    """
    import asyncio

    loop = asyncio.get_running_loop()
    show = following(progress, stage, unit)

    def report(done: int, total: int) -> None:
        thread.alive()
        loop.call_soon_threadsafe(show, done, total)

    return report


def _read(path: Path) -> dict[str, dict[str, float]]:
    try:
        values: dict[str, dict[str, float]] = orjson.loads(path.read_bytes())
    except (OSError, orjson.JSONDecodeError) as error:
        raise InputError("damaged; delete it and start again", file=path) from error
    return values


# --- the flow -------------------------------------------------------------------------------


@dataclass(frozen=True)
class EvaluateResult:
    """What `retriever evaluate` found, and the folder that holds it."""

    folder: Path
    evaluation: Evaluation
    seconds: float

    @property
    def stopped(self) -> str | None:
        return None

    @property
    def ended(self) -> str:
        return f"evaluated: {self.folder}"

    def as_json(self) -> dict[str, Any]:
        return {"folder": self.folder, "seconds": self.seconds, **self.evaluation.as_json()}

    async def report(self, tasks: Orchestration) -> None:
        await report_evaluation(tasks, self.evaluation, self.folder)
        await facts_artifact(tasks, "retriever-report", {"folder": self.folder.resolve()}, "Where it lies.")


async def report_evaluation(tasks: Orchestration, evaluation: Evaluation, folder: Path) -> None:
    """Publish an evaluation: its table, the comparisons, the plot, and a link to its folder."""
    for key, table in (
        ("retriever-results", evaluation.table()),
        ("retriever-comparisons", evaluation.comparison_table()),
    ):
        rows = [dict(zip(table.header, row, strict=True)) for row in table.rows]
        if rows:
            await tasks.table(key, rows, table.note)
    await tasks.image("retriever-plot", folder / "plot.png", "Per set, with intervals.")
    await tasks.link(
        "retriever-evaluation", folder.resolve().as_uri(), str(folder), "Runs, values per query."
    )


def evaluate_named(config: EvaluateConfig) -> Named:
    """What Prefect shows of an evaluation."""
    return Named("evaluate", "Retrievers and BM25 on test collections.", config.name)


def with_retrievers(config: EvaluateConfig, more: Sequence[str]) -> EvaluateConfig:
    """A configuration with more retrievers, each `NAME=MODEL`.

    They run where the configuration's first retriever runs and read as many tokens, for what is compared
    should have seen the same of a text.

    Raises:
        InputError: not of that form, or a name that stands already.
    """
    retrievers = list(config.retrievers)
    for text in more:
        name, equals, model = text.partition("=")
        if not equals or not model:
            raise InputError(f"expected NAME=MODEL, got '{text}'", field="--retriever")
        if name in [retriever.name for retriever in retrievers] or name == BM25:
            raise InputError(f"there is a retriever '{name}' already", field="--retriever")
        same = config.retrievers[0].model_dump(include=_SHARED) if config.retrievers else {}
        retrievers.append(_named_encoder(name, model, same))
    return config.model_copy(update={"retrievers": tuple(retrievers)})


_SHARED = {"query_tokens", "passage_tokens", "device", "batch_size"}


def _named_encoder(name: str, model: str, same: dict[str, Any]) -> NamedEncoder:
    from pydantic import ValidationError

    try:
        return NamedEncoder.model_validate({"name": name, "model": model, **same})
    except ValidationError as error:
        message = error.errors()[0]["msg"].replace("String should", "a name should")
        raise InputError(f"'{name}': {message}", field="--retriever") from None


async def run_evaluate(config: EvaluateConfig, *, progress: Progress, tasks: Orchestration) -> EvaluateResult:
    """Evaluate every retriever on every set; the folder `<root>/<name>` is replaced when all is done.

    Raises:
        InputError: nothing to evaluate, a model or collection that is not there, an unknown measure or
            baseline.
    """
    from gradeloom.tasks.evaluate.retrieval import evaluation

    started = time.time()
    if not config.retrievers and not config.measures.bm25:
        raise InputError("nothing to evaluate: name a retriever, or set measures.bm25", field="retrievers")
    root = Path(config.root)
    names = [one.name for one in config.retrievers] + [BM25] * config.measures.bm25
    check_measures(config.measures, names)
    with RunDirectory(root / ".work" / config.name).locked():
        rankers = [encoder_ranker(one.name, one) for one in config.retrievers]
        if config.measures.bm25:
            rankers.append(bm25_ranker())
        cells = Cells(root, config.sets, config.measures, config.releases, progress, tasks)
        rows = await cells.rows(rankers)
        found = await Thread().run(
            lambda: evaluation(
                rows, baseline=config.measures.baseline, permutations=config.measures.permutations,
                seed=config.measures.seed, about=about(config.sets, rankers),
            )
        )  # fmt: skip
        folder = root / config.name
        await Thread().run(lambda: found.write(folder))
    return EvaluateResult(folder, found, round(time.time() - started, 3))


def check_measures(measures: MeasuresConfig, rows: Sequence[str]) -> None:
    """Find out before anything long that a measure is unknown, or that the baseline is none of the rows.

    Raises:
        InputError: so it is.
    """
    from gradeloom.tasks.evaluate.measures import measure

    if measures.baseline is not None and measures.baseline not in rows:
        raise InputError(
            f"there is no row '{measures.baseline}'; expected one of: {', '.join(rows)}",
            field="measures.baseline",
        )
    measure({}, {}, measures.measures)


def about(sets: Sequence[EvaluationSet], rankers: Sequence[Ranker]) -> dict[str, Any]:
    """What was evaluated, for results.json."""
    return {
        "retrievers": {ranker.name: ranker.identity for ranker in rankers},
        "sets": {one.name: content_view(one) for one in sets},
        "gain": "linear: grade - gain_offset",
    }
