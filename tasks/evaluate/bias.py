"""Source bias: whether a retriever prefers what a language model wrote over what people wrote.

Twins are rewrites of real passages with the same meaning. Source: "Source bias, exactly" of the method's
description, after Dai et al. 2024 (Cocktail) and 2602.10833.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import orjson
from numpy.typing import NDArray

from gradeloom.schemas.errors import InputError
from gradeloom.tasks.collection import Collection, Qrels, Run
from gradeloom.tasks.encoder import Encoder
from gradeloom.tasks.evaluate.measures import measure

MEASURE = "nDCG@5"
RESAMPLES = 10_000


@dataclass(frozen=True)
class Twin:
    """A rewrite of a real passage that is judged for a query."""

    query_id: str
    passage_id: str
    text: str


@dataclass(frozen=True)
class SourceBias:
    """How a retriever treats twins.

    Attributes:
        w_minus_half: mean over queries of the share of a query's twins that score above their real
            passage (equal scores count half), less 1/2; above 0 favours the language model.
        d: 200 (M_H - M_L) / (M_H + M_L) in percent, M the mean nDCG@5 with only human (H) or only language
            model (L) texts counted as relevant; below 0 favours the language model. None where neither
            finds anything.
        queries: with a twin.
        twins: in all.
        wins, human, llm: per query: the share above, nDCG@5 for H, and for L.
        seed: of the intervals.
        w_interval, d_interval: 95 % bootstrap intervals over queries.
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
    """After less before, with 95 % bootstrap intervals over the same queries."""

    w: float
    w_interval: tuple[float, float]
    d: float | None
    d_interval: tuple[float, float] | None
    queries: int
    seed: int


def read_twins(path: str | Path) -> list[Twin]:
    """Twins out of JSON lines of query_id, passage_id, twin.

    Raises:
        InputError: no such file, a line that is none, a text that is empty, or no twin at all.
    """
    file = Path(path)
    try:
        lines = file.read_bytes().splitlines()
    except OSError as error:
        raise InputError(f"cannot be read: {error.strerror}", file=file) from error
    twins = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            row = orjson.loads(line)
        except orjson.JSONDecodeError as error:
            raise InputError(f"no JSON: {error}", file=file, row=number) from error
        for field in ("query_id", "passage_id", "twin"):
            if not isinstance(row, dict) or not isinstance(row.get(field), str) or not row[field].strip():
                raise InputError("expected a text that is not empty", file=file, row=number, field=field)
        twins.append(Twin(row["query_id"], row["passage_id"], row["twin"]))
    if not twins:
        raise InputError("holds no twins; expected JSON lines of query_id, passage_id, twin", file=file)
    return twins


def source_bias(
    encoder: Encoder, collection: Collection, twins: Sequence[Twin], *, seed: int = 0
) -> SourceBias:
    """How the encoder treats the twins.

    The pool of a query for D is its twins, their real passages, and its passages judged irrelevant
    (grade <= 0); a twin has the grade of its real passage. Relevant passages without a twin are left out,
    else H had more to find than L.

    Args:
        encoder: the retriever.
        collection: the judged passages and queries that the twins belong to.
        twins: at least one.
        seed: of the intervals.

    Raises:
        InputError: a twin of a query or passage that the collection does not hold, or judged nowhere.
    """
    by_query: dict[str, list[Twin]] = {}
    for twin in twins:
        if twin.query_id not in collection.queries:
            raise InputError(f"a twin's query '{twin.query_id}' is not in {collection.name}")
        if twin.passage_id not in collection.passages:
            raise InputError(f"a twin's passage '{twin.passage_id}' is not in {collection.name}")
        if twin.passage_id not in collection.qrels.get(twin.query_id, {}):
            raise InputError(f"passage '{twin.passage_id}' of a twin is not judged for '{twin.query_id}'")
        by_query.setdefault(twin.query_id, []).append(twin)
    pools = {query: _pool(collection, query, own) for query, own in by_query.items()}
    scores = _scores(encoder, collection, pools)
    wins = {query: _share_above(own, scores[query]) for query, own in by_query.items()}
    human: Qrels = {}
    llm: Qrels = {}
    for query, own in by_query.items():
        grades = collection.qrels[query]
        human[query] = {twin.passage_id: grades[twin.passage_id] for twin in own}
        llm[query] = {_twin_id(i, twin): grades[twin.passage_id] for i, twin in enumerate(own)}
    found = [measure(scores, qrels, [MEASURE])[MEASURE] for qrels in (human, llm)]
    columns = [np.array([values[query] for query in by_query]) for values in (wins, *found)]
    draws = _draws(len(by_query), seed)
    w, d = _statistics(columns, draws)
    return SourceBias(
        w_minus_half=float(columns[0].mean() - 0.5),
        d=_difference(float(columns[1].mean()), float(columns[2].mean())),
        queries=len(by_query),
        twins=len(twins),
        wins=wins,
        human=dict(found[0]),
        llm=dict(found[1]),
        seed=seed,
        w_interval=_interval(w),
        d_interval=_interval(d) if np.isfinite(d).all() else None,
    )


def bias_change(before: SourceBias, after: SourceBias, *, seed: int = 0) -> BiasChange:
    """How much the bias has changed, with intervals from resampled queries.

    Raises:
        ValueError: they are of different queries.
    """
    queries = list(before.wins)
    if set(queries) != set(after.wins):
        raise ValueError("source bias of different queries cannot be compared")
    draws = _draws(len(queries), seed)
    sides = []
    for one in (before, after):
        columns = [np.array([values[q] for q in queries]) for values in (one.wins, one.human, one.llm)]
        sides.append(_statistics(columns, draws))
    w, d = sides[1][0] - sides[0][0], sides[1][1] - sides[0][1]
    both = before.d is not None and after.d is not None and bool(np.isfinite(d).all())
    return BiasChange(
        w=after.w_minus_half - before.w_minus_half,
        w_interval=_interval(w),
        d=None if before.d is None or after.d is None else after.d - before.d,
        d_interval=_interval(d) if both else None,
        queries=len(queries),
        seed=seed,
    )


def _twin_id(number: int, twin: Twin) -> str:
    return f"{twin.passage_id}\0{number}"  # no passage has such an id


def _pool(collection: Collection, query: str, own: Sequence[Twin]) -> dict[str, str]:
    """Passage id -> text."""
    real = {twin.passage_id for twin in own}
    real |= {p for p, grade in collection.qrels[query].items() if grade <= 0 and p in collection.passages}
    return {passage: collection.passages[passage] for passage in sorted(real)} | {
        _twin_id(i, twin): twin.text for i, twin in enumerate(own)
    }


def _scores(encoder: Encoder, collection: Collection, pools: dict[str, dict[str, str]]) -> Run:
    texts = list(dict.fromkeys(text for pool in pools.values() for text in pool.values()))
    place = {text: i for i, text in enumerate(texts)}
    passages = encoder.encode_passages(texts)
    queries = encoder.encode_queries([collection.queries[query] for query in pools])
    return {
        query: {passage: float(passages[place[text]] @ vector) for passage, text in pool.items()}
        for (query, pool), vector in zip(pools.items(), queries, strict=True)
    }


def _share_above(own: Sequence[Twin], scores: dict[str, float]) -> float:
    above = [
        float(np.heaviside(scores[_twin_id(i, twin)] - scores[twin.passage_id], 0.5))
        for i, twin in enumerate(own)
    ]
    return sum(above) / len(above)


def _difference(human: float, llm: float) -> float | None:
    return 200 * (human - llm) / (human + llm) if human + llm else None


def _draws(queries: int, seed: int) -> NDArray[np.int64]:
    return np.random.default_rng(seed).integers(0, queries, (RESAMPLES, queries))


def _statistics(
    columns: Sequence[NDArray[np.float64]], draws: NDArray[np.int64]
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """w - 1/2 and D of every draw of queries; the columns are wins, nDCG@5 for H, and for L."""
    wins, human, llm = columns
    h, m = human[draws].mean(1), llm[draws].mean(1)
    with np.errstate(divide="ignore", invalid="ignore"):
        return wins[draws].mean(1) - 0.5, 200 * (h - m) / (h + m)


def _interval(values: NDArray[np.float64]) -> tuple[float, float]:
    low, high = np.percentile(values, [2.5, 97.5])
    return float(low), float(high)
