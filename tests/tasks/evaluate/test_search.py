from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tiny_encoder import make_tiny_encoder

from gradeloom.schemas.errors import InputError
from gradeloom.schemas.retriever import EncoderConfig
from gradeloom.tasks.collection import Collection, Qrels
from gradeloom.tasks.encoder import load_encoder
from gradeloom.tasks.evaluate import search as module
from gradeloom.tasks.evaluate.search import dense_run


class Spoken:
    """An encoder for texts that spell their own vector: `1 -2`. Whole numbers, so that scores are exact."""

    model = SimpleNamespace(device=torch.device("cpu"))

    def __init__(self) -> None:
        self.encoded: list[str] = []

    def encode_queries(self, texts: Sequence[str]) -> np.ndarray[Any, np.dtype[np.float32]]:
        return np.array([[float(x) for x in text.split()] for text in texts], np.float32)

    def encode_passages(
        self, texts: Sequence[str], *, progress: Callable[[int, int], None] | None = None
    ) -> np.ndarray[Any, np.dtype[np.float32]]:
        self.encoded += texts
        if progress is not None:
            progress(len(texts), len(texts))
        return self.encode_queries(texts)


def collection(
    queries: Mapping[str, str], passages: Mapping[str, str], qrels: Qrels | None = None
) -> Collection:
    return Collection(
        name="made", queries=dict(queries), passages=passages, qrels=qrels or {}, identity={}, grades={}
    )


def by_hand(made: Collection, k: int, pool: bool, exclude: Qrels) -> dict[str, list[tuple[str, float]]]:
    """The definition, one query at a time."""
    encoder, expected = Spoken(), {}
    ids = list(made.passages)
    vectors = encoder.encode_queries(list(made.passages.values()))
    for query, text in made.queries.items():
        if made.qrels and not made.qrels.get(query):
            continue
        scores = vectors @ encoder.encode_queries([text])[0]
        found = [(float(score), p) for p, score in zip(ids, scores, strict=True)]
        found = [(s, p) for s, p in found if not pool or p in made.qrels.get(query, {})]
        found = [(s, p) for s, p in found if p not in exclude.get(query, {})]
        expected[query] = [(p, s) for s, p in sorted(found, reverse=True)[:k]]
    return expected


def as_lists(run: dict[str, dict[str, float]]) -> dict[str, list[tuple[str, float]]]:
    return {query: list(ranking.items()) for query, ranking in run.items()}


VECTORS = st.tuples(st.integers(-2, 2), st.integers(-2, 2)).map(lambda v: f"{v[0]} {v[1]}")
PASSAGES = st.dictionaries(st.text("abc1", min_size=1, max_size=3), VECTORS, min_size=1, max_size=12)
QUERIES = st.dictionaries(st.sampled_from(["q1", "q2", "q3", "q4", "q5"]), VECTORS, min_size=1)


@given(data=st.data(), queries=QUERIES, passages=PASSAGES, pool=st.booleans())
def test_equals_brute_force_with_ties_pools_exclusions_and_chunks(
    data: st.DataObject, queries: dict[str, str], passages: dict[str, str], pool: bool
) -> None:
    some = st.dictionaries(st.sampled_from([*passages, "not there"]), st.sampled_from([0.0, 1.0]))
    per_query = st.dictionaries(st.sampled_from([*queries, "no such query"]), some)
    made = collection(queries, passages, data.draw(per_query))
    exclude = data.draw(per_query)
    k, chunk, block = (data.draw(st.integers(1, 14)) for _ in range(3))
    if pool and not any(made.qrels.values()):
        made = collection(queries, passages, {next(iter(queries)): {next(iter(passages)): 1.0}})
    elif not any(made.qrels.values()):
        made = collection(queries, passages)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "BLOCK", block)
        run = dense_run(Spoken(), made, k=k, pool=pool, exclude=exclude, chunk=chunk)
    assert as_lists(run) == by_hand(made, k, pool, exclude)


def test_equal_scores_put_the_greater_id_first_at_every_chunk_size() -> None:
    made = collection({"q": "1 0"}, {"b": "1 0", "a": "1 1", "d": "1 2", "c": "1 3", "e": "0 9", "f": "2 0"})
    for chunk in range(1, 8):
        run = dense_run(Spoken(), made, k=3, chunk=chunk)
        assert as_lists(run) == {"q": [("f", 2.0), ("d", 1.0), ("c", 1.0)]}


def test_a_pool_encodes_judged_passages_alone() -> None:
    encoder = Spoken()
    made = collection(
        {"q1": "1 0", "q2": "0 1"},
        {"a": "1 2", "b": "2 1", "c": "7 7", "d": "3 3"},
        {"q1": {"a": 0, "b": 2, "gone": 3}, "q2": {"d": 1}},
    )
    run = dense_run(encoder, made, k=10, pool=True, chunk=2)
    assert as_lists(run) == {"q1": [("b", 2.0), ("a", 1.0)], "q2": [("d", 3.0)]}
    assert sorted(encoder.encoded) == ["1 2", "2 1", "3 3"]


def test_without_judgements_all_queries_run_and_with_some_the_judged_ones() -> None:
    queries, passages = {"q1": "1 0", "q2": "0 1", "q3": "1 1"}, {"a": "1 1"}
    assert list(dense_run(Spoken(), collection(queries, passages), k=1)) == ["q1", "q2", "q3"]
    some = collection(queries, passages, {"q3": {"zzz": 1}, "q2": {}})
    assert dense_run(Spoken(), some, k=1) == {"q3": {"a": 2.0}}


def test_a_query_without_passages_left_has_an_empty_ranking() -> None:
    made = collection({"q1": "1 0", "q2": "1 0"}, {"a": "1 1"}, {"q1": {"a": 1}, "q2": {"a": 1}})
    assert dense_run(Spoken(), made, k=1, exclude={"q1": {"a": -1}}) == {"q1": {}, "q2": {"a": 1.0}}
    assert dense_run(Spoken(), collection({"q": "1 0"}, {}), k=1) == {"q": {}}


def test_progress_counts_passages() -> None:
    told: list[tuple[int, int]] = []
    made = collection({"q": "1 0"}, {str(n): "1 1" for n in range(7)})
    dense_run(Spoken(), made, k=2, chunk=3, progress=lambda done, total: told.append((done, total)))
    assert told == [(3, 7), (6, 7), (7, 7)]


def test_scores_are_not_rounded_where_encoding_may_be() -> None:
    """In bfloat16 1.001 and 1.002 would both be 1, and the greater id would win."""
    made = collection({"q": "1 0"}, {"a": "1.002 0", "b": "1.001 0"})
    with torch.autocast("cpu", dtype=torch.bfloat16):
        run = dense_run(Spoken(), made, k=2)
    assert as_lists(run) == {"q": [("a", pytest.approx(1.002)), ("b", pytest.approx(1.001))]}


def test_scores_that_overflow_are_refused() -> None:
    made = collection({"q": "1e30 0"}, {"a": "1e30 0"})
    with pytest.raises(InputError, match="not finite"):
        dense_run(Spoken(), made, k=1)


@pytest.mark.parametrize("normalize", [True, False])
def test_a_model_is_scored_by_the_dot_product_of_its_vectors(tmp_path: Path, normalize: bool) -> None:
    folder = make_tiny_encoder(tmp_path / "model", normalize=normalize)
    encoder = load_encoder(EncoderConfig(model=str(folder), device="cpu", batch_size=2))
    passages = {f"p{n}": f"passage {n} is about {'thing ' * (n % 3)}{n}" for n in range(9)}
    made = collection({"q": "what is thing 4?"}, passages)
    run = dense_run(encoder, made, k=9, chunk=4)
    (query,) = encoder.encode_queries(["what is thing 4?"]).astype(float)
    for passage, score in run["q"].items():
        (vector,) = encoder.encode_passages([passages[passage]]).astype(float)
        assert score == pytest.approx(math.fsum(vector * query), rel=1e-5)
    assert list(run["q"].values()) == sorted(run["q"].values(), reverse=True)
    assert len(run["q"]) == 9
