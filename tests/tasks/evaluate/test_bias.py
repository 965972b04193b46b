from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
from numpy.typing import NDArray

from gradeloom.schemas.errors import InputError
from gradeloom.schemas.retriever import CollectionConfig
from gradeloom.tasks.collection import Collection, Qrels, read_collection
from gradeloom.tasks.encoder import Encoder
from gradeloom.tasks.evaluate.bias import SourceBias, Twin, bias_change, read_twins, source_bias

Vectors = NDArray[np.float32]

# What nDCG pays at ranks 1 to 5.
PAID = [0.0, *(1 / math.log2(rank + 1) for rank in range(1, 6))]


class Fixed:
    """An encoder of known vectors."""

    def __init__(self, queries: Mapping[str, Sequence[float]], passages: Mapping[str, Sequence[float]]):
        self.queries, self.passages = queries, passages

    def encode_queries(self, texts: Sequence[str], **_: Any) -> Vectors:
        return np.array([self.queries[text] for text in texts], np.float32)

    def encode_passages(self, texts: Sequence[str], **_: Any) -> Vectors:
        return np.array([self.passages[text] for text in texts], np.float32)


def encoder(first: Mapping[str, float], second: Mapping[str, float] | None = None) -> Encoder:
    """Passages by their scores for query one and for query two."""
    second = second or {}
    passages = {text: (first.get(text, -9.0), second.get(text, -9.0)) for text in {**first, **second}}
    return cast(Encoder, Fixed({"query one": (1, 0), "query two": (0, 1)}, passages))


def collection(qrels: Qrels) -> Collection:
    passages = {name: f"real {name}" for name in "abcdyz"}
    queries = {"q1": "query one", "q2": "query two", "q3": "query three"}
    return Collection("made", queries, passages, qrels, {}, {})


# d is relevant and has no twin: no part of the pool. Nobody knows the text of `gone`.
JUDGED = collection({"q1": {"a": 2, "b": 1, "z": 0, "gone": 0}, "q2": {"c": 1, "d": 3, "z": -1}})
TWINS = [Twin("q1", "a", "twin a"), Twin("q1", "b", "twin b"), Twin("q2", "c", "twin c")]
BEFORE = encoder(
    {"twin a": 0.9, "real a": 0.8, "real b": 0.7, "twin b": 0.7, "real z": 0.6},
    {"real c": 0.5, "real z": 0.45, "twin c": 0.4},
)
AFTER = encoder(
    {"real a": 0.9, "twin a": 0.8, "real b": 0.7, "twin b": 0.6, "real z": 0.1},
    {"twin c": 0.5, "real z": 0.45, "real c": 0.4},
)


def d(human: float, llm: float) -> float:
    return 200 * (human - llm) / (human + llm)


# --- figures --------------------------------------------------------------------------------

# q1 ranks: twin a, real a, then b and its twin at 3 and 4, either way round; q2: real c, z, twin c.
H1 = (2 * PAID[2] + (PAID[3] + PAID[4]) / 2) / (2 + PAID[2])
L1 = (2 * PAID[1] + (PAID[3] + PAID[4]) / 2) / (2 + PAID[2])


def test_by_hand() -> None:
    found = source_bias(BEFORE, JUDGED, TWINS)
    assert (found.queries, found.twins, found.seed) == (2, 3, 0)
    assert found.wins == {"q1": 0.75, "q2": 0}  # a: its twin wins; b: equal, a half
    assert found.w_minus_half == (0.75 + 0) / 2 - 0.5
    assert found.human == {"q1": pytest.approx(H1), "q2": 1}
    assert found.llm == {"q1": pytest.approx(L1), "q2": pytest.approx(PAID[3])}
    assert found.d == pytest.approx(d((H1 + 1) / 2, (L1 + PAID[3]) / 2))
    assert found.d > 0  # favours people, and so w - 1/2 is below 0
    # A quarter of the resamples is q1 twice, a quarter q2 twice.
    assert found.w_interval == (-0.5, 0.25)
    assert found.d_interval == pytest.approx((d(H1, L1), d(1, PAID[3])))


def test_equal_texts_show_no_bias() -> None:
    """A twin that is its passage, word for word: equal scores, and neither is ranked before the other."""
    twins = [replace(twin, text=f"real {twin.passage_id}") for twin in TWINS]
    found = source_bias(BEFORE, JUDGED, twins)
    assert (found.w_minus_half, found.wins) == (0, {"q1": 0.5, "q2": 0.5})
    assert found.d == pytest.approx(0, abs=1e-12)
    assert found.human["q2"] == pytest.approx((PAID[1] + PAID[2]) / 2)
    assert found.w_interval == (0, 0)


def test_gain_offset() -> None:
    """Where 1 is irrelevant z is in the pool, and above; where it is relevant z has no twin and is not."""
    judged = collection({"q1": {"a": 3, "z": 1}})
    scores = encoder({"real z": 0.9, "real a": 0.8, "twin a": 0.7})
    offset = source_bias(scores, judged, TWINS[:1], gain_offset=1)
    assert offset.human == {"q1": pytest.approx(PAID[2])}
    assert offset.llm == {"q1": pytest.approx(PAID[3])}
    assert offset.d == pytest.approx(d(PAID[2], PAID[3]))
    plain = source_bias(scores, judged, TWINS[:1])
    assert plain.human == {"q1": 1}
    assert plain.llm == {"q1": pytest.approx(PAID[2])}


def test_only_five_ranks_count() -> None:
    judged = collection({"q1": {"a": 1, "b": 0, "c": 0, "d": 0, "y": 0, "z": 0}})
    above = {f"real {name}": 0.9 for name in "bcdz"}
    found = source_bias(encoder(above | {"real y": 0.1, "real a": 0.5, "twin a": 0.4}), judged, TWINS[:1])
    assert (found.human, found.llm) == ({"q1": pytest.approx(PAID[5])}, {"q1": 0})
    assert found.d == 200


def test_nothing_relevant_has_no_d() -> None:
    judged = collection({"q1": {"a": 0, "b": 0, "z": 0}, "q2": {"c": 1, "z": 0}})
    found = source_bias(BEFORE, judged, TWINS[:2])
    assert (found.w_minus_half, found.d, found.d_interval) == (0.25, None, None)
    both = source_bias(BEFORE, judged, TWINS)
    assert both.d == pytest.approx(d(1, PAID[3]))  # q1 leaves D as it is
    assert both.w_minus_half == -0.125  # and counts here
    assert both.d_interval is None  # some resample is q1 twice


def test_refused_twins() -> None:
    def refused(query: str, passage: str) -> str:
        with pytest.raises(InputError) as caught:
            source_bias(BEFORE, JUDGED, [*TWINS, Twin(query, passage, "text")])
        return str(caught.value)

    assert refused("q9", "a") == "a twin's query 'q9' is not in made"
    assert refused("q1", "gone") == "a twin's passage 'gone' is not in made"
    assert "passage 'c' is not judged for query 'q1'" in refused("q1", "c")
    assert "passage 'a' is not judged for query 'q3'" in refused("q3", "a")
    with pytest.raises(ValueError, match="needs twins"):
        source_bias(BEFORE, JUDGED, [])
    with pytest.raises(ValueError, match="two twins"):
        source_bias(BEFORE, JUDGED, [*TWINS, Twin("q1", "a", "another")])


# --- change ---------------------------------------------------------------------------------


def sides() -> tuple[SourceBias, SourceBias]:
    return source_bias(BEFORE, JUDGED, TWINS), source_bias(AFTER, JUDGED, TWINS)


def test_change_by_hand() -> None:
    """Wins go from .75 and 0 to 0 and 1; each resample has the same queries on both sides."""
    before, after = sides()
    assert after.wins == {"q1": 0, "q2": 1}
    found = bias_change(before, after, seed=3)
    assert (found.queries, found.seed, found.w) == (2, 3, 0.125)
    assert found.w_interval == (-0.75, 1)
    most, least = (2 + PAID[3]) / (2 + PAID[2]), (2 * PAID[2] + PAID[4]) / (2 + PAID[2])
    assert after.d == pytest.approx(d((most + PAID[3]) / 2, (least + 1) / 2))
    assert before.d is not None
    assert found.d == pytest.approx(after.d - before.d)
    ends = d(most, least) - d(H1, L1), d(PAID[3], 1) - d(1, PAID[3])
    assert found.d_interval == pytest.approx(sorted(ends))


def test_change_pairs_by_query_id() -> None:
    before, after = sides()
    turned = replace(
        after,
        wins=dict(reversed(after.wins.items())),
        human=dict(reversed(after.human.items())),
        llm=dict(reversed(after.llm.items())),
    )
    assert list(turned.wins) == ["q2", "q1"]
    assert bias_change(before, turned) == bias_change(before, after)


def test_no_change() -> None:
    before, _ = sides()
    found = bias_change(before, before)
    assert (found.w, found.w_interval, found.d, found.d_interval) == (0, (0, 0), 0, (0, 0))


def test_change_without_d() -> None:
    judged = collection({"q1": {"a": 0, "b": 0}, "q2": {"c": 0}})
    before, after = (source_bias(one, judged, TWINS) for one in (BEFORE, AFTER))
    found = bias_change(before, after)
    assert (found.w, found.d, found.d_interval) == (0.125, None, None)


def test_change_of_different_queries() -> None:
    before, _ = sides()
    with pytest.raises(ValueError, match="different queries"):
        bias_change(before, source_bias(AFTER, JUDGED, TWINS[:2]))


# --- the file -------------------------------------------------------------------------------

GOOD = '{"query_id": "q1", "passage_id": "a", "twin": "tä"}'


def test_read_twins(tmp_path: Path) -> None:
    path = tmp_path / "twins.jsonl"
    other = '{"passage_id": "b", "twin": "x\u2028y", "query_id": "q1", "more": 1}'
    path.write_bytes(f"{GOOD}\r\n\n{other}".encode())
    assert read_twins(path) == [Twin("q1", "a", "tä"), Twin("q1", "b", "x\u2028y")]
    assert read_twins(str(path)) == read_twins(path)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"query_id": "q1", ', "row 3: no JSON"),
        ('["q1", "b", "text"]', "row 3: expected an object with query_id, passage_id, twin"),
        ('{"query_id": "", "passage_id": "b", "twin": "t"}', "row 3, field 'query_id': expected a text"),
        ('{"query_id": "q1", "passage_id": 7, "twin": "t"}', "row 3, field 'passage_id': expected a text"),
        ('{"query_id": "q1", "passage_id": "b", "twin": " "}', "row 3, field 'twin': expected a text"),
        ('{"query_id": "q1", "passage_id": "b"}', "row 3, field 'twin': expected a text"),
        (GOOD, "row 3, field 'passage_id': a second twin of passage 'a' for query 'q1'"),
    ],
)
def test_bad_lines(tmp_path: Path, line: str, message: str) -> None:
    path = tmp_path / "twins.jsonl"
    path.write_text(f"{GOOD}\n\n{line}\n", encoding="utf-8")
    with pytest.raises(InputError) as caught:
        read_twins(path)
    assert str(caught.value).startswith(f"{path}, {message}")


def test_bad_bytes(tmp_path: Path) -> None:
    path = tmp_path / "twins.jsonl"
    path.write_bytes(b'{"query_id": "\xff", "passage_id": "b", "twin": "t"}')
    with pytest.raises(InputError, match="row 1: no JSON"):
        read_twins(path)


def test_no_file_and_no_twins(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"twins\.jsonl: cannot be read: No such file"):
        read_twins(tmp_path / "twins.jsonl")
    (tmp_path / "twins.jsonl").write_text("\n \n")
    with pytest.raises(InputError, match=r"twins\.jsonl: holds no twins"):
        read_twins(tmp_path / "twins.jsonl")


class Letters:
    """An encoder by the letters of a text."""

    def encode_queries(self, texts: Sequence[str], **_: Any) -> Vectors:
        return np.array([[text.lower().count(chr(n)) for n in range(97, 123)] for text in texts], np.float32)

    encode_passages = encode_queries


@pytest.mark.realdata
def test_the_twins_of_dl19(realdata: Path) -> None:
    twins = read_twins(realdata / "recorded" / "twins_dl19.jsonl")
    assert len(twins) == 160
    place = realdata / "trec_dl2019_passage_text"
    judged = read_collection(
        CollectionConfig(
            queries=str(place / "queries.jsonl"),
            corpus=str(place / "passages.jsonl.gz"),
            qrels=str(place / "qrels.txt"),
        )
    )
    found = source_bias(cast(Encoder, Letters()), judged, twins)
    assert (found.twins, found.queries) == (160, len({twin.query_id for twin in twins}))
    assert found.w_interval[0] <= found.w_minus_half <= found.w_interval[1]
    counts = Letters().encode_queries
    above = {query: [] for query in found.wins}  # type: dict[str, list[float]]
    for twin in twins:
        query, real, written = counts(
            [judged.queries[twin.query_id], judged.passages[twin.passage_id], twin.text]
        )
        above[twin.query_id].append(float(np.heaviside((written - real) @ query, 0.5)))
    assert found.wins == {query: pytest.approx(sum(own) / len(own)) for query, own in above.items()}
