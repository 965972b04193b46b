"""A judge's labels against people's, on the pairs that both graded: agreement, and its effect on rankings.

An abstention is never a grade: it is counted, left out of every figure over grades, and its passage is
taken out of the rankings that are measured (Sakai 2007 calls these condensed lists).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import StatisticsError, correlation, fmean
from typing import TYPE_CHECKING, TypeVar

import numpy as np
from numpy.typing import NDArray

from gradeloom.schemas.calibration import (
    Agreement,
    Bin,
    Estimate,
    ExpectedFigures,
    FileIdentity,
    GradeFigures,
    HumanLabels,
    PairCounts,
    System,
    SystemRanking,
)
from gradeloom.schemas.errors import InputError
from gradeloom.tasks.collection import read_qrels
from gradeloom.tasks.evaluate.grades import grade_confusion, kappa
from gradeloom.tasks.evaluate.measures import measure
from gradeloom.tasks.evaluate.significance import bootstrap_interval
from gradeloom.tasks.source_forms import sha256

if TYPE_CHECKING:
    from gradeloom.tasks.collection import Qrels, Run

N = TypeVar("N", int, float)

MEASURE = "nDCG@10"
MOST_GRADES = 10
"""Grades of a scale at most: a judge answers with one digit."""

RESAMPLES = 2_000
BINS = 10

Pair = tuple[str, str]
"""(query id, passage id)"""

Grades = dict[str, dict[str, int]]
"""Query id -> passage id -> grade."""


@dataclass(frozen=True)
class Human:
    """What people said, and what it was read from."""

    identity: HumanLabels
    grades: Grades


@dataclass(frozen=True)
class JudgeLabels:
    """What a judge said of pairs. A pair stands in one of `grades`, `abstained` and `unanswered` at most.

    Attributes:
        grades: the judged grades.
        expected: expected grades of the same pairs; {} where the judge gives none.
        abstained: pairs that it was asked about and would not grade.
        unanswered: pairs that it gave no answer for -> the reason.
        scale: the grades that it could give; () if that is not known.
    """

    grades: Grades
    expected: Qrels = field(default_factory=dict)
    abstained: frozenset[Pair] = frozenset()
    unanswered: Mapping[Pair, str] = field(default_factory=dict)
    scale: tuple[int, ...] = ()


# --- labels ---------------------------------------------------------------------------------


def file_identity(path: str | Path) -> FileIdentity:
    """A file's name and SHA-256.

    Raises:
        InputError: it cannot be read.
    """
    return FileIdentity(name=Path(path).name, sha256=sha256(Path(path)))


def human_labels(path: str | Path, qrels: Qrels, *, limit: int | None = None) -> Human:
    """People's grades.

    Args:
        path: the file that they were read from.
        qrels: what it holds.
        limit: use the first N queries, in the order of the file.

    Raises:
        InputError: a grade is not whole.
    """
    grades: Grades = {}
    for query_id in list(qrels)[:limit]:
        for passage_id, grade in qrels[query_id].items():
            if not grade.is_integer():
                raise InputError(
                    f"query {query_id!r}, passage {passage_id!r}: the grade is {grade:g}; "
                    "whole grades of people were expected",
                    file=path,
                )
            grades.setdefault(query_id, {})[passage_id] = int(grade)
    return Human(HumanLabels(qrels=file_identity(path), limit=limit), grades)


def read_labels(path: str | Path, human: Human) -> JudgeLabels:
    """A judge's labels from any file that `read_qrels` reads.

    If any label is not whole, all are expected grades; the grade is then the nearest one, of two equally
    near ones the higher. A label below 0 that no grade of people reaches down to is an abstention.

    Args:
        path: the file.
        human: labels of other queries than these are not looked at if people's were limited.

    Raises:
        InputError: as `read_qrels`.
    """
    qrels = read_qrels(path)
    if human.identity.limit is not None:
        qrels = {query_id: qrels[query_id] for query_id in human.grades if query_id in qrels}
    lowest = min(grade for grades in human.grades.values() for grade in grades.values())
    silent = {(q, p) for q, p, label in _triples(qrels) if label < min(0, lowest)}
    given = _nested((q, p, label) for q, p, label in _triples(qrels) if (q, p) not in silent)
    expected = given if any(not label.is_integer() for _, _, label in _triples(given)) else {}
    return JudgeLabels(rounded(given), expected, frozenset(silent))


def rounded(expected: Qrels) -> Grades:
    """The nearest grade to each expected grade, of two equally near ones the higher."""
    return _nested((q, p, math.floor(value + 0.5)) for q, p, value in _triples(expected))


def _triples(labels: Mapping[str, Mapping[str, N]]) -> Iterator[tuple[str, str, N]]:
    for query_id, by_passage in labels.items():
        for passage_id, label in by_passage.items():
            yield query_id, passage_id, label


def _nested(triples: Iterable[tuple[str, str, N]]) -> dict[str, dict[str, N]]:
    labels: dict[str, dict[str, N]] = {}
    for query_id, passage_id, label in triples:
        labels.setdefault(query_id, {})[passage_id] = label
    return labels


# --- agreement ------------------------------------------------------------------------------


def pair_counts(human: Grades, labels: JudgeLabels) -> PairCounts:
    """What became of every pair.

    Raises:
        InputError: no pair was graded by people and known to the judge.
    """
    graded = {(q, p) for q, p, _ in _triples(human)}
    judged = {(q, p) for q, p, _ in _triples(labels.grades)}
    both, abstained = graded & judged, graded & labels.abstained
    unanswered = {pair: reason for pair, reason in labels.unanswered.items() if pair in graded}
    if not both and not abstained and not unanswered:
        raise InputError(
            "people and judge have no pair of query and passage in common; do both use the same ids?"
        )
    return PairCounts(
        queries=len({query_id for query_id, _ in both}),
        human=len(graded),
        both=len(both),
        abstained=len(abstained),
        unanswered=dict(sorted(Counter(unanswered.values()).items())),
        missing_judge=len(graded) - len(both) - len(abstained) - len(unanswered),
        missing_human=len(judged - graded),
    )


def agreement(
    human: Grades, labels: JudgeLabels, *, binary_at: int = 2, resamples: int = RESAMPLES, seed: int = 0
) -> Agreement:
    """Agreement of judge and people on the pairs that both graded.

    Quadratic weights are squared distances between grades. Intervals: whole queries are drawn with
    replacement, and kappa is computed from the pairs of a draw (`bootstrap_interval`).

    Args:
        human: people's grades.
        labels: the judge's.
        binary_at: grades from here are relevant, for the binary kappa.
        resamples: of the bootstrap.
        seed: of the bootstrap.

    Raises:
        InputError: the grades span more than 10 whole grades, or `binary_at` does not part them.
    """
    scale = _scale(human, labels)
    if not scale[0] < binary_at <= scale[-1]:
        raise InputError(
            f"expected a grade from {scale[0] + 1} to {scale[-1]}, got {binary_at}: the grades are "
            f"{scale[0]} to {scale[-1]}",
            field="--binary-at",
        )
    counted = [
        (labels.grades[q][p], grade, q) for q, p, grade in _triples(human) if p in labels.grades.get(q, {})
    ]
    silent = [(grade, None) for q, p, grade in _triples(human) if (q, p) in labels.abstained]
    confusion = grade_confusion([*((grade, judged) for judged, grade, _ in counted), *silent], scale)
    queries = {query_id: place for place, query_id in enumerate(dict.fromkeys(q for _, _, q in counted))}
    cells = np.array([(queries[q], grade, judged) for judged, grade, q in counted], dtype=np.int64)
    cells = cells.reshape(-1, 3)
    matrices = _matrices(cells, scale[0], len(scale))
    binary = _matrices(np.column_stack([cells[:, 0], cells[:, 1:] >= binary_at]), 0, 2)
    return Agreement(
        grades=tuple(scale),
        matrix=tuple(map(tuple, confusion["matrix"])),
        abstained=tuple(confusion["abstained"]),
        exact=_six(confusion["exact"]),
        kappa=_estimate(matrices, False, resamples, seed),
        quadratic_kappa=_estimate(matrices, True, resamples, seed),
        binary_at=binary_at,
        binary_kappa=_estimate(binary, False, resamples, seed),
        per_grade=tuple(_per_grade(scale, np.array(confusion["matrix"]))),
        expected=_expected(human, labels, scale),
    )


def _scale(human: Grades, labels: JudgeLabels) -> list[int]:
    """Every whole grade from the lowest to the highest that either gives or could give."""
    found = {grade for grades in (human, labels.grades) for _, _, grade in _triples(grades)}
    lowest, highest = min(found | {*labels.scale}), max(found | {*labels.scale})
    if highest - lowest >= MOST_GRADES:
        raise InputError(
            f"the labels run from {lowest} to {highest}; grades of one scale, {MOST_GRADES} at most, "
            "were expected"
        )
    return list(range(lowest, highest + 1))


def _matrices(cells: NDArray[np.int64], lowest: int, grades: int) -> NDArray[np.int64]:
    """Pairs per query, human and judged grade, (Q, G, G), from rows (query, human, judged)."""
    queries = int(cells[:, 0].max()) + 1 if len(cells) else 0
    counts = np.zeros((queries, grades, grades), dtype=np.int64)
    np.add.at(counts, (cells[:, 0], cells[:, 1] - lowest, cells[:, 2] - lowest), 1)
    return counts


def _estimate(matrices: NDArray[np.int64], quadratic: bool, resamples: int, seed: int) -> Estimate:
    """Kappa of the pairs of all queries, with its interval over queries."""
    if not len(matrices):
        return Estimate(value=None, low=None, high=None)
    grades = matrices.shape[-1]
    low, high = bootstrap_interval(
        matrices.reshape(len(matrices), -1),
        statistic=lambda means: kappa(means.reshape(-1, grades, grades), quadratic=quadratic),
        resamples=resamples,
        seed=seed,
    )
    value = float(kappa(matrices.sum(axis=0), quadratic=quadratic))
    return Estimate(value=_six(value), low=_six(low), high=_six(high))


def _per_grade(scale: Sequence[int], matrix: NDArray[np.int64]) -> Iterator[GradeFigures]:
    for place, grade in enumerate(scale):
        human, judge = int(matrix[place].sum()), int(matrix[:, place].sum())
        both = int(matrix[place, place])
        yield GradeFigures(
            grade=grade, human=human, judge=judge, both=both,
            precision=_six(both / judge) if judge else None, recall=_six(both / human) if human else None,
        )  # fmt: skip


def _expected(human: Grades, labels: JudgeLabels, scale: Sequence[int]) -> ExpectedFigures | None:
    pairs = expected_pairs(human, labels.expected)
    if not pairs:
        return None
    expected, grades = (list(column) for column in zip(*pairs, strict=True))
    try:
        r: float | None = correlation(expected, grades)
    except StatisticsError:  # fewer than two, or all the same
        r = None
    squares = [(e - grade) ** 2 for e, grade in pairs]
    return ExpectedFigures(
        pairs=len(pairs), pearson=_six(r), rmse=round(math.sqrt(fmean(squares)), 6),
        reliability=tuple(_reliability(pairs, scale)),
    )  # fmt: skip


def expected_pairs(human: Grades, expected: Qrels) -> list[tuple[float, int]]:
    """(expected, human) grade of every pair that has both, in the order of people's labels."""
    return [(expected[q][p], grade) for q, p, grade in _triples(human) if p in expected.get(q, {})]


def _reliability(pairs: Sequence[tuple[float, int]], scale: Sequence[int]) -> Iterator[Bin]:
    """`BINS` bins of one width over the scale; empty ones are left out."""
    width = (scale[-1] - scale[0]) / BINS
    bins: dict[int, list[tuple[float, int]]] = {}
    for pair in pairs:
        place = math.floor((pair[0] - scale[0]) / width)
        bins.setdefault(min(max(place, 0), BINS - 1), []).append(pair)
    for place in sorted(bins):
        found = bins[place]
        yield Bin(
            pairs=len(found),
            expected=round(fmean(e for e, _ in found), 6),
            human=round(fmean(grade for _, grade in found), 6),
        )


# --- the effect on system ranking ---------------------------------------------------------------


def system_ranking(
    runs: Sequence[tuple[FileIdentity, Run]], human: Grades, labels: JudgeLabels, *, gain_offset: float = 0
) -> SystemRanking:
    """nDCG@10 of runs under the grades of people and of the judge, and Kendall's tau-b of the two.

    Both columns use the pairs that both graded. A passage that people graded and the judge did not is taken
    out of every ranking, so that it counts neither as a grade of 0 nor for or against either.

    Args:
        runs: what each was read from, and its scores.
        human: people's grades.
        labels: the judge's.
        gain_offset: taken off every grade to get its gain (see `measure`).

    Raises:
        InputError: no pair was graded by both, or a run ranks none of their queries.
    """
    by_both: tuple[Qrels, Qrels] = ({}, {})
    left_out: set[Pair] = set()
    for query_id, passage_id, grade in _triples(human):
        if passage_id in labels.grades.get(query_id, {}):
            by_both[0].setdefault(query_id, {})[passage_id] = grade
            by_both[1].setdefault(query_id, {})[passage_id] = labels.grades[query_id][passage_id]
        else:
            left_out.add((query_id, passage_id))
    if not by_both[0]:
        raise InputError("no pair was graded by people and judge; runs cannot be compared under both")
    systems, retrieved = [], set()
    for identity, run in runs:
        if not run.keys() & by_both[0].keys():
            raise InputError(
                f"ranks none of the {len(by_both[0])} graded queries; does it use their ids?",
                file=identity.name,
            )
        retrieved |= {(q, p) for q, p, _ in _triples(run) if (q, p) in left_out}
        condensed = _nested((q, p, score) for q, p, score in _triples(run) if (q, p) not in left_out)
        means = [
            fmean(measure(condensed, qrels, [MEASURE], gain_offset=gain_offset)[MEASURE].values())
            for qrels in by_both
        ]
        systems.append(System(run=identity, human=round(means[0], 6), judge=round(means[1], 6)))
    return SystemRanking(
        gain_offset=gain_offset, queries=len(by_both[0]), left_out=len(retrieved),
        kendall_tau=_kendall_tau(systems), systems=tuple(systems),
    )  # fmt: skip


def _kendall_tau(systems: Sequence[System]) -> float | None:
    from scipy.stats import kendalltau  # type: ignore[import-untyped]

    if len(systems) < 2:
        return None
    return _six(float(kendalltau([s.human for s in systems], [s.judge for s in systems]).statistic))


def _six(value: float | None) -> float | None:
    """Six digits; what is not defined (NaN) is None."""
    return None if value is None or math.isnan(value) else round(value, 6)
