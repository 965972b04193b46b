from __future__ import annotations

import gzip
import hashlib
import json
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st
from made_stories import GRADES, cut, kept

from gradeloom.schemas.errors import InputError
from gradeloom.schemas.retriever import CollectionConfig
from gradeloom.schemas.rows import Judgement, digest
from gradeloom.tasks.collection import Collection, read_collection, read_qrels
from gradeloom.tasks.release.export import export_beir

CORPUS = [
    {"_id": "d1", "title": "Owls", "text": "They turn their heads."},
    {"_id": "d2", "title": "", "text": "  Bread rises.\n"},
    {"_id": "d3", "text": "No title."},
    {"_id": "d4", "title": "Only a title", "text": ""},
    {"_id": "d5", "title": None, "text": ""},
]
TEXTS = {
    "d1": "Owls They turn their heads.", "d2": "Bread rises.", "d3": "No title.", "d4": "Only a title",
    "d5": "",
}  # fmt: skip
QUERIES = [{"_id": "q2", "text": " why? "}, {"_id": "q1", "text": "what?", "title": "is not looked at"}]
QRELS = {"q1": {"d1": 3.0, "d2": 0.0}, "q2": {"d3": 1.0}}


def jsonl(path: Path, rows: list[dict[str, Any]]) -> Path:
    data = "".join(json.dumps(row) + "\n" for row in rows).encode()
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
    return path


def parquet(path: Path, rows: list[dict[str, Any]]) -> Path:
    pq.write_table(pa.Table.from_pylist(rows), path)
    return path


def written(path: Path, text: str) -> Path:
    data = text.encode()
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
    return path


TREC = "q1 0 d1 3\nq1\tQ0\td2\t0\n\nq2 0  d3 1\r\n"
BEIR = "query-id\tcorpus-id\tscore\nq1\td1\t3\nq1\td2\t0\nq2\td3\t1\n"


def three(queries: Path, corpus: Path, qrels: Path) -> Collection:
    return read_collection(
        CollectionConfig(queries=str(queries), corpus=str(corpus), qrels=str(qrels)), name="three"
    )


# --- files ------------------------------------------------------------------------------------


def expect(found: Collection) -> None:
    assert found.queries == {"q2": "why?", "q1": "what?"}
    assert list(found.queries) == ["q2", "q1"]  # the source's order
    assert dict(found.passages) == TEXTS
    assert found.qrels == QRELS
    assert found.grades == {}


@pytest.mark.parametrize("packed", ["", ".gz"])
def test_three_jsonl_files(tmp_path: Path, packed: str) -> None:
    queries = jsonl(tmp_path / f"q.jsonl{packed}", QUERIES)
    corpus = jsonl(tmp_path / f"c.jsonl{packed}", CORPUS)
    qrels = written(tmp_path / f"qrels.txt{packed}", TREC)
    found = three(queries, corpus, qrels)
    expect(found)
    assert found.name == "three"
    assert found.identity == {
        "files": {
            path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in (queries, corpus, qrels)
        }
    }


def test_tables(tmp_path: Path) -> None:
    queries = written(tmp_path / "q.tsv", "q2\twhy?\nq1\twhat?\n")  # as MS MARCO's, without a header
    lines = [
        "_id\ttitle\ttext",
        *(f"{r['_id']}\t{r.get('title') or ''}\t{r['text'].strip()}" for r in CORPUS),
    ]
    corpus = written(tmp_path / "c.tsv.gz", "\n".join(lines))
    expect(three(queries, corpus, written(tmp_path / "qrels.tsv", BEIR)))


def test_parquet(tmp_path: Path) -> None:
    judged = [
        {"score": g, "query-id": q, "corpus-id": d, "x": 1} for q, of in QRELS.items() for d, g in of.items()
    ]
    expect(
        three(
            parquet(tmp_path / "q.parquet", QUERIES),
            parquet(tmp_path / "c.parquet", CORPUS),
            parquet(tmp_path / "qrels.parquet", judged),
        )
    )


def test_whole_numbers_are_ids(tmp_path: Path) -> None:
    queries = jsonl(tmp_path / "q.jsonl", [{"_id": 7, "text": "q"}])
    corpus = parquet(tmp_path / "c.parquet", [{"_id": 1, "text": "a"}])
    qrels = parquet(tmp_path / "j.parquet", [{"query-id": 7, "corpus-id": 1, "score": 2}])
    found = three(queries, corpus, qrels)
    assert (found.queries, found.passages, found.qrels) == ({"7": "q"}, {"1": "a"}, {"7": {"1": 2.0}})


def test_a_beir_folder(tmp_path: Path) -> None:
    jsonl(tmp_path / "set" / "queries.jsonl", QUERIES)
    jsonl(tmp_path / "set" / "corpus.jsonl.gz", CORPUS)
    written(tmp_path / "set" / "qrels" / "dev.tsv", BEIR)
    found = read_collection(CollectionConfig(path=str(tmp_path / "set"), split="dev"))
    expect(found)
    assert found.name == "set"
    assert set(found.identity["files"]) == {"queries.jsonl", "corpus.jsonl.gz", "dev.tsv"}
    with pytest.raises(InputError, match=r"set/qrels, field 'split': no split 'test'; there are: dev"):
        read_collection(CollectionConfig(path=str(tmp_path / "set")))


def test_judgements_of_a_file_take_the_place_of_the_folders(tmp_path: Path) -> None:
    jsonl(tmp_path / "set" / "queries.jsonl", QUERIES)
    jsonl(tmp_path / "set" / "corpus.jsonl", CORPUS)
    mined = written(tmp_path / "mined.txt", "q1 0 d4 0")
    found = read_collection(CollectionConfig(path=str(tmp_path / "set"), qrels=str(mined)))  # and no split
    assert found.qrels == {"q1": {"d4": 0.0}}
    assert "mined.txt" in found.identity["files"]


def test_files_of_one_name_are_told_apart(tmp_path: Path) -> None:
    queries = jsonl(tmp_path / "queries" / "dl.jsonl", QUERIES)
    corpus = jsonl(tmp_path / "corpus" / "dl.jsonl", CORPUS)
    found = three(queries, corpus, written(tmp_path / "qrels.txt", TREC))
    assert set(found.identity["files"]) == {"queries/dl.jsonl", "corpus/dl.jsonl", "qrels.txt"}


def test_an_id_may_stand_twice_with_one_text(tmp_path: Path) -> None:
    queries = jsonl(tmp_path / "q.jsonl", [*QUERIES, QUERIES[0]])
    corpus = jsonl(tmp_path / "c.jsonl", [*CORPUS, CORPUS[1]])
    expect(three(queries, corpus, written(tmp_path / "qrels.txt", TREC)))


# --- what a person got wrong: one line, with file, row and field --------------------------------

GOOD_CORPUS = '{"_id": "d1", "text": "a"}\n'
GOOD_QUERIES = '{"_id": "q1", "text": "a"}\n'


@pytest.mark.parametrize(
    ("corpus", "said"),
    [
        ('{"_id": "d1", "text": "b"}', "row 2, field '_id': the id 'd1' stands in an earlier row too"),
        ('{"text": "b"}', "row 2: an id was expected in one of _id, query_id, qid, id; the row has 'text'"),
        ('{"_id": "", "text": "b"}', "row 2, field '_id': text or a whole number was expected, found ''"),
        ('{"_id": 1.5, "text": "b"}', "row 2, field '_id': text or a whole number was expected, found 1.5"),
        ('{"_id": true, "text": "b"}', "row 2, field '_id': text or a whole number was expected, found True"),
        ('{"_id": "d2"}', "row 2, field 'text': the field is missing; the row has '_id'"),
        ('{"_id": "d2", "text": null}', "row 2, field 'text': text was expected, found null"),
        ('{"_id": "d2", "text": ["b"]}', "row 2, field 'text': text was expected, found list"),
        ('{"_id": "d2", "title": 3, "text": "b"}', "row 2, field 'title': text was expected, found int"),
        ('["d2", "b"]', "row 2: a JSON object with fields was expected"),
        ("{d2", "row 2: is not JSON"),
    ],
)  # fmt: skip
def test_a_bad_passage_is_named(tmp_path: Path, corpus: str, said: str) -> None:
    queries = written(tmp_path / "q.jsonl", GOOD_QUERIES)
    path = written(tmp_path / "c.jsonl", GOOD_CORPUS + corpus)
    with pytest.raises(InputError) as caught:
        three(queries, path, written(tmp_path / "qrels.txt", TREC))
    assert str(caught.value).startswith(f"{path}, {said}")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("q.jsonl", '{"_id": "q1", "text": " "}', ", row 1, field 'text': the query is empty"),
        ("q.jsonl", "", ": holds no rows; queries were expected"),
        ("c.jsonl", "\n", ": holds no rows; passages were expected"),
        ("c.jsonl.gz", None, ": there is no such file; passages were expected"),
        ("qrels.txt", None, ": there is no such file; judgements were expected"),
        ("qrels.txt", "\n", ": holds no judgements"),
        ("qrels.txt", "q1 0 d1 high", ", row 1, field 'score': a number was expected as grade, found 'high'"),
        ("qrels.txt", "q1 0 d1 1\nq1 0 d2 nan", ", row 2, field 'score': a number was expected"),
        ("qrels.txt", "q1 0 d1 1\nq1 d2 2", ", row 2: TREC's `query-id 0 passage-id grade`, or a first row"),
        ("qrels.tsv", "q1\td1\t2", ", row 1: TREC's `query-id 0 passage-id grade`, or a first row"),
        ("qrels.tsv", "query-id\tdoc\tscore", ", row 1, field 'corpus-id': the header has no such column"),
        ("qrels.tsv", "query-id\tcorpus-id\tscore\nq1\td1", ", row 2: a row of 3 fields between tabs was"),
        ("qrels.tsv", "query-id\tcorpus-id\tscore\n\td1\t1", ", row 2, field 'query-id': an id was expected"),
        ("qrels.txt.gz", "plain", ": damaged or no gzip file"),
    ],
)  # fmt: skip
def test_a_bad_file_is_named(tmp_path: Path, name: str, text: str | None, said: str) -> None:
    good = {"q": GOOD_QUERIES, "c": GOOD_CORPUS, "qrels": TREC}
    paths = {stem: written(tmp_path / f"{stem}.jsonl", content) for stem, content in good.items()}
    bad = paths[name.split(".")[0]] = tmp_path / name
    if text is None:
        bad.unlink(missing_ok=True)
    else:
        bad.write_text(text)
    with pytest.raises(InputError) as caught:
        three(paths["q"], paths["c"], paths["qrels"])
    assert str(caught.value).startswith(f"{bad}{said}")


def test_bytes_that_are_no_text_are_named(tmp_path: Path) -> None:
    path = tmp_path / "qrels.txt"
    path.write_bytes(b"q1 0 d1 1\nq1 0 d\xff 1\n")
    with pytest.raises(InputError, match=r"qrels.txt, row 2: byte 0xff at position 7 is not UTF-8"):
        read_qrels(path)


def test_a_bad_parquet_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "no.parquet").write_bytes(b"PAR1 no PAR1")
    with pytest.raises(InputError, match=r"no.parquet: cannot be read as Parquet"):
        read_qrels(tmp_path / "no.parquet")
    path = parquet(tmp_path / "other.parquet", [{"query-id": "q", "doc": "d", "score": 1}])
    with pytest.raises(InputError, match=r"other.parquet, field 'corpus-id': there is no such column"):
        read_qrels(path)
    path = parquet(tmp_path / "null.parquet", [{"query-id": "q", "corpus-id": "d", "score": None}])
    with pytest.raises(InputError, match=r"null.parquet, row 1, field 'score': a number was expected"):
        read_qrels(path)


def test_a_folder_must_be_one_of_beir(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="a BEIR folder was expected"):
        read_collection(CollectionConfig(path=str(tmp_path / "none")))
    with pytest.raises(InputError, match=r"no queries\.jsonl in this folder"):
        read_collection(CollectionConfig(path=str(tmp_path)))


# --- judgements -------------------------------------------------------------------------------


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["q1", "q2", "ü"]),
            st.text("ab.-", min_size=1, max_size=3),
            st.integers(-2, 4) | st.floats(-2, 4),
        ),
        min_size=1,
    ),
    st.randoms(),
)
def test_of_several_judgements_the_highest_counts_in_any_order(
    tmp_path_factory: pytest.TempPathFactory, rows: list[tuple[str, str, float]], random: Any
) -> None:
    path = tmp_path_factory.mktemp("qrels") / "qrels.txt"
    expected = {
        q: {d: max(g for q2, d2, g in rows if (q2, d2) == (q, d)) for q2, d, _ in rows if q2 == q}
        for q, _, _ in rows
    }  # fmt: skip
    for _ in range(2):
        path.write_text("".join(f"{q} 0 {d} {g}\n" for q, d, g in rows))
        assert read_qrels(path) == expected
        random.shuffle(rows)


def test_a_header_tells_the_columns(tmp_path: Path) -> None:
    path = written(tmp_path / "x.tsv", "score\textra\tcorpus-id\tquery-id\n2\tx\td 1\tq1\n")
    assert read_qrels(path) == {"q1": {"d 1": 2.0}}


def test_a_byte_order_mark_is_no_part_of_an_id(tmp_path: Path) -> None:
    assert read_qrels(written(tmp_path / "x.txt", "\ufeffq1 0 d1 1")) == {"q1": {"d1": 1.0}}


# --- a release --------------------------------------------------------------------------------


def reading(grade: int, *, abstained: bool = False, judged: int | None = 2) -> Judgement:
    return Judgement(
        grade=grade, judged=judged, expected=1.75, entropy=0.5, mass=0.2 if abstained else 0.9,
        abstained=abstained,
    )  # fmt: skip


def test_a_release_has_the_grades_of_its_lists(tmp_path: Path) -> None:
    first, second = kept(0), kept(1)
    assert second.judged is not None
    readings = [reading(3), reading(2, abstained=True), reading(1, judged=None), reading(0)]
    second = replace(second, judged=second.judged.model_copy(update={"judgements": readings}))
    released = cut(tmp_path, [first, second])

    for which in ("made", "made@0.1.0", str(released.path)):
        found = read_collection(CollectionConfig(release=which), releases=tmp_path)
        assert found.name == "made@0.1.0"
        assert found.identity == {
            "release": "made", "version": "0.1.0", "digest": released.manifest.digest,
        }  # fmt: skip
    assert found.queries == {"q0": "what is thing 0?", "q1": "what is thing 1?"}
    ids = {
        row: [digest(f"row{row}", str(g), f"passage of level {g} about thing {row}") for g in GRADES]
        for row in (0, 1)
    }
    assert list(found.passages) == [*ids[0], *ids[1]]
    assert found.passages[ids[1][2]] == "passage of level 1 about thing 1"
    assert found.qrels == {f"q{row}": dict(zip(ids[row], GRADES, strict=True)) for row in (0, 1)}
    assert found.grades["intended"] == found.qrels
    assert found.grades["judged"]["q0"] == dict(zip(ids[0], (2, 2, 1, 0), strict=True))
    assert found.grades["expected"]["q0"] == dict(zip(ids[0], (2.25, 2.25, 1.25, 0.25), strict=True))
    # What the judge abstained on has no grade of its.
    assert found.grades["judged"]["q1"] == {ids[1][0]: 2, ids[1][3]: 2}
    assert found.grades["expected"]["q1"] == {ids[1][0]: 1.75, ids[1][2]: 1.75, ids[1][3]: 1.75}


def test_a_release_reads_as_its_export_does(tmp_path: Path) -> None:
    released = cut(
        tmp_path / "releases", [kept(0, query_id='the "first"'), kept(1, texts=["a\tb", "c\n", "d", "e"])]
    )
    a = read_collection(CollectionConfig(release="made"), releases=tmp_path / "releases")
    b = read_collection(CollectionConfig(path=str(export_beir(released.path, tmp_path / "beir"))))
    assert (a.queries, a.passages, a.qrels) == (b.queries, b.passages, b.qrels)
    assert 'the "first"' in a.qrels


def test_judgements_of_a_file_take_the_place_of_a_releases(tmp_path: Path) -> None:
    cut(tmp_path, [kept(0)])
    qrels = written(tmp_path / "mine.txt", "q0 0 other 1")
    found = read_collection(CollectionConfig(release="made", qrels=str(qrels)), releases=tmp_path)
    assert found.qrels == {"q0": {"other": 1.0}}
    assert found.grades == {}
    assert set(found.identity) == {"release", "version", "digest", "files"}


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda place: (place / "corpus" / "train-00000.parquet").unlink(), "holds no graded lists"),
        (lambda place: (place / "card.txt").write_text("more"), "card.txt: not listed in the manifest"),
        (lambda place: (place / "manifest.json").unlink(), "no released version of made"),
    ],
)
def test_a_release_is_read_as_it_was_cut_or_not_at_all(
    tmp_path: Path, damage: Callable[[Path], object], said: str
) -> None:
    damage(cut(tmp_path, [kept(0)]).path)
    with pytest.raises(InputError, match=said):
        read_collection(CollectionConfig(release="made"), releases=tmp_path)


# --- the real ones ------------------------------------------------------------------------------

RealSet = Callable[[str], CollectionConfig]


@pytest.mark.realdata
@pytest.mark.parametrize(
    ("name", "queries", "judged", "passages", "grades"),
    [
        ("DL19", 43, 43, 9139, {0: 5158, 1: 1601, 2: 1804, 3: 697}),
        ("DL20", 54, 54, 11224, {0: 7780, 1: 1940, 2: 1020, 3: 646}),
        ("LLMJudge dev", 25, 25, 7224, {0: 4538, 1: 1403, 2: 625, 3: 697}),
        ("Chorus", 135, 135, 19406, {0: 1853, 1: 238, 2: 105, 3: 1472}),
        # 2,311 pairs; of 168 that two lines judge the higher grade counts: 1,2 66 times; 1,4 4; 2,3 50;
        # 2,4 14; 3,4 34. From the lines' 1436/678/223/142 the lower ones go.
        ("MedQuAD", 104, 103, 1935, {1: 1436 - 70, 2: 678 - 64, 3: 223 - 34, 4: 142}),
        ("Cranfield", 225, 225, 1400, {1: 363, 2: 734, 3: 387, 4: 128}),
        ("CSFCube", 50, 50, 4205, {0: 4400, 1: 1348, 2: 412, 3: 84}),
        ("SciFact", 300, 300, 5183, {1: 339}),
    ],
)
def test_real_collections_have_what_their_makers_say(
    real_set: RealSet, name: str, queries: int, judged: int, passages: int, grades: dict[int, int]
) -> None:
    found = read_collection(real_set(name))
    assert (len(found.queries), len(found.qrels), len(found.passages)) == (queries, judged, passages)
    assert Counter(grade for of in found.qrels.values() for grade in of.values()) == grades
    assert found.qrels.keys() <= found.queries.keys()
    assert all(passage in found.passages for of in found.qrels.values() for passage in of)
    empty = [passage for passage, text in found.passages.items() if not text]
    assert empty == (["471", "995"] if name == "Cranfield" else [])


@pytest.mark.realdata
def test_chorus_has_products_without_a_description(real_set: RealSet) -> None:
    chorus = real_set("Chorus")
    with gzip.open(str(chorus.corpus)) as file:
        rows = [json.loads(line) for line in file]
    found = read_collection(chorus)
    without = [row for row in rows if not row["text"]]
    assert len(without) == 721
    assert all(found.passages[row["_id"]] == row["title"].strip() for row in without)
