from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gradeloom.schemas.retriever import CollectionConfig, MineConfig
from gradeloom.tasks.collection import Qrels, Run
from gradeloom.tasks.train.negatives import Negative, choose_negatives


def settings(**changed: Any) -> MineConfig:
    return MineConfig(collection=CollectionConfig(path="not looked at"), **changed)


def chosen(run: Run, qrels: Qrels, **changed: Any) -> tuple[list[str], dict[str, int]]:
    """The passages chosen, and what became of the candidates, zeros left out."""
    counts: Counter[str] = Counter()
    found = choose_negatives(run, qrels, settings(**changed), accounting=counts)
    return [one.passage_id for one in found], {reason: n for reason, n in counts.items() if n}


RUN: Run = {"q": {"a": 10.0, "b": 9.0, "c": 8.0, "d": 7.0, "e": 6.0, "f": 5.0}}
QRELS: Qrels = {"q": {"a": 3.0, "c": 1.0, "e": 0.0}}


@pytest.mark.parametrize(
    ("changed", "expected", "counts"),
    [
        ({}, ["b", "d"], {"positive": 2, "surplus": 2}),
        ({"count": 9}, ["b", "d", "e", "f"], {"positive": 2, "short queries": 1}),
        ({"count": 9, "positive_grade": 2}, ["b", "c", "d", "e", "f"], {"positive": 1, "short queries": 1}),
        ({"count": 3, "exclude": "judged"}, ["b", "d", "f"], {"positive": 2, "judged": 1}),
        ({"count": 9, "skip": 3}, ["d", "e", "f"], {"skip": 3, "short queries": 1}),
        ({"skip": 2, "depth": 4}, ["d"], {"skip": 2, "positive": 1, "short queries": 1}),
        ({"depth": 2}, ["b"], {"positive": 1, "short queries": 1}),
        # The lowest-scoring positive is c at 8: at most 7.2, so d goes in; at most 6.8: it does not.
        ({"max_score": 0.9}, ["d", "e"], {"positive": 2, "margin": 1, "surplus": 1}),
        ({"max_score": 0.85}, ["e", "f"], {"positive": 2, "margin": 2}),
        ({"max_score": 0.875}, ["d", "e"], {"positive": 2, "margin": 1, "surplus": 1}),  # exactly 7 is in
        ({"max_score": 1.2}, ["b", "d"], {"positive": 2, "surplus": 2}),
        # Of grade 2 and higher there is a at 10: at most 8.
        ({"max_score": 0.8, "positive_grade": 2}, ["c", "d"], {"positive": 1, "margin": 1, "surplus": 2}),
        # A positive beyond the depth counts for the margin.
        ({"max_score": 0.9, "depth": 2}, [], {"positive": 1, "margin": 1, "short queries": 1}),
    ],
)  # fmt: skip
def test_the_rule(changed: dict[str, Any], expected: list[str], counts: dict[str, int]) -> None:
    found, all_counts = chosen(RUN, QRELS, **changed)
    assert found == expected
    candidates = min(changed.get("depth", 6), 6)
    assert all_counts == counts | {"candidates": candidates} | ({"chosen": len(found)} if found else {})


def test_a_negative_says_where_it_stood() -> None:
    assert choose_negatives(RUN, QRELS, settings()) == [
        Negative("q", "b", 9.0, 2),
        Negative("q", "d", 7.0, 4),
    ]


def test_of_equal_scores_the_greater_id_is_first() -> None:
    run = {"q": {"a": 1.0, "c": 1.0, "b": 1.0}}
    assert [(one.passage_id, one.rank) for one in choose_negatives(run, {}, settings())] == [
        ("c", 1),
        ("b", 2),
    ]


@pytest.mark.parametrize(
    ("positive", "ratio", "highest"),
    [
        (10.0, 0.9, 9.0),
        (-10.0, 0.9, -11.0),  # a tenth below it, too
        (0.0, 0.9, 0.0),
        (10.0, 1.0, 10.0),
        (-10.0, 1.0, -10.0),
        (10.0, 1.1, 11.0),
        (-10.0, 1.1, -9.0),
    ],
)
def test_the_margin_is_below_the_positive_whatever_its_sign(
    positive: float, ratio: float, highest: float
) -> None:
    run = {"q": {"positive": positive, "above": highest + 0.01, "below": highest - 0.01}}
    assert chosen(run, {"q": {"positive": 1.0}}, max_score=ratio)[0] == ["below"]


def test_without_a_positive_to_compare_with_the_margin_takes_nothing() -> None:
    run = {"unranked": {"a": 1.0}, "unjudged": {"b": 1.0}, "fine": {"p": 2.0, "c": 1.0}}
    qrels = {"unranked": {"p": 1.0, "a": 0.0}, "fine": {"p": 1.0}}
    found, counts = chosen(run, qrels, max_score=0.95)
    assert found == ["c"]
    assert counts == {
        "candidates": 4, "positive": 1, "no positive in the run": 2, "chosen": 1, "short queries": 3,
    }  # fmt: skip
    assert chosen(run, qrels)[0] == ["a", "b", "c"]  # without a margin there is nothing to compare


def test_a_positive_that_is_not_ranked_does_not_move_the_margin() -> None:
    qrels = {"q": {"a": 1.0, "elsewhere": 1.0}}
    assert chosen(RUN, qrels, max_score=0.85)[0] == ["c", "d"]


def test_random_negatives_are_a_seeded_draw_in_ranked_order() -> None:
    run = {"q": {f"p{n:02}": float(-n) for n in range(20)}}
    draws = [chosen(run, {"q": {"p00": 1.0}}, pick="random", count=3, seed=seed)[0] for seed in range(60)]
    assert all(draw == sorted(draw) and len(set(draw)) == 3 for draw in draws)
    assert {passage for draw in draws for passage in draw} == {f"p{n:02}" for n in range(1, 20)}
    again = chosen(run, {"q": {"p00": 1.0}}, pick="random", count=3, seed=7)
    assert again[0] == draws[7]
    assert again[1] == {"candidates": 20, "positive": 1, "surplus": 16, "chosen": 3}


def test_nothing_ranked_is_nothing_chosen() -> None:
    assert chosen({"q": {}}, QRELS) == ([], {"short queries": 1})
    assert chosen({}, QRELS) == ([], {})


passages_ = st.sampled_from("abcdefghij")
run_ = st.dictionaries(st.sampled_from("qrs"), st.dictionaries(passages_, st.integers(-5, 5).map(float)))
qrels_ = st.dictionaries(
    st.sampled_from("qrst"), st.dictionaries(passages_, st.sampled_from([-1.0, 0.0, 1.0, 2.0]))
)


@given(
    run_,
    qrels_,
    st.builds(
        settings,
        depth=st.integers(1, 12),
        skip=st.integers(0, 3),
        count=st.integers(1, 4),
        pick=st.sampled_from(["top", "random"]),
        exclude=st.sampled_from(["positives", "judged"]),
        max_score=st.sampled_from([None, 0.5, 0.95]),
        seed=st.integers(0, 3),
    ),
)
def test_accounting_adds_up_in_any_order(run: Run, qrels: Qrels, config: MineConfig) -> None:
    counts: Counter[str] = Counter()
    found = choose_negatives(run, qrels, config, accounting=counts)
    reasons = counts.total() - counts["candidates"] - counts["short queries"]
    assert counts["candidates"] == reasons == sum(min(len(of), config.depth) for of in run.values())
    assert counts["chosen"] == len(found)
    per_query = Counter(one.query_id for one in found)
    assert counts["short queries"] == sum(per_query[query_id] < config.count for query_id in run)
    for one in found:
        judged = qrels.get(one.query_id, {})
        assert one.score == run[one.query_id][one.passage_id]
        assert config.skip < one.rank <= config.depth
        assert judged.get(one.passage_id, -1) < config.positive_grade
        assert config.exclude == "positives" or one.passage_id not in judged
        assert per_query[one.query_id] <= config.count

    other_run = {q: dict(reversed(of.items())) for q, of in reversed(run.items())}
    other_qrels = {q: dict(reversed(of.items())) for q, of in reversed(qrels.items())}
    other = choose_negatives(other_run, other_qrels, config)
    assert {(one.query_id, one.rank): one for one in other} == {
        (one.query_id, one.rank): one for one in found
    }
