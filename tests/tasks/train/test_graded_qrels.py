from __future__ import annotations

import copy
import math
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gradeloom.schemas.errors import InputError
from gradeloom.schemas.retriever import TrainingSource
from gradeloom.tasks.collection import Collection, Qrels
from gradeloom.tasks.train.graded_qrels import TrainingLists, mix, transformed


def made(
    qrels: Qrels,
    *,
    queries: dict[str, str] | None = None,
    passages: dict[str, str] | None = None,
    grades: dict[str, Qrels] | None = None,
) -> Collection:
    """A collection that holds what the judgements name; a text is its id with a word before it."""
    if queries is None:
        queries = {query_id: f"query {query_id}" for query_id in qrels}
    if passages is None:
        passages = {passage_id: f"passage {passage_id}" for of in qrels.values() for passage_id in of}
    return Collection("made", queries, passages, qrels, {}, grades or {})


def source(name: str = "s", **settings: Any) -> TrainingSource:
    return TrainingSource(name=name, path="not looked at", **settings)


def ids(*, grades: tuple[float, ...], of: str = "p") -> dict[str, float]:
    return {f"{of}{n}": grade for n, grade in enumerate(grades)}


FOUR = {
    "q1": {"a3": 3.0, "a2": 2.0, "a1": 1.0, "a0": 0.0},
    "q2": {"b3": 3.0, "b2": 2.0, "b1": 1.0, "b0": 0.0},
}


# --- transforms -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, FOUR["q1"]),
        ({"keep": (1, 2)}, {"a2": 2, "a1": 1}),
        ({"map": {2: 3, 1: 0}}, {"a3": 3, "a2": 3, "a1": 0, "a0": 0}),
        ({"constant": 3}, {"a3": 3, "a2": 3, "a1": 3, "a0": 3}),
        ({"keep": (3, 3), "map": {3: 1}, "constant": 2.5}, {"a3": 2.5}),  # in this order
        ({"keep": (0, 1), "map": {1: 7}}, {"a1": 7, "a0": 0}),
        ({"top": 1, "bottom": 1}, {"a3": 3, "a0": 0}),
        ({"top": 1}, {"a3": 3}),
        ({"bottom": 3}, {"a2": 2, "a1": 1, "a0": 0}),
        ({"top": 3, "bottom": 3}, FOUR["q1"]),  # the lowest of the rest: one
        ({"top": 1, "map": {0: 9}}, {"a0": 9}),  # mapped first
        ({"top": 2, "bottom": 1, "random": 5}, FOUR["q1"]),
    ],
)
def test_transforms_of_grades(settings: dict[str, Any], expected: dict[str, float]) -> None:
    assert transformed(made(FOUR), source(**settings), seed=0)["q1"] == expected


def test_nothing_chosen_is_no_query() -> None:
    assert transformed(made(FOUR), source(top=0), seed=0) == {}
    assert transformed(made({"q1": {"a": 1.0}, "q2": {"b": 2.0}}), source(keep=(2, 3)), seed=0) == {
        "q2": {"b": 2.0}
    }


def test_labels_of_a_release() -> None:
    grades = {"expected": {"q1": {"a3": 2.75, "a0": 0.125}, "q2": {}}}
    found = transformed(made(FOUR, grades=grades), source(label="expected"), seed=0)
    assert found == {"q1": {"a3": 2.75, "a0": 0.125}}  # what has no such label is left out
    with pytest.raises(InputError, match="source 's' has no label 'judged'"):
        transformed(made(FOUR, grades=grades), source(label="judged"), seed=0)


def test_queries_are_excluded_then_the_first_taken_then_a_share(tmp_path: Path) -> None:
    qrels = {f"q{n}": {f"p{n}": 1.0} for n in range(12)}
    (tmp_path / "out.txt").write_text("q1\n\n q3 \nunknown\n")
    collection = made(qrels)
    excluded = {"exclude_queries": str(tmp_path / "out.txt")}
    assert list(transformed(collection, source(**excluded, limit=4), seed=0)) == ["q0", "q2", "q4", "q5"]
    halves = [
        list(transformed(collection, source(**excluded, limit=4, share=0.5), seed=s)) for s in range(20)
    ]
    assert all(len(half) == 2 and set(half) <= {"q0", "q2", "q4", "q5"} for half in halves)
    assert len({tuple(half) for half in halves}) > 1
    with pytest.raises(InputError, match=r"none\.txt: cannot be read: No such file"):
        transformed(collection, source(exclude_queries=str(tmp_path / "none.txt")), seed=0)


def test_a_smaller_share_is_part_of_a_larger_one() -> None:
    collection = made({f"q{n}": {f"p{n}": 1.0} for n in range(40)})
    quarter, half = (set(transformed(collection, source(share=s), seed=3)) for s in (0.25, 0.5))
    assert (len(quarter), len(half)) == (10, 20)
    assert quarter < half
    assert len(transformed(collection, source(share=0.001), seed=3)) == 1


def test_the_first_queries_are_those_with_something_to_train_on() -> None:
    qrels = {"q0": {"gone": 1.0}, "q1": {"p": 1.0}, "q2": {"p": 1.0}}
    collection = made(qrels, passages={"p": "text", "gone": ""})  # an empty text means absent
    assert transformed(collection, source(limit=1), seed=0) == {"q1": {"p": 1.0}}


def test_a_draw_is_seeded_and_among_equals() -> None:
    collection = made({"q": ids(grades=(1.0,) * 10)})
    for settings in ({"top": 3}, {"bottom": 3}, {"random": 3}):
        draws = [frozenset(transformed(collection, source(**settings), seed=seed)["q"]) for seed in range(30)]
        assert all(len(draw) == 3 for draw in draws)
        assert set().union(*draws) == {f"p{n}" for n in range(10)}  # nobody is favoured by its name
        assert draws[0] == frozenset(transformed(collection, source(**settings), seed=0)["q"])


grades_ = st.sampled_from([-1.0, 0.0, 1.0, 2.0, 3.0, 0.5])
qrels_ = st.dictionaries(
    st.sampled_from("qrstuv"), st.dictionaries(st.sampled_from("abcdefgh"), grades_, min_size=1), min_size=1
)
counts_ = st.none() | st.integers(0, 3)


@st.composite
def sources(draw: st.DrawFn, name: str = "s") -> TrainingSource:
    return source(
        name,
        limit=draw(st.none() | st.integers(1, 4)),
        share=draw(st.sampled_from([0.3, 0.5, 1.0])),
        keep=draw(st.sampled_from([None, (0, 2), (1, 3)])),
        map=draw(st.sampled_from([{}, {1: 3}])),
        constant=draw(st.sampled_from([None, 3])),
        top=draw(counts_),
        bottom=draw(counts_),
        random=draw(counts_),
    )


def reordered(qrels: Qrels) -> Qrels:
    return {query_id: dict(reversed(of.items())) for query_id, of in reversed(qrels.items())}


@given(qrels_, sources(), st.integers(0, 3))
def test_the_order_of_judgements_does_not_matter(qrels: Qrels, one: TrainingSource, seed: int) -> None:
    collection = made(qrels)
    other = Collection("made", collection.queries, collection.passages, reordered(qrels), {}, {})
    found = transformed(collection, one, seed=seed)
    assert transformed(other, one, seed=seed) == found
    assert list(found) == [query_id for query_id in collection.queries if query_id in found]


# --- mixing -----------------------------------------------------------------------------------


def told(lists: TrainingLists) -> list[tuple[str, list[tuple[str, float]]]]:
    return [(one.query_id, [(p.passage_id, p.grade) for p in one.passages]) for one in lists.lists]


def real(qrels: Qrels, queries: dict[str, str]) -> Collection:
    passages = {passage_id: f"real {passage_id}" for of in qrels.values() for passage_id in of}
    return Collection("real", queries, passages, qrels, {}, {})


def test_real_positives_and_random_passages_join_the_synthetic_ones() -> None:
    """METHODS, mixing real data: seven passages a query."""
    synthetic = made({"q1": FOUR["q1"]})
    positives = real({"q1": {"r": 1.0}}, synthetic.queries)
    bm25 = real({"q1": ids(grades=(0.0,) * 50, of="m")}, synthetic.queries)
    lists = mix(
        [
            (source("synthetic"), synthetic),
            (source("positives", constant=3), positives),
            (source("bm25", constant=1, random=2), bm25),
        ],
        passages=None,
        seed=0,
    )
    assert lists.width == 7
    (one,) = lists.lists
    assert [p.grade for p in one.passages] == [3, 3, 2, 1, 1, 1, 0]
    assert [p.part for p in one.passages] == [0, 1, 0, 0, 2, 2, 0]
    assert lists.accounting == {
        "synthetic": {"queries": 1, "judgements": 4, "used": 4, "lists": 1},
        "positives": {"queries": 1, "judgements": 1, "used": 1, "lists": 1},
        "bm25": {"queries": 1, "judgements": 50, "top, bottom, random": 48, "used": 2, "lists": 1},
    }


def test_one_id_with_another_text_is_another_query() -> None:
    a, b = made({"1": {"x": 3.0, "y": 0.0}}), made({"1": {"x": 2.0, "y": 0.0}}, queries={"1": "another"})
    assert told(mix([(source("a"), a), (source("b"), b)], passages=None, seed=0)) == [
        ("1", [("x", 3), ("y", 0)]),
        ("1", [("x", 2), ("y", 0)]),
    ]


def test_a_passage_stands_in_a_list_once_with_its_highest_grade() -> None:
    synthetic = made({"q": {"a": 3.0, "b": 0.0}})
    mined = made({"q": {"a": 0.0, "b": 0.0, "c": 0.0, "copy": 1.0}})
    mined.passages["copy"] = "passage c"  # type: ignore[index]
    lists = mix([(source("synthetic"), synthetic), (source("mined"), mined)], passages=None, seed=0)
    assert told(lists) == [("q", [("a", 3), ("copy", 1), ("b", 0)])]
    assert [p.part for p in lists.lists[0].passages] == [0, 1, 0]  # of equal grades the first source's
    assert lists.accounting["mined"] == {
        "queries": 1, "judgements": 4, "repeated": 3, "used": 1, "lists": 1,
    }  # fmt: skip


def test_equal_ids_of_two_collections_are_two_passages() -> None:
    a, b = made({"q": {"1": 3.0}}), real({"q": {"1": 0.0}}, {"q": "query q"})
    row = mix([(source("a"), a), (source("b"), b)], passages=None, seed=0).dataset()[0]
    assert row == {"query": "query q", "passage_0": "passage 1", "passage_1": "real 1", "label": [3.0, 0.0]}


def test_lists_of_one_grade() -> None:
    collection = made(
        {"pos": {"a": 3.0}, "neg": {"b": 0.0, "c": 0.0}, "below": {"d": -1.0}, "two": {"e": 0.0, "f": -1.0}}
    )
    lists = mix([(source(), collection)], passages=None, seed=0)
    assert [one.query_id for one in lists.lists] == ["pos", "two"]
    assert lists.accounting["s"] == {
        "queries": 4, "judgements": 6, "nothing to learn": 3, "used": 3, "lists": 2,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("grades", "size", "expected"),
    [
        ((3, 2, 1, 0), 4, (3, 2, 1, 0)),
        ((3, 3, 3, 2, 1, 0, 0, 0, 0), 4, (3, 2, 1, 0)),
        ((3, 3, 3, 2, 1, 0, 0, 0, 0), 6, (3, 3, 2, 1, 0, 0)),  # 4, then the ends of the two that have more
        ((3, 2, 2, 2, 1, 1, 1, 0), 6, (3, 2, 2, 1, 1, 0)),
        ((3, 2, 2, 2, 0, 0, 0, 0), 5, (3, 2, 2, 0, 0)),
        ((3, 2, 1, 0), 3, (3, 1, 0)),  # positions 0, 1.5 (rounded up) and 3
        ((3, 2, 1, 0), 2, (3, 0)),
        ((3, 2, 1, 0), 1, (3,)),
        ((5, 4, 3, 2, 1), 3, (5, 3, 1)),
        ((3, 3, 3), 2, (3, 3)),
        ((2.9, 2.1, 1.3, 0.4, 0.2), 3, (2.9, 1.3, 0.2)),
    ],
)
def test_a_long_list_is_cut_with_its_grades_spread(
    grades: tuple[float, ...], size: int, expected: tuple[float, ...]
) -> None:
    lists = mix([(source(), made({"q": ids(grades=grades)}))], passages=size, seed=0)
    assert tuple(p.grade for p in lists.lists[0].passages) == expected
    assert lists.accounting["s"].get("cut", 0) == len(grades) - size
    assert lists.width == size


def test_which_passage_of_a_grade_is_cut_is_drawn() -> None:
    collection = made({"q": ids(grades=(3.0, *(0.0,) * 10))})
    drawn = {
        mix([(source(), collection)], passages=2, seed=seed).lists[0].passages[1].passage_id
        for seed in range(80)
    }
    assert drawn == {f"p{n}" for n in range(1, 11)}


def test_nothing_left_says_where_it_went() -> None:
    collection = made({"q": {"a": 1.0, "b": 2.0}})
    with pytest.raises(
        InputError,
        match=r"field 'data': no list is left to train on \(s: queries 1, judgements 2, keep 2, used 0",
    ):
        mix([(source(keep=(3, 3)), collection)], passages=None, seed=0)


def test_what_has_no_text_is_counted() -> None:
    qrels = {"q": {"a": 3.0, "empty": 2.0, "unknown": 1.0, "b": 0.0}, "nobody": {"a": 1.0, "b": 1.0}}
    grades = {"judged": {"q": {"a": 2.0, "empty": 2.0}}}
    collection = made(qrels, queries={"q": "?"}, passages={"a": "a", "b": "b", "empty": ""}, grades=grades)
    lists = mix([(source(label="judged"), collection)], passages=None, seed=0)
    assert told(lists) == [("q", [("a", 2)])]
    assert lists.accounting["s"] == {
        "queries": 2, "judgements": 6, "query not there": 2, "passage not there": 2, "no label": 1,
        "used": 1, "lists": 1,
    }  # fmt: skip


@given(st.lists(qrels_, min_size=1, max_size=3), st.data(), st.none() | st.integers(2, 4), st.integers(0, 3))
def test_accounting_adds_up_and_lists_are_sound(
    all_qrels: list[Qrels], data: st.DataObject, passages: int | None, seed: int
) -> None:
    """Judgements of one source go somewhere, each once; the order of judgements does not matter."""
    texts = {passage_id: "same" if passage_id in "ab" else passage_id for passage_id in "abcdefg"}
    queries = {query_id: query_id for query_id in "qrstu"}  # not v, and no passage h
    parts = [
        (data.draw(sources(f"s{n}")), Collection("c", queries, texts, qrels, {}, {}))
        for n, qrels in enumerate(all_qrels)
    ]
    try:
        lists = mix(parts, passages=passages, seed=seed)
    except InputError:
        assert all(not transformed(c, s, seed=seed) or s.constant is None for s, c in parts)
        return
    other = [(s, Collection("c", queries, texts, reordered(c.qrels), {}, {})) for s, c in parts]
    again = mix(other, passages=passages, seed=seed)
    assert (again.lists, again.width, again.digest) == (lists.lists, lists.width, lists.digest)
    assert again.accounting == lists.accounting

    assert list(lists.accounting) == [s.name for s, _ in parts]
    for n, ((_, collection), counts) in enumerate(zip(parts, lists.accounting.values(), strict=True)):
        reasons = {
            key: value for key, value in counts.items() if key not in ("queries", "judgements", "lists")
        }
        assert (
            counts["judgements"] == sum(len(of) for of in collection.qrels.values()) == sum(reasons.values())
        )
        assert counts["queries"] == len(collection.qrels)
        assert counts["used"] == sum(p.part == n for one in lists.lists for p in one.passages)
        assert counts["lists"] == sum(any(p.part == n for p in one.passages) for one in lists.lists)
    assert len({one.query for one in lists.lists}) == len(lists.lists)
    for one in lists.lists:
        grades = [p.grade for p in one.passages]
        assert grades == sorted(grades, reverse=True)
        assert 1 <= len(grades) <= lists.width
        assert len({p.passage_id for p in one.passages}) == len(grades)
        for p in one.passages:
            assert (
                transformed(parts[p.part][1], parts[p.part][0], seed=seed)[one.query_id][p.passage_id]
                == p.grade
            )


# --- the data set -----------------------------------------------------------------------------


def ragged() -> TrainingLists:
    return mix([(source(), made({**FOUR, "q3": {"c": 2.0, "d": 0.5}}))], passages=None, seed=0)


def test_the_data_set_has_texts_and_grades() -> None:
    data = ragged().dataset()
    assert data.column_names == ["query", "passage_0", "passage_1", "passage_2", "passage_3", "label"]
    assert data[1] == {
        "query": "query q2", "passage_0": "passage b3", "passage_1": "passage b2", "passage_2": "passage b1",
        "passage_3": "passage b0", "label": [3.0, 2.0, 1.0, 0.0],
    }  # fmt: skip
    short = data[2]
    assert [short[f"passage_{k}"] for k in range(4)] == ["passage c", "passage d", "", ""]
    assert short["label"][:2] == [2.0, 0.5]
    assert all(math.isnan(grade) for grade in short["label"][2:])
    assert list(data["query"]) == ["query q1", "query q2", "query q3"]
    assert data[:2]["passage_3"] == ["passage a0", "passage b0"]


def test_a_short_list_is_padded_to_the_asked_width() -> None:
    data = mix([(source(), made({"q": {"a": 3.0}}))], passages=3, seed=0).dataset()
    assert data.column_names == ["query", "passage_0", "passage_1", "passage_2", "label"]
    assert (data[0]["passage_2"], len(data[0]["label"])) == ("", 3)


def test_texts_follow_a_selection() -> None:
    data = ragged().dataset()
    assert data.select([2, 0])["query"][0] == "query q3"
    assert sorted(data.shuffle(seed=1)["query"]) == ["query q1", "query q2", "query q3"]
    assert data.remove_columns(["label"])[0].keys() == {"query", *(f"passage_{k}" for k in range(4))}
    assert data.select_columns(["passage_1"])[1] == {"passage_1": "passage b2"}
    assert copy.deepcopy(data)[0] == data[0]


def test_no_text_is_copied() -> None:
    """The rows hold numbers, and a text that is read is the collection's own object."""
    collection = made({"q": {"a": 3.0, "b": 0.0}}, passages={"a": "long " * 50_000, "b": "short"})
    data = mix([(source(), collection)], passages=None, seed=0).dataset()
    assert data.data.nbytes < 200
    assert data[0]["passage_0"] is collection.passages["a"]
    assert len(pickle.dumps(data.select([0]))) < 10_000  # what `datasets` makes its fingerprints of


def test_equal_lists_have_equal_fingerprints() -> None:
    first, second = ragged(), ragged()
    assert first.digest == second.digest
    assert first.dataset()._fingerprint == second.dataset()._fingerprint
    script = (
        "from gradeloom.schemas.retriever import TrainingSource as S;"
        "from gradeloom.tasks.collection import Collection;"
        "from gradeloom.tasks.train.graded_qrels import mix;"
        "c = Collection('c', {'q': 'query q'}, {'a': 'x', 'b': 'y'}, {'q': {'b': 0.0, 'a': 3.0}}, {}, {});"
        "print(mix([(S(name='s', path='x'), c)], passages=None, seed=0).digest)"
    )
    there = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    here = mix(
        [(source(), made({"q": {"a": 3.0, "b": 0.0}}, passages={"a": "x", "b": "y"}))], passages=None, seed=0
    )
    assert there.stdout.strip() == here.digest  # in another process, too


@pytest.mark.parametrize(
    "changed",
    [
        made({"q": {"a": 3.0, "b": 1.0}}),
        made({"q": {"a": 3.0, "c": 0.0}}),
        made({"q": {"a": 3.0, "b": 0.0}}, passages={"a": "passage a", "b": "another text"}),
        made({"q": {"a": 3.0, "b": 0.0}}, queries={"q": "another text"}),
        made({"r": {"a": 3.0, "b": 0.0}}, queries={"r": "query q"}),
        made({"q": {"a": 3.0, "b": 0.0}, "r": {"a": 3.0}}),
    ],
)
def test_other_lists_have_another_digest(changed: Collection) -> None:
    before = mix([(source(), made({"q": {"a": 3.0, "b": 0.0}}))], passages=2, seed=0)
    assert mix([(source(), changed)], passages=2, seed=0).digest != before.digest
    wider = mix([(source(), made({"q": {"a": 3.0, "b": 0.0}}))], passages=3, seed=0)
    assert wider.digest != before.digest


def test_lists_of_another_process_are_not_unpickled() -> None:
    lists = mix([(source(), made({"q": {"only": 3.0}}))], passages=None, seed=0)
    data = lists.dataset()
    pickled = pickle.dumps(data)
    assert pickle.loads(pickled)[0] == data[0]
    there = subprocess.run(
        [sys.executable, "-c", "import pickle, sys; pickle.load(sys.stdin.buffer)"],
        input=pickled,
        capture_output=True,
    )
    assert b"RuntimeError: training lists are not pickled" in there.stderr


def test_sentence_transformers_takes_the_data_set() -> None:
    """Its samplers and its collator; the trainer itself is tested where we train."""
    import torch
    from sentence_transformers.base.sampler import NoDuplicatesBatchSampler
    from sentence_transformers.sentence_transformer.data_collator import SentenceTransformerDataCollator

    data = ragged().dataset()
    sampler = NoDuplicatesBatchSampler(data, 1, False, ["label"], torch.Generator(), 0)
    assert sorted(index for batch in sampler for index in batch) == [0, 1, 2]

    def preprocess(texts: list[str], **_: Any) -> dict[str, Any]:
        return {"texts": texts}

    batch = SentenceTransformerDataCollator(preprocess)([data[0], data[2]])
    assert batch["query_texts"] == ["query q1", "query q3"]
    assert batch["passage_2_texts"] == ["passage a1", ""]
    assert batch["label"].dtype == torch.float32
    assert batch["label"].shape == (2, 4)
    assert batch["label"].isnan().tolist() == [[False] * 4, [False, False, True, True]]
