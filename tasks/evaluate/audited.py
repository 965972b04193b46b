"""What people's labels of a sample say of a release: agreement, and estimates with intervals."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from typing import NamedTuple

import numpy as np

from gradeloom.schemas.audit import AuditFigure, AuditFigures, AuditLabel
from gradeloom.tasks.evaluate.grades import grade_confusion
from gradeloom.tasks.evaluate.prediction_powered import Estimate, prediction_powered_mean

_DIGITS = 6


class Reading(NamedTuple):
    """A passage of the release as it was graded and judged.

    Attributes:
        group: the place of the group that it was, or was not, drawn from.
        released: its grade, rounded; `grade` is the grade as it is.
        judged, expected: None where the judge gave nothing that counts.
    """

    query_id: str
    passage_id: str
    group: int
    released: int
    grade: float
    judged: int | None
    expected: float | None


def audit_figures(
    readings: Iterable[Reading], labels: Sequence[AuditLabel], grades: Sequence[int], raters: int
) -> AuditFigures:
    """The figures of an audit.

    With a label per rater, a passage counts with the mean over the raters who gave it one. The estimates
    are prediction-powered: strata are the groups that were drawn from, clusters are queries, and the
    judge's reading f is, for a share, 1 - |expected - grade| (at least 0), for the error
    |expected - grade|; 0 where the judge gave no expected grade.

    Args:
        readings: every passage of the release.
        labels: of the sample, also those that nobody gave a grade.
        grades: the grades of the scale.
        raters: how many looked.
    """
    span = float(max(grades) - min(grades))
    given = {(label.query_id, label.passage_id): label for label in labels}
    precision, error, agreement = _Rows((0, 1)), _Rows((0, span)), _Rows((0, 1))
    against_judge: list[tuple[int, int | None]] = []
    judge = False
    for reading in readings:
        label = given.get((reading.query_id, reading.passage_id))
        own = [grade for grade in label.grades if grade is not None] if label is not None else []
        away = None if reading.expected is None else abs(reading.expected - reading.grade)
        precision.add(reading, [float(g == reading.released) for g in own], _near(away))
        error.add(reading, [abs(g - reading.grade) for g in own], away or 0.0)
        judge = judge or reading.judged is not None
        if reading.judged is not None:
            away = None if reading.expected is None else abs(reading.expected - reading.judged)
            agreement.add(reading, [float(g == reading.judged) for g in own], _near(away))
        against_judge += [(g, reading.judged) for g in own]
    return AuditFigures(
        labelled=[sum(label.grades[rater] is not None for label in labels) for rater in range(raters)],
        raters=list(_between(labels, grades, raters)),
        judge=grade_confusion(against_judge, grades) if judge else None,
        grade_precision=precision.figures(),
        absolute_error=error.figures(),
        judge_agreement=agreement.figures() if judge else [],
    )


def _near(away: float | None) -> float:
    return 0.0 if away is None else max(0.0, 1 - away)


def _between(labels: Sequence[AuditLabel], grades: Sequence[int], raters: int) -> Iterator[dict[str, object]]:
    for one, other in combinations(range(raters), 2):
        pairs = [(label.grades[one], label.grades[other]) for label in labels]
        both = [(a, b) for a, b in pairs if a is not None and b is not None]
        yield {"raters": [one + 1, other + 1], **grade_confusion(both, grades)}


@dataclass
class _Rows:
    """One quantity: of every passage its label (NaN: none), the judge's reading, and where it belongs."""

    bounds: tuple[float, float]
    y: list[float] = field(default_factory=list)
    f: list[float] = field(default_factory=list)
    groups: list[int] = field(default_factory=list)
    grades: list[int] = field(default_factory=list)
    queries: list[int] = field(default_factory=list)
    _places: dict[str, int] = field(default_factory=dict)

    def add(self, reading: Reading, labels: Sequence[float], f: float) -> None:
        self.y.append(math.fsum(labels) / len(labels) if labels else math.nan)
        self.f.append(f)
        self.groups.append(reading.group)
        self.grades.append(reading.released)
        self.queries.append(self._places.setdefault(reading.query_id, len(self._places)))

    def figures(self) -> list[AuditFigure]:
        """Of the passages of every grade, from the highest, then of all."""
        levels: Mapping[int | None, np.ndarray] = {
            grade: np.array(self.grades) == grade for grade in sorted(set(self.grades), reverse=True)
        } | {None: np.ones(len(self.grades), bool)}
        y, f, queries, groups = map(np.array, (self.y, self.f, self.queries, self.groups))
        found = []
        for grade, rows in levels.items():
            estimate = prediction_powered_mean(
                y[rows], f[rows], queries[rows], strata=groups[rows], bounds=self.bounds
            )
            found.append(_figure(grade, int(rows.sum()), estimate))
        return found


def _figure(grade: int | None, passages: int, estimate: Estimate) -> AuditFigure:
    return AuditFigure(
        grade=grade,
        passages=passages,
        labelled=estimate.n,
        queries=estimate.clusters,
        **{
            name: None if math.isnan(value := getattr(estimate, name)) else round(value, _DIGITS)
            for name in ("value", "se", "low", "high", "bound")
        },
    )
