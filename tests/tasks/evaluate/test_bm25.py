from __future__ import annotations

import re
from collections.abc import Mapping
from math import log

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gradeloom.tasks.collection import Collection, Qrels
from gradeloom.tasks.evaluate.bm25 import bm25_run


def collection(
    queries: Mapping[str, str], passages: Mapping[str, str], qrels: Qrels | None = None
) -> Collection:
    return Collection(
        name="made", queries=dict(queries), passages=passages, qrels=qrels or {}, identity={}, grades={}
    )


def by_hand(query: str, passages: Mapping[str, str], k1: float = 0.9, b: float = 0.4) -> dict[str, float]:
    """Lucene's BM25, word for word as the formula has it."""
    words = {p: re.findall(r"\w\w+", text.lower()) for p, text in passages.items()}
    words = {p: [w for w in ws if w not in ("the", "of", "is")] for p, ws in words.items()}
    mean = sum(map(len, words.values())) / len(words)
    scores = dict.fromkeys(passages, 0.0)
    for term in re.findall(r"\w\w+", query.lower()):
        having = sum(term in ws for ws in words.values())
        idf = log(1 + (len(words) - having + 0.5) / (having + 0.5))
        for passage, ws in words.items():
            tf = ws.count(term)
            if tf:
                scores[passage] += idf * tf / (tf + k1 * (1 - b + b * len(ws) / mean))
    return scores


TEXTS = st.lists(st.sampled_from(["red", "Fish", "blue,", "the", "of", "a", "ship"]), max_size=8).map(
    " ".join
)


@given(TEXTS, st.dictionaries(st.text("xyz", min_size=1, max_size=2), TEXTS, min_size=1, max_size=8))
def test_equals_the_formula(query: str, passages: dict[str, str]) -> None:
    expected = {p: score for p, score in by_hand(query, passages).items() if score > 0}
    run = bm25_run(collection({"q": query}, passages), k=100)
    assert run["q"] == pytest.approx(expected, rel=1e-5)
    assert list(run["q"].values()) == sorted(run["q"].values(), reverse=True)


PASSAGES = {"a": "red fish", "b": "red fish", "c": "red ship", "d": "blue ship", "e": ""}


def test_equal_scores_put_the_greater_id_first() -> None:
    made = collection({"q": "fish"}, PASSAGES)
    assert list(bm25_run(made, k=5)["q"]) == ["b", "a"]
    assert list(bm25_run(made, k=1)["q"]) == ["b"]
    assert list(bm25_run(collection({"q": "red"}, PASSAGES), k=2)["q"]) == ["c", "b"]


def test_a_pool_ranks_every_judged_passage_and_no_other() -> None:
    made = collection({"q": "fish"}, PASSAGES, {"q": {"a": 1, "d": 0, "e": 0, "gone": 3}})
    run = bm25_run(made, k=5, pool=True)["q"]
    assert list(run) == ["a", "e", "d"]
    assert run == {"a": bm25_run(made, k=5)["q"]["a"], "e": 0, "d": 0}
    assert list(bm25_run(made, k=2, pool=True)["q"]) == ["a", "e"]


def test_left_out_passages_make_room() -> None:
    made = collection({"q": "red fish", "r": "fish"}, PASSAGES)
    run = bm25_run(made, k=2, exclude={"q": {"b": -1, "gone": -1}})
    assert [list(ranking) for ranking in run.values()] == [["a", "c"], ["b", "a"]]
    pooled = collection({"q": "fish"}, PASSAGES, {"q": {"a": 1, "b": 1}})
    assert list(bm25_run(pooled, k=5, pool=True, exclude={"q": {"b": -1}})["q"]) == ["a"]


def test_judged_queries_run_and_without_judgements_all() -> None:
    queries = {"q": "fish", "r": "ship"}
    assert list(bm25_run(collection(queries, PASSAGES), k=1)) == ["q", "r"]
    assert list(bm25_run(collection(queries, PASSAGES, {"r": {"a": 1}, "q": {}}), k=1)) == ["r"]


@pytest.mark.parametrize("query", ["", "the", "of a", "whale", "?!"])
def test_a_query_that_matches_nothing_finds_nothing(query: str) -> None:
    assert bm25_run(collection({"q": query, "r": "fish"}, {"a": "red fish"}), k=9)["q"] == {}


def test_passages_without_a_word() -> None:
    assert bm25_run(collection({"q": "fish"}, {"a": "", "b": "the"}), k=9) == {"q": {}}
    assert bm25_run(collection({"q": "fish"}, {}), k=9) == {"q": {}}
    pooled = collection({"q": "fish"}, {"a": "", "b": "the"}, {"q": {"a": 1, "b": 0}})
    assert bm25_run(pooled, k=9, pool=True) == {"q": {"b": 0, "a": 0}}
