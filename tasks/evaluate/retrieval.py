"""What an evaluation found: several retrievers on several sets, compared with one of them.

An `Evaluation` holds per-query values and what follows from them: means with bootstrap intervals, and
paired randomisation tests against the baseline. It is data; the terminal's and Prefect's tables are
drawn from `table` and `comparison_table`, and `write` leaves a folder:

    results.json        means, intervals, comparisons, and what was evaluated
    per_query.parquet   set, retriever, measure, query_id, value
    plot.png            nDCG@10 per set
    runs/<set>.<retriever>.trec
"""

from __future__ import annotations

import math
import os
import re
import shutil
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import orjson
import pyarrow as pa
import pyarrow.parquet as pq

from gradeloom.schemas.errors import InputError
from gradeloom.tasks.evaluate.significance import bootstrap_interval, compared
from gradeloom.tasks.run import sync_folder

if TYPE_CHECKING:
    from gradeloom.tasks.collection import Run

LEVEL = 0.95
"""Coverage of the intervals."""

ALPHA = 0.05
"""Adjusted p-values below are marked in the table."""

_KEYS = ("set", "retriever", "measure", "query_id")
PER_QUERY: pa.Schema = pa.schema(
    [pa.field(name, pa.string(), nullable=False) for name in _KEYS]
    + [pa.field("value", pa.float64(), nullable=False)]
)

_NAME = re.compile(r"\w[\w.+-]{0,99}")  # set and retriever become a file's name
_ENTRIES = frozenset({"results.json", "per_query.parquet", "plot.png", "runs"})


@dataclass(frozen=True)
class Row:
    """One retriever on one set.

    Attributes:
        set: name of the set.
        retriever: name of the retriever.
        values: measure -> query id -> value, as `measures.measure` returns them.
        run: what it retrieved, or a TREC run file that holds it.
    """

    set: str
    retriever: str
    values: Mapping[str, Mapping[str, float]]
    run: Run | Path | None = None

    def __post_init__(self) -> None:
        for name in (self.set, self.retriever):
            if not _NAME.fullmatch(name):
                raise ValueError(f"{name!r} is no name for a set or retriever: it becomes a file's name")


@dataclass(frozen=True)
class Mean:
    """A retriever's mean on a set, with its query-bootstrap interval. `set` None: the mean over all sets."""

    set: str | None
    retriever: str
    measure: str
    mean: float
    low: float
    high: float
    queries: int


@dataclass(frozen=True)
class Comparison:
    """A retriever against the baseline, by the paired randomisation test.

    `set` None: over all sets, each weighing the same. `p_holm` is adjusted over the retrievers compared
    on that set by that measure. `smallest_detectable` is at two-sided .05, without adjustment, power .8.
    """

    set: str | None
    retriever: str
    measure: str
    difference: float
    p: float
    p_holm: float
    smallest_detectable: float
    queries: int


@dataclass(frozen=True)
class Table:
    """Cells as text, for a terminal or a page; texts are not escaped."""

    header: tuple[str, ...]
    rows: Sequence[tuple[str, ...]]
    note: str

    def markdown(self) -> str:
        """As a table of Markdown; no text of it is markup."""
        lines = [self.header, tuple("---" for _ in self.header), *self.rows]
        table = "\n".join("| " + " | ".join(map(_escaped, line)) + " |" for line in lines)
        return f"{table}\n\n{_escaped(self.note)}"


@dataclass(frozen=True)
class Evaluation:
    """The result of an evaluation; made by `evaluation`."""

    rows: tuple[Row, ...]
    baseline: str
    means: tuple[Mean, ...]
    comparisons: tuple[Comparison, ...]
    permutations: int
    seed: int
    about: Mapping[str, Any] = field(default_factory=dict)

    @property
    def sets(self) -> list[str]:
        return _once(row.set for row in self.rows)

    @property
    def retrievers(self) -> list[str]:
        return _once(row.retriever for row in self.rows)

    @property
    def measures(self) -> list[str]:
        return _once(measure for row in self.rows for measure in row.values)

    def mean(self, set_name: str | None, retriever: str, measure: str) -> Mean | None:
        key = (set_name, retriever, measure)
        return next((m for m in self.means if (m.set, m.retriever, m.measure) == key), None)

    def table(self) -> Table:
        """A row per set and retriever, a column per measure; means that differ significantly are marked."""
        differ = {(c.set, c.retriever, c.measure) for c in self.comparisons if c.p_holm < ALPHA}
        means = {(m.set, m.retriever, m.measure): m for m in self.means}
        rows = []
        for place in [*self.sets, None]:
            for retriever in self.retrievers:
                found = [means.get((place, retriever, measure)) for measure in self.measures]
                if not any(found):
                    continue
                cells = [
                    "" if m is None else f"{m.mean:.3f}" + " *" * ((place, retriever, m.measure) in differ)
                    for m in found
                ]
                queries = str(max(m.queries for m in found if m is not None))
                rows.append((place or "(all sets)", retriever, queries, *cells))
        note = (
            f"*: differs from {self.baseline}, p < {ALPHA:g} (paired randomisation test, seed {self.seed}, "
            "Holm's correction over the retrievers)"
        )
        if any(measure.startswith("nDCG@") for measure in self.measures):
            note += "; nDCG has linear gain"
        return Table(("set", "retriever", "queries", *self.measures), rows, note)

    def comparison_table(self) -> Table:
        """A row per comparison with the baseline."""
        rows = [
            (
                c.set or "(all sets)", c.measure, c.retriever, f"{c.difference:+.4f}", f"{c.p:.4f}",
                f"{c.p_holm:.4f}",
                "" if math.isnan(c.smallest_detectable) else f"{c.smallest_detectable:.4f}",
                str(c.queries),
            )
            for c in self.comparisons
        ]  # fmt: skip
        note = (
            f"difference: from {self.baseline}; p: paired randomisation test, {self.permutations:,} "
            f"permutations at most, seed {self.seed}; detectable: found four times in five at p (Holm) < "
            f"{ALPHA:g}"
        )
        return Table(
            ("set", "measure", "retriever", "difference", "p", "p (Holm)", "detectable", "queries"),
            rows,
            note,
        )

    def as_json(self) -> dict[str, Any]:
        """Plain JSON values; what is not defined is None."""
        return {
            "baseline": self.baseline,
            "permutations": self.permutations,
            "seed": self.seed,
            "interval": LEVEL,
            "about": dict(self.about),
            "means": [_json(mean) for mean in self.means],
            "comparisons": [_json(comparison) for comparison in self.comparisons],
        }

    def per_query(self) -> pa.Table:
        """All values, in the order of the rows."""
        columns: dict[str, list[Any]] = {name: [] for name in PER_QUERY.names}
        for row in self.rows:
            for measure, values in row.values.items():
                columns["set"] += [row.set] * len(values)
                columns["retriever"] += [row.retriever] * len(values)
                columns["measure"] += [measure] * len(values)
                columns["query_id"] += values.keys()
                columns["value"] += map(float, values.values())
        return pa.table(columns, schema=PER_QUERY)

    def plot(self, path: Path) -> None:
        """Draw nDCG@10 (without it, the first measure) per set, with intervals, as a PNG."""
        from gradeloom.tasks.evaluate.plot import plot

        plot(self, path)

    def write(self, folder: Path) -> None:
        """Write the folder whole or not at all; an evaluation that is there already is replaced.

        Raises:
            InputError: the folder holds something else, two rows would share a run file, no space or
                no permission.
        """
        _write(self, folder)


def evaluation(
    rows: Sequence[Row],
    *,
    baseline: str | None = None,
    permutations: int = 10_000,
    seed: int = 0,
    about: Mapping[str, Any] | None = None,
) -> Evaluation:
    """Means, intervals and comparisons of the rows.

    With several sets, retrievers that have a row on every set also get a mean over the sets, and are
    compared by the test stratified by set. `unjudged@k` is no quality and is not tested.

    Args:
        rows: at most one per set and retriever.
        baseline: the retriever the others are compared with; default: that of the first row.
        permutations: of the randomisation test.
        seed: of the test and of the bootstrap.
        about: JSON that describes what was evaluated: identities, gains, settings.

    Raises:
        InputError: the baseline is none of the retrievers.
        ValueError: no rows, two for one set and retriever, or two on one set with different queries.
    """
    if not rows:
        raise ValueError("an evaluation needs a row")
    cells = {(row.set, row.retriever): row.values for row in rows}
    if len(cells) < len(rows):
        raise ValueError("a retriever stands twice on one set")
    retrievers = _once(row.retriever for row in rows)
    baseline = retrievers[0] if baseline is None else baseline
    if baseline not in retrievers:
        raise InputError(
            f"there is no row '{baseline}'; expected one of: {', '.join(retrievers)}", field="baseline"
        )
    sets = _once(row.set for row in rows)
    places: list[tuple[str | None, list[str]]] = [(name, [name]) for name in sets]
    if len(sets) > 1:
        places.append((None, sets))
    means: list[Mean] = []
    comparisons: list[Comparison] = []
    for place, names in places:
        for measure in _once(m for row in rows if row.set in names for m in row.values):
            columns = {}
            for retriever in retrievers:
                column = _column(cells, names, retriever, measure)
                if column is not None:
                    columns[retriever] = column
            for retriever, column in columns.items():
                means.append(_mean(place, retriever, measure, column, seed))
            if baseline in columns and not measure.startswith("unjudged"):
                comparisons += _comparisons(place, measure, columns, baseline, permutations, seed)
    return Evaluation(
        tuple(rows), baseline, tuple(means), tuple(comparisons), permutations, seed, about or {}
    )


@dataclass(frozen=True)
class _Column:
    """One retriever's values by one measure: (set, query id) of each, in order, and the value."""

    keys: tuple[tuple[str, str], ...]
    values: tuple[float, ...]

    @property
    def strata(self) -> list[str]:
        return [name for name, _ in self.keys]


def _column(
    cells: Mapping[tuple[str, str], Mapping[str, Mapping[str, float]]],
    sets: Sequence[str],
    retriever: str,
    measure: str,
) -> _Column | None:
    """The values over these sets, queries in the order of their ids; None where a set lacks them."""
    keys, values = [], []
    for name in sets:
        found = cells.get((name, retriever), {}).get(measure)
        if not found:
            return None
        keys += [(name, query_id) for query_id in sorted(found)]
        values += [float(found[query_id]) for query_id in sorted(found)]
    return _Column(tuple(keys), tuple(values))


def _mean(place: str | None, retriever: str, measure: str, column: _Column, seed: int) -> Mean:
    by_set: dict[str, list[float]] = {}
    for name, value in zip(column.strata, column.values, strict=True):
        by_set.setdefault(name, []).append(value)
    mean = math.fsum(math.fsum(values) / len(values) for values in by_set.values()) / len(by_set)
    low, high = bootstrap_interval(column.values, strata=column.strata, level=LEVEL, seed=seed)
    return Mean(place, retriever, measure, mean, low, high, len(column.values))


def _comparisons(
    place: str | None,
    measure: str,
    columns: Mapping[str, _Column],
    baseline: str,
    permutations: int,
    seed: int,
) -> list[Comparison]:
    base = columns[baseline]
    pairs = {}
    for retriever, column in columns.items():
        if retriever == baseline:
            continue
        if column.keys != base.keys:
            raise ValueError(f"{retriever} and {baseline} have {measure} of different queries")
        pairs[retriever] = column.values, base.values, base.strata
    found = compared(pairs, permutations=permutations, seed=seed, alpha=ALPHA)
    return [
        Comparison(
            place, retriever, measure, one.difference, one.p, one.p_holm, one.smallest_detectable, one.n
        )
        for retriever, one in found.items()
    ]  # fmt: skip


def _escaped(text: str) -> str:
    return re.sub(r"[\\`*_|<>&\[\]$~]", lambda found: "\\" + found[0], text).replace("\n", " ")


def _once(names: Iterable[str]) -> list[str]:
    return list(dict.fromkeys(names))


def _json(record: Mean | Comparison) -> dict[str, Any]:
    return {
        name: None if isinstance(value, float) and not math.isfinite(value) else value
        for name, value in asdict(record).items()
    }


# --- the folder -----------------------------------------------------------------------------


def _write(result: Evaluation, folder: Path) -> None:
    # The names are fixed: what a killed process left here goes with the next write.
    temporary, replaced = (folder.with_name(f".{folder.name}.{what}") for what in ("writing", "replaced"))
    try:
        if folder.exists() and not _replaceable({path.name for path in folder.iterdir()}):
            raise InputError("holds something that is no evaluation; name another folder", file=folder)
        for leftover in (temporary, replaced):
            shutil.rmtree(leftover, ignore_errors=True)
        temporary.mkdir(parents=True)
        _fill(result, temporary)
        _make_last(temporary)
        if folder.exists():
            folder.rename(replaced)
        try:
            temporary.rename(folder)
        except OSError:
            if replaced.exists():
                replaced.rename(folder)
            raise
        sync_folder(folder.parent)
    except OSError as error:
        raise InputError(f"cannot write: {error.strerror or error}", file=folder) from error
    finally:
        for leftover in (temporary, replaced):
            shutil.rmtree(leftover, ignore_errors=True)


def _replaceable(names: set[str]) -> bool:
    """Whether a folder that holds these is empty, or an evaluation and nothing beside it."""
    return not names or {"results.json", "per_query.parquet"} <= names <= _ENTRIES


def _fill(result: Evaluation, folder: Path) -> None:
    from gradeloom.tasks.evaluate.trec import write_run

    data = orjson.dumps(result.as_json(), option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE)
    (folder / "results.json").write_bytes(data)
    pq.write_table(
        result.per_query(), folder / "per_query.parquet", compression="zstd", write_page_checksum=True
    )
    result.plot(folder / "plot.png")
    for row in result.rows:
        if row.run is None:
            continue
        path = folder / "runs" / f"{row.set}.{row.retriever}.trec"
        path.parent.mkdir(exist_ok=True)
        if path.exists():
            raise InputError(f"two rows would be runs/{path.name}; name sets and retrievers without dots")
        if isinstance(row.run, Path):
            shutil.copyfile(row.run, path)
        else:
            write_run(path, row.run, row.retriever)


def _make_last(folder: Path) -> None:
    for path in sorted(folder.rglob("*")):
        if path.is_dir():
            sync_folder(path)
        else:
            with path.open("rb") as file:
                os.fsync(file.fileno())
    sync_folder(folder)
