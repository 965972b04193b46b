"""Would more queries help? A fixed small training on a release, and on its parent at equal size.

Of the release's queries that there is something to learn from, all, a half and a quarter are drawn, each
part of the larger one, and as many as its parent has, if that has fewer; as many of its parent. All are
trained from the same start by the same recipe and for the same number of steps, so that they differ by
their data alone, and evaluated on the same sets. Two questions are asked of the values per query:

- did all queries of the release do better than half of them (would more help)?
- did the release do better than its parent at equal size?

Both differences come with a paired randomisation test, Holm's correction over the two, and the
smallest difference that so many test queries could have shown. One training each: what another seed
would change is not in these numbers, and is said.
"""

from __future__ import annotations

import math
import shutil
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import orjson

from gradeloom.flows.concurrency import Thread
from gradeloom.flows.evaluate import (
    Cells,
    check_measures,
    encoder_ranker,
    excluded,
    read_set,
    set_identity,
)
from gradeloom.flows.orchestrate import Named, Orchestration
from gradeloom.flows.progress import Progress
from gradeloom.flows.retriever import Material, load_encoder, mixed, model_config, train
from gradeloom.schemas.config import content_view
from gradeloom.schemas.errors import InputError
from gradeloom.schemas.retriever import CollectionConfig, EvaluationSet, RetrieverConfig, TrainingSource
from gradeloom.schemas.rows import digest
from gradeloom.tasks.run import RunDirectory, write_bytes_whole, write_whole

if TYPE_CHECKING:
    from gradeloom.tasks.collection import Collection
    from gradeloom.tasks.evaluate.retrieval import Row, Table

VERSION = "2"
ALPHA = 0.05
FEWEST = 8
"""Queries below which a quarter is no training."""

Values = Mapping[str, Mapping[str, float]]
"""Set -> query id -> value."""


@dataclass(frozen=True)
class Point:
    """One training: `release` None is the start, untrained. The interval is over the test queries."""

    release: str | None
    queries: int
    mean: float
    low: float
    high: float


@dataclass(frozen=True)
class Question:
    """A difference of two trainings, a - b, with its paired test."""

    name: str
    a: str
    b: str
    difference: float
    p: float
    p_holm: float
    smallest_detectable: float
    queries: int


@dataclass(frozen=True)
class ProbeResult:
    """What a probe found.

    Attributes:
        measure: the measure of all values: the configuration's first.
        said: the answers in sentences, the last one about noise.
    """

    folder: Path
    release: str
    parent: str | None
    measure: str
    sets: tuple[str, ...]
    steps: int
    points: tuple[Point, ...]
    questions: tuple[Question, ...]
    said: tuple[str, ...]
    seconds: float

    @property
    def stopped(self) -> str | None:
        return None

    @property
    def ended(self) -> str:
        return self.said[0]

    def as_json(self) -> dict[str, Any]:
        return {
            **{name: getattr(self, name) for name in
               ("folder", "release", "parent", "measure", "sets", "steps", "said", "seconds")},
            "points": [asdict(point) for point in self.points],
            "questions": [
                {k: None if isinstance(v, float) and math.isnan(v) else v for k, v in asdict(one).items()}
                for one in self.questions
            ],
        }  # fmt: skip

    def table(self) -> Table:
        """A row per training."""
        from gradeloom.tasks.evaluate.retrieval import Table

        rows: list[tuple[str, ...]] = [
            (point.release or "(start)", str(point.queries), f"{point.mean:.3f}",
             f"{point.low:.3f} to {point.high:.3f}")
            for point in self.points
        ]  # fmt: skip
        note = f"mean {self.measure} on {', '.join(self.sets)}; {self.steps:,} steps each"
        return Table(("trained on", "queries", self.measure, "95% interval"), rows, note)

    async def report(self, tasks: Orchestration) -> None:
        from gradeloom.flows.orchestrate import plain

        table = self.table()
        rows = [dict(zip(table.header, row, strict=True)) for row in table.rows]
        await tasks.table("probe-results", rows, table.note)
        await tasks.markdown(
            "probe-answer", "\n\n".join(plain(said) for said in self.said), "Would more help?"
        )
        await tasks.image("probe-plot", self.folder / "plot.png", "The learning curve.")
        await tasks.link(
            "probe-folder", self.folder.resolve().as_uri(), str(self.folder), "Values per query."
        )


def probe_named(config: RetrieverConfig, release: str) -> Named:
    """What Prefect shows of a probe."""
    return Named("probe", "Would more queries help?", f"{config.name} {release}")


async def run_probe(
    config: RetrieverConfig, *, progress: Progress, tasks: Orchestration, release: str,
    parent: str | None = None,
) -> ProbeResult:  # fmt: skip
    """Probe a release; the folder is `<root>/<name>-probe/<release>@<version>`.

    Args:
        config: start, loss, training and sets; its sources of data give way to the release, but for the
            transforms of the first that is a release.
        progress: hears of trainings and searches.
        tasks: each training and each search is a shard.
        release: `name`, `name@version` or a folder.
        parent: likewise; default: the one that the release's manifest names.

    Raises:
        InputError: a release, model or set is not there, or a release has too few queries.
    """
    started = time.time()
    sets = config.sets or ((config.dev,) if config.dev is not None else ())
    if not sets:
        raise InputError("a probe needs test sets", field="sets")
    check_measures(config.measures.model_copy(update={"baseline": None}), [])
    releases = await Thread().run(lambda: _releases(config, release, parent))
    source = next((one for one in config.data if one.release is not None), config.data[0])
    whole = await Thread().run(
        lambda: {name: _material(config, source, name, found) for name, found in releases.items()}
    )
    sizes = [len(material.lists.lists) for material in whole.values()]
    if min(sizes) < FEWEST:
        raise InputError(
            f"a probe needs at least {FEWEST} queries to learn from, found {min(sizes)}", field="--release"
        )
    size, common = sizes[0], min(sizes)
    steps = config.training.max_steps or max(
        1, round(config.training.epochs * size / config.training.batch_size)
    )
    name, *others = whole
    points = [(name, part) for part in sorted({size // 4, size // 2, size, common})]
    points += [(other, common) for other in others]
    folder = Path(config.root) / f"{config.name}-probe" / name
    with RunDirectory(folder).locked():
        probe = _Probe(config, sets, steps, folder, progress, tasks)
        values: dict[tuple[str | None, int], Values] = {(None, 0): await probe.start()}
        for which, part in points:
            values[which, part] = await probe.trained(which, whole[which], part)
        asked = [("more queries", (name, size), (name, size // 2))]
        asked += [("release against parent", (name, common), (other, common)) for other in others]
        result = _result(folder, list(whole), probe.measure, sets, steps, asked, values,
                         config.measures.permutations)  # fmt: skip
        result = replace(result, seconds=round(time.time() - started, 3))
        await Thread().run(lambda: _write(result, values))
    return result


def _releases(config: RetrieverConfig, release: str, parent: str | None) -> dict[str, Collection]:
    """The release and, if there is one, its parent, by `name@version`."""
    from gradeloom.tasks.collection import read_collection
    from gradeloom.tasks.release.catalog import find, read_manifest

    def read(which: str) -> tuple[str, Collection, str | None]:
        found = find(config.releases, which)
        content = read_manifest(found).content
        collection = read_collection(CollectionConfig(release=str(found)), releases=config.releases)
        before = f"{content.name}@{content.parent}" if content.parent is not None else None
        return f"{content.name}@{content.version}", collection, before

    name, collection, before = read(release)
    releases = {name: collection}
    if parent is not None or before is not None:
        other, its, _ = read(parent or before or "")
        if other == name:
            raise InputError(f"{name} cannot be compared with itself", field="--parent")
        releases[other] = its
    return releases


def _material(config: RetrieverConfig, source: TrainingSource, name: str, collection: Collection) -> Material:
    """All lists that a release gives under the source's transforms."""
    source = source.model_copy(
        update={"name": name, "limit": None, "share": 1.0, "release": name, "path": None, "queries": None,
                "corpus": None, "qrels": None}
    )  # fmt: skip
    return mixed(config.model_copy(update={"data": (source,), "dev": None}), [(source, collection)])


def drawn(whole: Material, size: int, seed: int) -> Material:
    """`size` of the lists: the first in an order that the seed shuffles.

    A smaller draw is part of a larger one, and the order of two queries that two releases share is the
    same in both.
    """
    order = sorted(whole.lists.lists, key=lambda one: digest(str(seed), one.query_id, length=32))
    chosen = {one.query_id for one in order[:size]}
    lists = tuple(one for one in whole.lists.lists if one.query_id in chosen)
    return replace(whole, lists=replace(whole.lists, lists=lists))


class _Probe:
    """Trains and measures, or reads what was measured before."""

    def __init__(
        self, config: RetrieverConfig, sets: Sequence[EvaluationSet], steps: int, folder: Path,
        progress: Progress, tasks: Orchestration,
    ) -> None:  # fmt: skip
        training = config.training.model_copy(update={"max_steps": steps})
        self.config = config.model_copy(update={"training": training, "dev": None})
        self.sets, self.steps, self.folder, self.progress, self.tasks = sets, steps, folder, progress, tasks
        self.measure = config.measures.measures[0]
        self.cells = Cells(Path(config.root), sets, config.measures, config.releases, progress, tasks)
        self.identity: list[Any] = []  # of the start and the sets

    async def start(self) -> Values:
        """The values of the start, untrained."""
        self.identity = await Thread().run(self._identity)
        return self._values(await self.cells.rows([encoder_ranker("start", self.config.encoder)]))

    def _identity(self) -> list[Any]:
        from gradeloom.tasks.encoder import encoder_identity

        sets = [set_identity(one, read_set(one, self.config.releases), excluded(one)) for one in self.sets]
        return [encoder_identity(self.config.encoder), content_view(self.config.encoder), sets]

    async def trained(self, name: str, whole: Material, size: int) -> Values:
        """The values of a training on so many queries; its model is not kept."""
        config, data = self.config, drawn(whole, size, self.config.training.seed)
        loss = [content_view(term) for term in config.loss]
        view = [VERSION, *self.identity, data.lists.digest, loss, content_view(config.training),
                self.measure, config.measures.depth]  # fmt: skip
        key = digest(orjson.dumps(view, option=orjson.OPT_SORT_KEYS))
        record, work = self.folder / f"{size}.{key}.json", self.folder / f"{size}.{key}.training"
        if not record.exists():
            self.progress.say(f"training on {size:,} queries of {name}, {self.steps:,} steps")
            done = await train(
                config, data, work, progress=self.progress, tasks=self.tasks,
                load=lambda: load_encoder(config.encoder),
            )  # fmt: skip
            encoder = model_config(config.encoder, done.folder)
            values = self._values(await self.cells.rows([encoder_ranker(f"trained-{size}", encoder)]))
            write_bytes_whole(record, orjson.dumps(values, option=orjson.OPT_INDENT_2))
        shutil.rmtree(work, ignore_errors=True)
        found: dict[str, dict[str, float]] = orjson.loads(record.read_bytes())
        return found

    def _values(self, rows: Sequence[Row]) -> Values:
        return {row.set: row.values[self.measure] for row in rows}


# --- the answers ----------------------------------------------------------------------------


def _result(
    folder: Path, names: Sequence[str], measure: str, sets: Sequence[EvaluationSet], steps: int,
    asked: Sequence[tuple[str, tuple[str, int], tuple[str, int]]],
    values: Mapping[tuple[str | None, int], Values], permutations: int,
) -> ProbeResult:  # fmt: skip
    parent = names[1] if len(names) > 1 else None
    questions = ask(
        [(name, _label(a), _label(b), values[a], values[b]) for name, a, b in asked], permutations
    )
    where = f"{measure} on {', '.join(one.name for one in sets)}"
    return ProbeResult(
        folder, names[0], parent, measure, tuple(one.name for one in sets), steps,
        tuple(_point(release, queries, found) for (release, queries), found in values.items()),
        tuple(questions), (*(answer(one, where) for one in questions), NOISE), 0.0,
    )  # fmt: skip


NOISE = (
    "Each number is one training: the tests speak of other test queries, not of another seed or another draw "
    "of training queries, which can move a training of this size as much."
)


def _label(point: tuple[str, int]) -> str:
    return f"{point[1]:,} queries of {point[0]}"


def _pairs(values: Values) -> tuple[list[float], list[str]]:
    """The values in a fixed order, and the set that each belongs to."""
    keys = [(name, query_id) for name, found in values.items() for query_id in sorted(found)]
    return [values[name][query_id] for name, query_id in keys], [name for name, _ in keys]


def _point(release: str | None, queries: int, values: Values) -> Point:
    from gradeloom.tasks.evaluate.significance import bootstrap_interval

    x, strata = _pairs(values)
    low, high = bootstrap_interval(x, strata=strata, seed=0)
    means = [math.fsum(found.values()) / len(found) for found in values.values()]
    return Point(release, queries, math.fsum(means) / len(means), low, high)


def ask(asked: Sequence[tuple[str, str, str, Values, Values]], permutations: int) -> list[Question]:
    """The differences (name, label of a, label of b, values of a, values of b), tested together."""
    from gradeloom.tasks.evaluate.significance import compared

    pairs = {}
    for name, _, _, one, other in asked:
        (a, strata), (b, _) = _pairs(one), _pairs(other)
        pairs[name] = a, b, strata
    found = compared(pairs, permutations=permutations, seed=0, alpha=ALPHA)
    return [
        Question(
            name, a, b, found[name].difference, found[name].p, found[name].p_holm,
            found[name].smallest_detectable, found[name].n,
        )
        for name, a, b, _, _ in asked
    ]  # fmt: skip


def answer(one: Question, where: str) -> str:
    """A question's answer in a sentence, no surer than its numbers."""
    tested = f"(p = {one.p_holm:.3f}, {one.queries:,} test queries)"
    moved = f"{one.a} against {one.b}: {one.difference:+.3f} {where} {tested}"
    if one.p_holm < ALPHA:
        better, worse = {
            "more queries": ("more queries helped, and still more may", "more queries made it worse"),
        }.get(one.name, ("the release is better than its parent", "the release is worse than its parent"))
        return f"{moved}: {better if one.difference > 0 else worse}."
    seen = (
        "" if math.isnan(one.smallest_detectable)
        else f"; a difference below {one.smallest_detectable:.3f} would mostly be missed"
    )  # fmt: skip
    return f"{moved}: no difference that could be told from chance{seen}."


# --- the folder -----------------------------------------------------------------------------


def _write(result: ProbeResult, values: Mapping[tuple[str | None, int], Values]) -> None:
    per_query = [
        {"release": release, "queries": queries, "values": found}
        for (release, queries), found in values.items()
    ]
    facts = result.as_json() | {"per_query": per_query}
    write_bytes_whole(
        result.folder / "results.json", orjson.dumps(facts, option=orjson.OPT_INDENT_2, default=str)
    )
    write_whole(result.folder / "plot.png", lambda temporary: _plot(result, temporary))


def _plot(result: ProbeResult, path: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6.0, 4.0), layout="constrained", dpi=150)
    axes = figure.add_subplot()
    start = next(point for point in result.points if point.release is None)
    axes.axhline(start.mean, color="0.5", linestyle=":", label="start, untrained")
    for release, colour, marker in zip(
        (result.release, result.parent), ("#0072B2", "#D55E00"), "os", strict=True
    ):
        points = [point for point in result.points if point.release is not None and point.release == release]
        if points:
            errors = [
                [p.mean - min(p.low, p.mean) for p in points],
                [max(p.high, p.mean) - p.mean for p in points],
            ]
            axes.errorbar([p.queries for p in points], [p.mean for p in points], yerr=errors, color=colour,
                          marker=marker, capsize=2.5, label=release)  # fmt: skip
    axes.set_xlabel("training queries")
    axes.set_ylabel(f"{result.measure} ({', '.join(result.sets)})")
    axes.set_title(f"{result.steps:,} steps each, 95% intervals over test queries", fontsize=10)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=9)
    figure.savefig(path, format="png")
