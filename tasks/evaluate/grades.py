"""Quality of generated grades, for a release's manifest (METHODS 1b, 1d).

Everything is computed in one pass over the release's Parquet files, in memory that does not grow with
the number of rows, and is a function of the rows alone: the figures enter a digested manifest.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from gradeloom.schemas.errors import InputError
from gradeloom.schemas.rows import digest

TIE = 0.5
"""Expected grades no further apart than this are a tie (METHODS 1b)."""

BLIND_PASSAGES = 20_000
"""Passages that the query-blind classifier sees at most: seconds, whatever the release's size."""

_ROUNDING = 1e-9  # so that sums of decimal probabilities on the margin itself count as ties
_LIST_COLUMNS = ("query_id", "passages", "intended", "judged", "expected", "abstained")
_REJECT_COLUMNS = ("status", "intended", "judged", "expected", "abstained")


def grade_confusion(pairs: Iterable[tuple[int, int | None]], grades: Sequence[int]) -> dict[str, Any]:
    """Intended against judged grades.

    Args:
        pairs: (intended, judged) of every judged passage; judged is None for an abstention.
        grades: the grades of the scale.

    Returns:
        `grades` ascending; `matrix`, a row per intended and a column per judged grade; `abstained` per
        intended grade; and, over the passages without abstention, `agreement` per intended grade,
        `exact` agreement, Cohen's `kappa` and `quadratic_kappa` (weights by place on the scale, as in
        scikit-learn's `cohen_kappa_score`). A figure that is not defined is None.
    """
    return _confusion(Counter(pairs), grades)


def kappa(matrix: ArrayLike, *, quadratic: bool = False) -> NDArray[np.float64]:
    """Cohen's (weighted) kappa, 1 - observed / expected disagreement (Cohen 1960, 1968).

    Args:
        matrix: counts or shares, one rater's grades by the other's, (..., G, G).
        quadratic: disagreement grows with the square of the distance on the scale; else all is alike.

    Returns:
        Kappa of each matrix, (...); NaN where chance alone would lead to no disagreement.
    """
    counts = np.asarray(matrix, dtype=np.float64)
    places = np.arange(counts.shape[-1])
    distance = places[:, None] - places
    weights = (distance**2 if quadratic else distance != 0).astype(np.float64)
    rows, columns = counts.sum(axis=-1), counts.sum(axis=-2)
    observed = (weights * counts).sum(axis=(-2, -1))
    expected = np.einsum("...i,ij,...j->...", rows, weights, columns)
    defined = expected > 0
    ratio = observed * counts.sum(axis=(-2, -1)) / np.where(defined, expected, 1.0)
    return np.where(defined, 1 - ratio, np.nan)


def query_blind_accuracy(
    passages: Sequence[str],
    grades: Sequence[int],
    query_ids: Sequence[str],
    *,
    seed: int,
    folds: int = 5,
    max_passages: int = BLIND_PASSAGES,
) -> dict[str, Any] | None:
    """How well the grade can be told from the passage alone, without its query (METHODS 1d).

    TF-IDF and logistic regression, cross-validated with whole queries held out. Far above chance, a
    retriever could learn the style of a grade in place of relevance.

    Args:
        passages: texts, (N,).
        grades: their intended grades, (N,).
        query_ids: the query each belongs to, (N,).
        seed: decides the folds, and which queries are looked at.
        folds: parts that the queries are split into.
        max_passages: take whole queries up to this many passages, in the order of a seeded digest.

    Returns:
        `accuracy`, the mean over the folds, `chance` (1 / distinct grades), and the numbers of
        `queries` and `passages`; None with fewer than 2 * `folds` queries, one grade, or no words.
    """
    chosen = _whole_queries(query_ids, seed, max_passages)
    texts = [text for text, q in zip(passages, query_ids, strict=True) if q in chosen]
    labels = [grade for grade, q in zip(grades, query_ids, strict=True) if q in chosen]
    groups = [q for q in query_ids if q in chosen]
    if len(chosen) < 2 * folds:
        return None
    accuracies = _held_out_accuracies(texts, labels, groups, seed, folds)
    if accuracies is None:
        return None
    return {
        "accuracy": math.fsum(accuracies) / folds,
        "chance": 1 / len(set(labels)),
        "queries": len(chosen),
        "passages": len(texts),
    }


def quality(folder: Path, grades: Sequence[int]) -> dict[str, Any]:
    """The quality figures of a graded release, ready for its manifest.

    Args:
        folder: the release; `lists/` and, if there are any, `rejects/` are read.
        grades: the grades of the scale.

    Returns:
        Figures rounded to six digits:
        `lists`; `share_kept` of the lists that were finished, kept or not; `agreement`, the confusion
        over every judged passage, kept or rejected, with `expected_correlation` (Pearson, expected with
        intended grade); `agreement_released`, the same over kept lists; `ties` among the pairs of
        different intended grades in kept lists; `words`, mean, p10 and p90 per intended grade;
        `query_blind`. Without a judge `agreement`, `agreement_released` and `ties` are None.

    Raises:
        InputError: a file cannot be read or lacks a column.
    """
    kept, rejected, words = _Judged(), _Judged(), _Words()
    sample = _ListSample(size=max(1, BLIND_PASSAGES // len(grades)))
    lists = 0
    for row in rows(folder / "lists", _LIST_COLUMNS):
        lists += 1
        kept.add(row)
        words.add(row)
        sample.add(row)
    finished = lists
    for row in rows(folder / "rejects", _REJECT_COLUMNS):
        finished += row["status"] != "unused"
        rejected.add(row)
    figures = {
        "lists": lists,
        "share_kept": _ratio(lists, finished),
        "agreement": kept.merged(rejected).figures(grades),
        "agreement_released": kept.figures(grades),
        "ties": kept.ties(),
        "words": words.figures(grades),
        "query_blind": query_blind_accuracy(*sample.columns(), seed=0),
    }
    rounded: dict[str, Any] = _rounded(figures)
    return rounded


# --- agreement ------------------------------------------------------------------------------


def _confusion(counts: Counter[tuple[int, int | None]], grades: Sequence[int]) -> dict[str, Any]:
    scale = sorted(grades)
    matrix = [[counts[intended, judged] for judged in scale] for intended in scale]
    agreed = [matrix[i][i] for i in range(len(scale))]
    return {
        "grades": scale,
        "passages": counts.total(),
        "matrix": matrix,
        "abstained": [counts[intended, None] for intended in scale],
        "agreement": {str(g): _ratio(agreed[i], sum(matrix[i])) for i, g in enumerate(scale)},
        "exact": _ratio(sum(agreed), sum(map(sum, matrix))),
        "kappa": _defined(kappa(matrix)),
        "quadratic_kappa": _defined(kappa(matrix, quadratic=True)),
    }


@dataclass
class _Correlation:
    """Pearson's r, one pair at a time (Welford)."""

    n: int = 0
    mean_x: float = 0.0
    mean_y: float = 0.0
    xx: float = 0.0
    yy: float = 0.0
    xy: float = 0.0

    def add(self, x: float, y: float) -> None:
        self.n += 1
        dx, dy = x - self.mean_x, y - self.mean_y
        self.mean_x += dx / self.n
        self.mean_y += dy / self.n
        self.xx += dx * (x - self.mean_x)
        self.yy += dy * (y - self.mean_y)
        self.xy += dx * (y - self.mean_y)

    def merged(self, other: _Correlation) -> _Correlation:
        n = self.n + other.n
        if not self.n or not other.n:
            return self if self.n else other
        dx, dy, w = other.mean_x - self.mean_x, other.mean_y - self.mean_y, self.n * other.n / n
        return _Correlation(
            n,
            self.mean_x + dx * other.n / n,
            self.mean_y + dy * other.n / n,
            self.xx + other.xx + dx * dx * w,
            self.yy + other.yy + dy * dy * w,
            self.xy + other.xy + dx * dy * w,
        )

    def r(self) -> float | None:
        return self.xy / math.sqrt(self.xx * self.yy) if self.xx > 0 and self.yy > 0 else None


@dataclass
class _Judged:
    """What the judge said of the passages of many lists."""

    counts: Counter[tuple[int, int | None]] = field(default_factory=Counter)
    correlation: _Correlation = field(default_factory=_Correlation)
    pairs: int = 0
    tied: int = 0

    def add(self, row: dict[str, Any]) -> None:
        """Count a list; the columns of the judge are lists of nulls where it was not asked."""
        expected = row["expected"] or []
        for intended, judged, e, abstained in zip(
            row["intended"], row["judged"] or [], expected, row["abstained"] or [], strict=False
        ):
            if abstained:
                self.counts[intended, None] += 1
            elif judged is not None:
                self.counts[intended, judged] += 1
                self.correlation.add(intended, e)
        for (y1, e1), (y2, e2) in combinations(zip(row["intended"], expected, strict=False), 2):
            if y1 != y2 and e1 is not None and e2 is not None:
                self.pairs += 1
                self.tied += abs(e1 - e2) <= TIE + _ROUNDING

    def merged(self, other: _Judged) -> _Judged:
        return _Judged(self.counts + other.counts, self.correlation.merged(other.correlation))

    def figures(self, grades: Sequence[int]) -> dict[str, Any] | None:
        if not self.counts:
            return None
        return _confusion(self.counts, grades) | {"expected_correlation": self.correlation.r()}

    def ties(self) -> dict[str, Any] | None:
        if not self.pairs:
            return None
        return {"pairs": self.pairs, "tied": self.tied, "share": self.tied / self.pairs}


# --- query-blind accuracy -------------------------------------------------------------------


def _whole_queries(query_ids: Sequence[str], seed: int, max_passages: int) -> set[str]:
    sizes = Counter(query_ids)
    chosen: set[str] = set()
    taken = 0
    for query_id in sorted(sizes, key=lambda q: _place(seed, q)):
        taken += sizes[query_id]
        if taken > max_passages:
            break
        chosen.add(query_id)
    return chosen


def _place(seed: int, query_id: str) -> int:
    return int(digest(str(seed), query_id), 16)


def _held_out_accuracies(
    texts: Sequence[str], labels: Sequence[int], groups: Sequence[str], seed: int, folds: int
) -> list[float] | None:
    from sklearn.feature_extraction.text import TfidfVectorizer
    from sklearn.linear_model import LogisticRegression
    from sklearn.model_selection import GroupKFold
    from sklearn.pipeline import make_pipeline
    from threadpoolctl import threadpool_limits  # type: ignore[import-untyped]

    x, y = np.array(texts, dtype=object), np.array(labels)
    accuracies = []
    for train, test in GroupKFold(folds, shuffle=True, random_state=seed).split(x, y, groups):
        # Every run of letters or digits is a word, so that a text has none only if it has none at all.
        vectors = TfidfVectorizer(sublinear_tf=True, token_pattern=r"\w+")  # noqa: S106
        if len(set(y[train])) < 2 or not any(map(vectors.build_analyzer(), x[train])):
            return None
        with threadpool_limits(1):  # many times faster on arrays this small, and the same on any machine
            model = make_pipeline(vectors, LogisticRegression(max_iter=200)).fit(x[train], y[train])
        accuracies.append(float((model.predict(x[test]) == y[test]).mean()))
    return accuracies


@dataclass
class _ListSample:
    """The `size` lists that come first in the order of a seeded digest of their query ids."""

    size: int
    _heap: list[tuple[int, str, list[str], list[int]]] = field(default_factory=list)

    def add(self, row: dict[str, Any]) -> None:
        entry = (-_place(0, row["query_id"]), row["query_id"], row["passages"], row["intended"])
        if len(self._heap) < self.size:
            heapq.heappush(self._heap, entry)
        else:
            heapq.heappushpop(self._heap, entry)

    def columns(self) -> tuple[list[str], list[int], list[str]]:
        """Passages, grades and query ids, (N,) each, in the order of the digest."""
        first = sorted(self._heap, reverse=True)
        return (
            [text for _, _, texts, _ in first for text in texts],
            [grade for _, _, _, grades in first for grade in grades],
            [query_id for _, query_id, texts, _ in first for _ in texts],
        )


# --- words, rows, rounding ------------------------------------------------------------------


@dataclass
class _Words:
    """Histogram of passage lengths, in words between white space, per intended grade."""

    lengths: dict[int, Counter[int]] = field(default_factory=dict)

    def add(self, row: dict[str, Any]) -> None:
        for grade, text in zip(row["intended"], row["passages"], strict=True):
            self.lengths.setdefault(grade, Counter())[len(text.split())] += 1

    def figures(self, grades: Sequence[int]) -> dict[str, Any]:
        known = ((g, self.lengths[g]) for g in sorted(grades) if g in self.lengths)
        return {
            str(g): {
                "mean": sum(n * times for n, times in lengths.items()) / lengths.total(),
                "p10": _percentile(lengths, 10),
                "p90": _percentile(lengths, 90),
            }
            for g, lengths in known
        }


def _percentile(histogram: Counter[int], percent: int) -> int:
    """The smallest value that at least `percent` % of the values do not exceed."""
    below = 0
    for value in sorted(histogram):
        below += histogram[value]
        if 100 * below >= percent * histogram.total():
            return value
    raise ValueError("no values")


def rows(folder: Path, columns: Sequence[str]) -> Iterator[dict[str, Any]]:
    """The rows of a table, a row group at a time in memory.

    Raises:
        InputError: a file cannot be read or lacks a column.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    for path in sorted(folder.glob("train-*.parquet")):
        try:
            with pq.ParquetFile(path) as file:
                for column in columns:
                    if column not in file.schema_arrow.names:
                        raise InputError("the release has no such column", file=path, field=column)
                # Group by group: over a whole file what was read is not given back until its end.
                for group in range(file.num_row_groups):
                    for batch in file.iter_batches(1024, row_groups=[group], columns=list(columns)):
                        yield from batch.to_pylist()
        except (pa.ArrowException, OSError) as error:
            raise InputError(f"cannot read: {error}", file=path) from error


def _defined(value: NDArray[np.float64]) -> float | None:
    return None if np.isnan(value) else float(value)


def _ratio(part: int, whole: int) -> float | None:
    return part / whole if whole else None


def _rounded(value: Any) -> Any:
    if isinstance(value, float):
        return round(value, 6)
    if isinstance(value, dict):
        return {key: _rounded(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_rounded(inner) for inner in value]
    return value
