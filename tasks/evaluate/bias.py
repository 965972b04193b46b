"""Source bias: whether a retriever prefers what a language model wrote over what people wrote.

A twin is a rewrite of a real passage with the same meaning. Two figures, after Dai et al. 2024 (Cocktail)
and 2602.10833; q runs over the queries with a twin:

    w - 1/2 = mean over q of P[s(q, twin) > s(q, real)] - 1/2    over q's twins; equal scores count half
    D       = 200 (M_H - M_L) / (M_H + M_L) %                    M: mean over q of nDCG@5

w - 1/2 above 0 and D below 0 favour the language model. For D, a query's pool is

- its twins, each with the grade of its real passage,
- their real passages, and
- its passages judged irrelevant.

M_H counts only the real passages as relevant, M_L only the twins; gains are linear. Relevant passages
without a twin are left out of the pool: else people would have more to be found than the model, and D
would say how many twins there are. A query none of whose twins is relevant counts 0 in both means, which
leaves D as it is without it; it counts in w all the same.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import numpy as np
import orjson
from numpy.typing import NDArray

from gradeloom.schemas.errors import InputError
from gradeloom.tasks.evaluate.measures import measure
from gradeloom.tasks.evaluate.significance import bootstrap_interval

if TYPE_CHECKING:
    from gradeloom.tasks.collection import Collection, Qrels, Run
    from gradeloom.tasks.encoder import Encoder

MEASURE = "nDCG@5"

Writer = Literal["human", "llm"]
Text = tuple[str, Writer]
"""A text of a pool: the id of the real passage, and who wrote this one."""

Pools = dict[str, dict[Text, str]]
"""Query id -> what is in its pool -> text."""

Statistic = Callable[[NDArray[np.float64]], NDArray[np.float64]]
"""Means (resamples, columns) -> figures (resamples,)."""

_WRITERS: tuple[Writer, Writer] = ("human", "llm")
_FIELDS = ("query_id", "passage_id", "twin")


@dataclass(frozen=True)
class Twin:
    """A rewrite of a real passage that is judged for a query."""

    query_id: str
    passage_id: str
    text: str


@dataclass(frozen=True)
class SourceBias:
    """How a retriever treats twins; the formulas are the module's.

    Attributes:
        w_minus_half: above 0 favours the language model.
        d: in percent; below 0 favours the language model. None where nothing relevant is found.
        queries: with a twin.
        twins: in all.
        wins: query id -> share of its twins that score above their real passage.
        human, llm: query id -> nDCG@5 with people's, with the language model's texts as relevant.
        seed: of the intervals.
        w_interval, d_interval: 95 % bootstrap intervals over queries; None where a resample has no D.
    """

    w_minus_half: float
    d: float | None
    queries: int
    twins: int
    wins: dict[str, float]
    human: dict[str, float]
    llm: dict[str, float]
    seed: int
    w_interval: tuple[float, float]
    d_interval: tuple[float, float] | None


@dataclass(frozen=True)
class BiasChange:
    """After less before, with 95 % bootstrap intervals: each resample has the same queries on both sides."""

    w: float
    w_interval: tuple[float, float]
    d: float | None
    d_interval: tuple[float, float] | None
    queries: int
    seed: int


def read_twins(path: str | Path) -> list[Twin]:
    """Twins out of JSON lines of query_id, passage_id, twin.

    Raises:
        InputError: no such file; a line that is no JSON object with these three texts; a second twin of
            one passage for one query; no twin at all.
    """
    file = Path(path)
    try:
        lines = file.read_bytes().split(b"\n")
    except OSError as error:
        raise InputError(f"cannot be read: {error.strerror}", file=file) from error
    twins: dict[tuple[str, str], Twin] = {}
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        twin = _twin(file, number, line)
        key = twin.query_id, twin.passage_id
        if key in twins:
            message = f"a second twin of passage '{twin.passage_id}' for query '{twin.query_id}'"
            raise InputError(message, file=file, row=number, field="passage_id")
        twins[key] = twin
    if not twins:
        raise InputError(f"holds no twins; expected JSON lines of {', '.join(_FIELDS)}", file=file)
    return list(twins.values())


def _twin(file: Path, number: int, line: bytes) -> Twin:
    try:
        row = orjson.loads(line)
    except orjson.JSONDecodeError as error:
        raise InputError(f"no JSON: {error}", file=file, row=number) from error
    if not isinstance(row, dict):
        raise InputError(f"expected an object with {', '.join(_FIELDS)}", file=file, row=number)
    for field in _FIELDS:
        if not isinstance(row.get(field), str) or not row[field].strip():
            raise InputError("expected a text that is not empty", file=file, row=number, field=field)
    return Twin(row["query_id"], row["passage_id"], row["twin"])


def source_bias(
    encoder: Encoder,
    collection: Collection,
    twins: Sequence[Twin],
    *,
    gain_offset: float = 0,
    seed: int = 0,
) -> SourceBias:
    """How the encoder treats the twins.

    Args:
        encoder: the retriever.
        collection: the judged passages and queries that the twins belong to.
        twins: at least one, and one per query and passage at most.
        gain_offset: grades up to here are irrelevant; taken off every grade to get its gain.
        seed: of the intervals.

    Raises:
        InputError: a twin of a query or passage that the collection does not hold, or of a passage that is
            not judged for the query; gains that are not whole.
        ValueError: no twins, or two of one passage for one query.
    """
    by_query = _by_query(collection, twins)
    pools = {query: _pool(collection, query, own, gain_offset) for query, own in by_query.items()}
    scores = _scores(encoder, collection, pools)
    wins = {query: _share_above(own, scores[query]) for query, own in by_query.items()}
    human, llm = (_found(scores, _relevant(collection, by_query, writer), gain_offset) for writer in _WRITERS)
    values = _columns(wins, human, llm)
    means = values.mean(axis=0, keepdims=True)
    return SourceBias(
        w_minus_half=float(_w(means)[0]),
        d=_number(_d(means)[0]),
        queries=len(by_query),
        twins=len(twins),
        wins=wins,
        human=human,
        llm=llm,
        seed=seed,
        w_interval=_interval(values, _w, seed),
        d_interval=_defined(_interval(values, _d, seed)),
    )


def bias_change(before: SourceBias, after: SourceBias, *, seed: int = 0) -> BiasChange:
    """How much the bias has changed.

    Raises:
        ValueError: they are of different queries.
    """
    if before.wins.keys() != after.wins.keys():
        raise ValueError("source bias of different queries cannot be compared")
    values = np.hstack([
        _columns(one.wins, one.human, one.llm, order=before.wins) for one in (before, after)
    ])  # fmt: skip
    return BiasChange(
        w=after.w_minus_half - before.w_minus_half,
        w_interval=_interval(values, lambda means: _w(means[:, 3:]) - _w(means[:, :3]), seed),
        d=None if before.d is None or after.d is None else after.d - before.d,
        d_interval=_defined(_interval(values, lambda means: _d(means[:, 3:]) - _d(means[:, :3]), seed)),
        queries=len(values),
        seed=seed,
    )


# --- pools and scores -----------------------------------------------------------------------


def _by_query(collection: Collection, twins: Sequence[Twin]) -> dict[str, list[Twin]]:
    if not twins:
        raise ValueError("source bias needs twins")
    if len({(twin.query_id, twin.passage_id) for twin in twins}) < len(twins):
        raise ValueError("a passage has two twins for one query")
    by_query: dict[str, list[Twin]] = {}
    for twin in twins:
        if twin.query_id not in collection.queries:
            raise InputError(f"a twin's query '{twin.query_id}' is not in {collection.name}")
        if twin.passage_id not in collection.passages:
            raise InputError(f"a twin's passage '{twin.passage_id}' is not in {collection.name}")
        if twin.passage_id not in collection.qrels.get(twin.query_id, {}):
            raise InputError(
                f"a twin's passage '{twin.passage_id}' is not judged for query '{twin.query_id}' in "
                f"{collection.name}"
            )
        by_query.setdefault(twin.query_id, []).append(twin)
    return by_query


def _pool(collection: Collection, query: str, own: Sequence[Twin], gain_offset: float) -> dict[Text, str]:
    real = {twin.passage_id for twin in own}
    real |= {
        passage
        for passage, grade in collection.qrels[query].items()
        if grade <= gain_offset and passage in collection.passages
    }
    pool: dict[Text, str] = {(passage, "human"): collection.passages[passage] for passage in sorted(real)}
    return pool | {(twin.passage_id, "llm"): twin.text for twin in own}


def _relevant(
    collection: Collection, by_query: Mapping[str, Sequence[Twin]], writer: Writer
) -> dict[str, dict[Text, float]]:
    """The grades of one writer's texts; a twin has that of its real passage."""
    return {
        query: {(twin.passage_id, writer): collection.qrels[query][twin.passage_id] for twin in own}
        for query, own in by_query.items()
    }


def _scores(encoder: Encoder, collection: Collection, pools: Pools) -> dict[str, dict[Text, float]]:
    texts = list(dict.fromkeys(text for pool in pools.values() for text in pool.values()))
    place = {text: i for i, text in enumerate(texts)}  # equal texts get equal scores
    passages = encoder.encode_passages(texts)
    queries = encoder.encode_queries([collection.queries[query] for query in pools])
    return {
        query: {key: float(passages[place[text]] @ vector) for key, text in pool.items()}
        for (query, pool), vector in zip(pools.items(), queries, strict=True)
    }


def _share_above(own: Sequence[Twin], scores: Mapping[Text, float]) -> float:
    leads = [scores[twin.passage_id, "llm"] - scores[twin.passage_id, "human"] for twin in own]
    return float(np.heaviside(leads, 0.5).mean())


def _found(
    scores: Mapping[str, Mapping[Text, float]],
    relevant: Mapping[str, Mapping[Text, float]],
    gain_offset: float,
) -> dict[str, float]:
    """nDCG@5 per query. Ids decide between equal scores, so the mean of both orders of the writers."""
    values = []
    for first in _WRITERS:
        run: Run = {q: {_id(text, first): s for text, s in own.items()} for q, own in scores.items()}
        qrels: Qrels = {q: {_id(text, first): g for text, g in own.items()} for q, own in relevant.items()}
        values.append(measure(run, qrels, [MEASURE], gain_offset=gain_offset)[MEASURE])
    return {query: (values[0][query] + values[1][query]) / 2 for query in scores}


def _id(text: Text, first: Writer) -> str:
    """An id by which, of equal scores, a passage of `first` ranks before its twin: the greater id does."""
    passage, writer = text
    return f"{passage}/{int(writer == first)}"


# --- figures --------------------------------------------------------------------------------


def _columns(*columns: Mapping[str, float], order: Mapping[str, float] | None = None) -> NDArray[np.float64]:
    """(queries, columns)."""
    return np.array([[column[query] for column in columns] for query in order or columns[0]])


def _w(means: NDArray[np.float64]) -> NDArray[np.float64]:
    """Of means (m, 3) of wins, nDCG@5 of H and of L: (m,)."""
    return means[:, 0] - 0.5


def _d(means: NDArray[np.float64]) -> NDArray[np.float64]:
    """Likewise; NaN where nothing is found."""
    human, llm = means[:, 1], means[:, 2]
    with np.errstate(invalid="ignore"):
        return 200 * (human - llm) / (human + llm)


def _number(value: float) -> float | None:
    return float(value) if math.isfinite(value) else None


def _interval(values: NDArray[np.float64], statistic: Statistic, seed: int) -> tuple[float, float]:
    """NaN where a resample has none."""
    low, high = bootstrap_interval(values, statistic=statistic, seed=seed)
    return low, high


def _defined(interval: tuple[float, float]) -> tuple[float, float] | None:
    return None if math.isnan(interval[0]) else interval
