from __future__ import annotations

import json
import math
from fractions import Fraction
from itertools import combinations
from pathlib import Path
from typing import get_args

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from gradeloom.schemas.errors import InputError
from gradeloom.schemas.rows import JudgedRow, Judgement, ListRow, PairVerdict, Passage
from gradeloom.tasks.label.judge import read_judgement
from gradeloom.tasks.label.policy import Policy, default_policy, label_list

POLICIES: tuple[Policy, ...] = get_args(Policy)
WITH_JUDGE: tuple[Policy, ...] = ("judged", "agreed", "expected")


def a_list(*grades: int, row_id: str = "r") -> ListRow:
    passages = [Passage(grade=g, text=f"text {g}") for g in grades]
    return ListRow(id=row_id, ordinal=9, query_id="q", query="why", passages=passages)


def judged(
    expected: dict[int, float], abstained: tuple[int, ...] = (), pairs: tuple[PairVerdict, ...] = ()
) -> JudgedRow:
    """Judgements by intended grade: E as given, the arg-max its nearest grade."""
    judgements = [
        Judgement(grade=g, judged=round(e), expected=e, entropy=0.0, mass=0.3 if g in abstained else 0.9,
                  probabilities=[None] * 4, abstained=g in abstained)
        for g, e in expected.items()
    ]  # fmt: skip
    return JudgedRow(id="r", ordinal=9, judgements=judgements, pairs=list(pairs))


GOOD = {3: 2.9, 2: 1.8, 1: 1.2, 0: 0.1}


@pytest.mark.parametrize(
    ("policy", "labels"),
    [
        ("intended", [3, 2, 1, 0]),
        ("judged", [3, 2, 1, 0]),
        ("agreed", [3, 2, 1, 0]),
        ("expected", [2.9, 1.8, 1.2, 0.1]),
    ],
)
def test_a_list_that_both_read_alike(policy: Policy, labels: list[float]) -> None:
    row = label_list(policy, a_list(3, 2, 1, 0), judged(GOOD))
    assert (row.id, row.ordinal, row.status, row.reason) == ("r", 9, "kept", None)
    assert row.labels == labels


def test_labels_follow_the_order_of_the_passages() -> None:
    assert label_list("expected", a_list(0, 3), judged({0: 0.4, 3: 2.2})).labels == [0.4, 2.2]


def test_intended_needs_no_judge_and_the_others_do() -> None:
    assert label_list("intended", a_list(3, 0), None).labels == [3.0, 0.0]
    for policy in WITH_JUDGE:
        with pytest.raises(InputError, match="needs a judge"):
            label_list(policy, a_list(3, 0), None)


def test_an_abstention_rejects_under_every_policy_but_intended() -> None:
    for grade in GOOD:  # not only the two top levels
        for policy in WITH_JUDGE:
            row = label_list(policy, a_list(3, 2, 1, 0), judged(GOOD, abstained=(grade,)))
            assert (row.status, row.reason, row.grade) == ("rejected", "judge_abstained", grade)
            assert (row.labels, row.detail) == ([], "mass 0.300")
        row = label_list("intended", a_list(3, 2, 1, 0), judged(GOOD, abstained=(grade,)))
        assert (row.status, row.labels) == ("kept", [3, 2, 1, 0])


def test_judged_follows_the_judge_and_drops_lists_of_one_grade() -> None:
    assert label_list("judged", a_list(3, 2), judged({3: 1.1, 2: 2.8})).labels == [1, 3]
    assert label_list("judged", a_list(3, 2, 1), judged({3: 2.1, 2: 1.9, 1: 1.4})).labels == [2, 2, 1]
    row = label_list("judged", a_list(3, 2), judged({3: 2.2, 2: 1.9}))
    assert (row.status, row.reason, row.labels) == ("rejected", "one_distinct_grade", [])
    assert label_list("expected", a_list(3, 2), judged({3: 2.2, 2: 1.9})).labels == [2.2, 1.9]


@pytest.mark.parametrize(
    ("e_high", "e_low", "kept"),
    [
        (1.0, 1.5, True),  # on the margin: E_i + 0.5 == E_j
        (0.1 + 0.2, 0.8, True),  # on the margin, but .30000000000000004 in floats
        (0.3, 0.1 + 0.7 + 1e-16, True),
        (1.0, 1.501, False),
        (0.0, 3.0, False),
        (2.0, 1.0, True),
    ],
)
def test_agreed_drops_a_list_that_is_turned_over_beyond_the_margin(
    e_high: float, e_low: float, kept: bool
) -> None:
    row = label_list("agreed", a_list(2, 1), judged({2: e_high, 1: e_low}))
    assert (row.status == "kept") is kept
    if not kept:
        assert (row.reason, row.grade) == ("grades_disagree", 2)
        assert row.detail == f"grade 2 expected {e_high:.2f}, grade 1 expected {e_low:.2f}"


def test_agreed_looks_at_pairs_that_are_not_neighbours() -> None:
    row = label_list("agreed", a_list(3, 2, 1), judged({3: 1.5, 2: 1.9, 1: 2.2}))
    assert (row.reason, row.grade) == ("grades_disagree", 3)  # 3 against 1; each neighbour is a tie


def test_agreed_looks_at_pairs_in_any_order_of_passages() -> None:
    assert label_list("agreed", a_list(0, 3), judged({0: 2.0, 3: 1.0})).reason == "grades_disagree"


def test_agreed_counts_ties() -> None:
    row = label_list("agreed", a_list(3, 2, 1, 0), judged({3: 2.5, 2: 2.0, 1: 1.8, 0: 0.0}))
    assert (row.status, row.detail) == ("kept", "ties: 2")  # 3-2 and 2-1; 3-1 is .7 apart
    row = label_list("agreed", a_list(3, 1), judged({3: 3.0, 1: 1.0}))
    assert (row.status, row.detail) == ("kept", None)


def test_equal_intended_grades_can_neither_disagree_nor_tie() -> None:
    both = JudgedRow(id="r", ordinal=9, judgements=[
        Judgement(grade=1, judged=0, expected=0.0, mass=0.9, abstained=False),
        Judgement(grade=1, judged=3, expected=3.0, mass=0.9, abstained=False),
    ])  # fmt: skip
    row = label_list("agreed", a_list(1, 1), both)
    assert (row.status, row.detail) == ("kept", None)


@pytest.mark.parametrize(("winner", "kept"), [(3, True), (None, True), (1, False)])
@pytest.mark.parametrize(("first", "second"), [(3, 1), (1, 3)])
def test_agreed_drops_a_list_whose_pair_is_reversed(
    first: int, second: int, winner: int | None, kept: bool
) -> None:
    verdict = PairVerdict(first=first, second=second, winner=winner)
    row = label_list("agreed", a_list(3, 1), judged({3: 2.0, 1: 1.0}, pairs=(verdict,)))
    assert (row.status == "kept") is kept
    if not kept:
        assert (row.reason, row.grade) == ("order_reversed", 3)
    for policy in ("intended", "judged", "expected"):
        assert label_list(policy, a_list(3, 1), judged({3: 2.0, 1: 1.0}, pairs=(verdict,))).status == "kept"


def test_another_rows_judgements_are_refused() -> None:
    for row in (a_list(3, 2, 1, 0, row_id="other"), a_list(3, 2), a_list(0, 1, 2, 3)):
        for policy in WITH_JUDGE:
            with pytest.raises(AssertionError):
                label_list(policy, row, judged(GOOD))


def test_default_policy() -> None:
    assert default_policy(True) == "agreed"
    assert default_policy(False) == "intended"


@given(
    st.sampled_from(POLICIES),
    st.dictionaries(st.integers(0, 5), st.floats(0, 5), min_size=1, max_size=6),
    st.sets(st.integers(0, 5)),
)
def test_a_row_is_labelled_in_full_or_rejected_with_a_reason(
    policy: Policy, expected: dict[int, float], abstained: set[int]
) -> None:
    row = label_list(policy, a_list(*expected), judged(expected, abstained=tuple(abstained)))
    if row.status == "kept":
        assert row.reason is None
        assert len(row.labels) == len(expected)
        assert all(0 <= label <= 5 for label in row.labels)
        assert policy == "intended" or not abstained & set(expected)
    else:
        assert row.status == "rejected"
        assert row.reason in {"judge_abstained", "one_distinct_grade", "grades_disagree"}
        assert row.labels == []


# --- against exact fractions ----------------------------------------------------------------


def outcome(policy: Policy, levels: dict[int, list[str]]) -> str:
    """What becomes of a list, given each level's probabilities of the grades 0..3 as decimals."""
    grades = sorted(levels, reverse=True)
    judgements = [
        read_judgement(
            [(str(g), math.log(float(p)) if float(p) else -math.inf) for g, p in enumerate(levels[grade])],
            range(4),
            intended=grade,
            min_mass=0.5,
        )
        for grade in grades
    ]
    row = label_list(policy, a_list(*grades), JudgedRow(id="r", ordinal=9, judgements=judgements))
    return row.reason or row.status


def outcome_by_hand(policy: Policy, levels: dict[int, list[str]]) -> str:
    """METHODS 1(a) and 1(b) once more, in exact fractions."""
    p = {y: [Fraction(x) for x in decimals] for y, decimals in levels.items()}
    if any(sum(ps) < Fraction(1, 2) for ps in p.values()):
        return "judge_abstained"
    e = {y: sum(g * x for g, x in enumerate(ps)) / sum(ps) for y, ps in p.items()}
    if policy == "judged" and len({ps.index(max(ps)) for ps in p.values()}) == 1:
        return "one_distinct_grade"
    if policy == "agreed" and any(e[i] + Fraction(1, 2) < e[j] for j, i in combinations(sorted(e), 2)):
        return "grades_disagree"
    return "kept"


# Tenths make margins that are met exactly.
TENTHS = st.sampled_from(["0.0", "0.1", "0.2", "0.3", "0.5"])


@given(
    st.sampled_from(WITH_JUDGE),
    st.dictionaries(st.integers(0, 3), st.lists(TENTHS, min_size=4, max_size=4), min_size=2),
)
def test_outcomes_are_those_of_exact_arithmetic(policy: Policy, levels: dict[int, list[str]]) -> None:
    totals = [sum(map(Fraction, decimals)) for decimals in levels.values()]
    assume(all(total <= 1 and total != Fraction(1, 2) for total in totals))
    assert outcome(policy, levels) == outcome_by_hand(policy, levels)


def recorded_judgements(data: Path) -> dict[str, dict[int, list[str]]]:
    """Query id -> intended grade -> the recorded decimals."""
    lists: dict[str, dict[int, list[str]]] = {}
    for line in (data / "recorded" / "judgements.jsonl").read_text().splitlines():
        entry = json.loads(line, parse_float=str)
        lists.setdefault(entry["query_id"], {})[entry["level"]] = entry["p"]
    return lists


@pytest.mark.realdata
@pytest.mark.parametrize(
    ("policy", "kept", "kept_when_exchanged"),
    [("judged", 300, 300), ("agreed", 300, 39), ("expected", 300, 300)],
)
def test_recorded_lists(realdata: Path, policy: Policy, kept: int, kept_when_exchanged: int) -> None:
    lists = recorded_judgements(realdata)
    written = (realdata / "recorded" / "graded_lists.jsonl").read_text().splitlines()
    assert {json.loads(line)["query_id"] for line in written} == set(lists)

    outcomes = {query_id: outcome(policy, levels) for query_id, levels in lists.items()}
    assert outcomes == {query_id: outcome_by_hand(policy, levels) for query_id, levels in lists.items()}
    assert list(outcomes.values()).count("kept") == kept

    # The same with the readings of levels 2 and 1 exchanged: now something is to be dropped.
    exchanged = {q: {3: ps[3], 2: ps[1], 1: ps[2], 0: ps[0]} for q, ps in lists.items()}
    outcomes = {query_id: outcome(policy, levels) for query_id, levels in exchanged.items()}
    assert outcomes == {query_id: outcome_by_hand(policy, levels) for query_id, levels in exchanged.items()}
    assert list(outcomes.values()).count("kept") == kept_when_exchanged
