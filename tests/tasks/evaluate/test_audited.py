"""The figures of an audit, from labels that can be counted by hand."""

from __future__ import annotations

import pytest
from sklearn.metrics import cohen_kappa_score

from gradeloom.schemas.audit import AuditFigure, AuditFigures, AuditLabel
from gradeloom.tasks.evaluate.audited import Reading, audit_figures
from gradeloom.tasks.evaluate.prediction_powered import prediction_powered_mean

GRADES = (1, 0)


def reading(n: int, grade: int, judged: int | None, expected: float | None = None, group: int = 0) -> Reading:
    return Reading(f"q{n}", f"p{n}", group, grade, float(grade), judged, expected)


def label(n: int, *grades: int | None) -> AuditLabel:
    return AuditLabel(item=f"i{n}", query_id=f"q{n}", passage_id=f"p{n}", grades=list(grades))


@pytest.fixture
def figures() -> AuditFigures:
    """Ten passages of grade 1; the judge says 1 to the first six, 0 to two, and abstains from two."""
    readings = [reading(n, 1, 1 if n < 6 else 0 if n < 8 else None) for n in range(10)]
    labels = [
        label(0, 1, 1),
        label(1, 1, 0),
        label(6, 0, 0),
        label(7, 1, None),
        label(8, 0, 1),
        label(9, None, None),
    ]
    return audit_figures(readings, labels, GRADES, 2)  # fmt: skip


def test_raters(figures: AuditFigures) -> None:
    assert figures.labelled == [5, 4]
    (pair,) = figures.raters
    assert (pair["raters"], pair["passages"]) == ([1, 2], 4)
    assert pair["matrix"] == [[1, 1], [1, 1]]  # rows: rater 1 says 0, 1
    assert pair["kappa"] == pytest.approx(cohen_kappa_score([1, 1, 0, 0], [1, 0, 0, 1]))


def test_people_and_judge(figures: AuditFigures) -> None:
    assert figures.judge is not None
    # People's 0s: passage 1 (judged 1), 6 twice (judged 0), 8 (abstained); 1s: 0 twice, 1, 7 (judged 0), 8.
    assert figures.judge["matrix"] == [[2, 1], [1, 3]]
    assert figures.judge["abstained"] == [1, 1]
    assert figures.judge["agreement"] == {"0": 2 / 3, "1": 3 / 4}


def of_all(found: list[AuditFigure]) -> AuditFigure:
    assert [figure.grade for figure in found][-1] is None
    return found[-1]


def test_estimates_are_means_over_raters(figures: AuditFigures) -> None:
    precision, error = of_all(figures.grade_precision), of_all(figures.absolute_error)
    # Right: 1, .5, 0, 1, .5; the judge gave no expected grades, so nothing is borrowed from it.
    assert precision.value == 0.6
    assert error.value == 0.4
    assert (precision.passages, precision.labelled, precision.queries) == (10, 5, 5)
    by_hand = prediction_powered_mean([1, 0.5, 0, 1, 0.5], [0] * 5, range(5), bounds=(0, 1))
    assert (precision.se, precision.low, precision.high, precision.bound) == pytest.approx(
        (by_hand.se, by_hand.low, by_hand.high, by_hand.bound), abs=1e-6
    )
    agreement = of_all(figures.judge_agreement)
    # Of the eight that the judge graded: passage 0 right, 1 half, 6 right (both say 0), 7 wrong.
    assert (agreement.passages, agreement.labelled, agreement.value) == (8, 4, 0.625)


def test_the_judges_reading_is_borrowed_where_it_goes_with_the_labels() -> None:
    """Twenty labels; over all passages the judge reads half as sure as over the labelled ones."""
    right = [n % 2 for n in range(20)]
    readings = [reading(n, 1, 1, 1.0 if right[n] else 0.2) for n in range(20)]
    readings += [reading(n, 1, 1, 1.0 if n % 4 == 0 else 0.2) for n in range(20, 100)]
    found = of_all(
        audit_figures(readings, [label(n, right[n]) for n in range(20)], GRADES, 1).grade_precision
    )
    # f = 1 - |expected - 1| is 1 where right and .2 where wrong. cov = .4 * 10/19; of all 100 f 30 are 1:
    # var = .64 * .3 * .7 * 100/99; lambda = cov / (1.25 var) = 1.2406; .5 + lambda (.4 - .6) = .2519.
    assert found.value == pytest.approx(0.2519, abs=1e-4)
    alone = prediction_powered_mean(right, [0] * 20, range(20), bounds=(0, 1))
    assert found.se is not None
    assert found.se < 0.5 * alone.se


def test_grades_and_groups_weigh_as_in_the_release() -> None:
    """Group 0: 90 passages of grade 1, labels half right; group 1: 10 of grade 1, all wrong; group 2: 0s."""
    readings = [
        *(reading(n, 1, None, group=0) for n in range(90)),
        *(reading(n, 1, None, group=1) for n in range(90, 100)),
        *(reading(n, 0, None, group=2) for n in range(100, 200)),
    ]
    labels = [
        *(label(n, n % 2) for n in range(10)),
        *(label(n, 0) for n in range(90, 100)),
        *(label(n, 0) for n in range(100, 110)),
    ]
    found = audit_figures(readings, labels, GRADES, 1)
    values = [(figure.grade, figure.passages, figure.value) for figure in found.grade_precision]
    assert values == [(1, 100, 0.45), (0, 100, 1.0), (None, 200, 0.725)]
    assert (found.judge, found.judge_agreement) == (None, [])
    assert found.grade_precision[1].high == 1
    assert found.grade_precision[1].low == pytest.approx(0.025**0.1, abs=1e-6)  # ten of ten right


def test_a_group_without_labels_leaves_its_estimates_open() -> None:
    readings = [reading(n, 1, None, group=n // 5) for n in range(10)]
    (level, every) = audit_figures(readings, [label(n, 1) for n in range(5)], GRADES, 1).grade_precision
    assert level == every.model_copy(update={"grade": 1})
    assert (every.value, every.se, every.low, every.high, every.bound) == (None,) * 5
    assert every.labelled == 5
