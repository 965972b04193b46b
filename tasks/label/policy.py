"""Label policies: from intended and judged grades to the grades that are released (METHODS 1b)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import combinations
from typing import Literal

from gradeloom.schemas.errors import InputError
from gradeloom.schemas.rows import JudgedRow, Judgement, LabelRow, ListRow, PairVerdict

Policy = Literal["intended", "judged", "agreed", "expected"]

MARGIN = 0.5
"""How far a lower passage's expected grade may stand above a higher one's before they disagree."""

_ROUNDING = 1e-9  # so that sums of decimal probabilities on the margin itself do not tip over it


def default_policy(judge_independent: bool) -> Policy:
    """`agreed` when the judge is not the generator itself, else `intended`."""
    return "agreed" if judge_independent else "intended"


def label_list(policy: Policy, row: ListRow, judged: JudgedRow | None) -> LabelRow:
    """Label the passages of one list, or reject the list.

    - `intended`: the grades asked for, whatever the judge says.
    - `judged`: the judge's arg-max; a list left with one distinct grade is rejected
      (`one_distinct_grade`).
    - `agreed`: the grades asked for; rejected when for some pair y_i > y_j, E_i + 0.5 < E_j
      (`grades_disagree`), or when a pairwise verdict, in both orders, prefers the lower passage
      (`order_reversed`; a tie is no reversal). Pairs with |E_i - E_j| <= 0.5 are ties; a kept row's
      `detail` counts them.
    - `expected`: the expected grade E.

    Under every policy but `intended` an abstention on any passage rejects the list
    (`judge_abstained`). METHODS 1(b) names only the two top levels for `agreed`, then says this of
    every policy; the stricter, later sentence is followed.

    Args:
        policy: which of the four.
        row: the list.
        judged: its judgements, in the order of the list's passages; only `intended` can do without.

    Returns:
        The labels in the order of the list's passages; none when rejected. `grade` names the passage
        that decided: of a pair, the one with the higher intended grade.

    Raises:
        InputError: the policy needs a judge and there is none.
    """
    if policy == "intended":
        return _kept(row, [float(passage.grade) for passage in row.passages])
    if judged is None:
        raise InputError(f"policy `{policy}` needs a judge", field="label.policy")
    judgements = judged.judgements
    assert judged.id == row.id, "a list is labelled by its own judgements"
    assert [j.grade for j in judgements] == [p.grade for p in row.passages], "one judgement a passage"
    for judgement in judgements:
        if judgement.abstained:
            detail = "nothing read" if judgement.mass is None else f"mass {judgement.mass:.3f}"
            return _rejected(row, "judge_abstained", detail, judgement.grade)
    if policy == "agreed":
        return _agreed(row, judgements, judged.pairs)
    if policy == "expected":
        return _kept(row, [_expected(j) for j in judgements])
    return _judged(row, judgements)


def _judged(row: ListRow, judgements: Sequence[Judgement]) -> LabelRow:
    grades = [j.judged for j in judgements if j.judged is not None]
    if len(set(grades)) == 1:
        return _rejected(row, "one_distinct_grade", f"every passage was judged {grades[0]}", None)
    return _kept(row, [float(grade) for grade in grades])


def _agreed(row: ListRow, judgements: Sequence[Judgement], pairs: Sequence[PairVerdict]) -> LabelRow:
    ties = 0
    for higher, lower in _ordered_pairs(judgements):
        lead = _expected(lower) - _expected(higher)
        if lead > MARGIN + _ROUNDING:
            detail = (
                f"grade {higher.grade} expected {_expected(higher):.2f}, "
                f"grade {lower.grade} expected {_expected(lower):.2f}"
            )
            return _rejected(row, "grades_disagree", detail, higher.grade)
        ties += abs(lead) <= MARGIN + _ROUNDING
    for pair in pairs:
        higher_grade = max(pair.first, pair.second)
        if pair.winner is not None and pair.winner < higher_grade:
            detail = f"grade {pair.winner} preferred to grade {higher_grade} in both orders"
            return _rejected(row, "order_reversed", detail, higher_grade)
    return _kept(row, [float(p.grade) for p in row.passages], f"ties: {ties}" if ties else None)


def _ordered_pairs(judgements: Sequence[Judgement]) -> Iterator[tuple[Judgement, Judgement]]:
    """Every pair of different intended grades, the higher first."""
    for one, other in combinations(judgements, 2):
        if one.grade != other.grade:
            yield (one, other) if one.grade > other.grade else (other, one)


def _expected(judgement: Judgement) -> float:
    assert judgement.expected is not None, "only an abstention has no expected grade"
    return judgement.expected


def _kept(row: ListRow, labels: list[float], detail: str | None = None) -> LabelRow:
    return LabelRow(id=row.id, ordinal=row.ordinal, labels=labels, detail=detail)


def _rejected(row: ListRow, reason: str, detail: str, grade: int | None) -> LabelRow:
    return LabelRow(
        id=row.id, ordinal=row.ordinal, status="rejected", reason=reason, detail=detail, grade=grade
    )
