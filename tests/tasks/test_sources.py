from __future__ import annotations

import csv
import gzip
import json
import tracemalloc
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gradeloom.schemas.config import SourceConfig
from gradeloom.schemas.errors import InputError
from gradeloom.schemas.rows import QueryRow
from gradeloom.tasks.source_forms import source_digest
from gradeloom.tasks.sources import read_queries

TWO = [("7", "why is the sky red"), ("8", "boil an egg")]


def put(path: Path, content: bytes | str) -> Path:
    data = content.encode() if isinstance(content, str) else content
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
    return path


def rows(path: Path, *, limit: int | None = None, **config: Any) -> list[QueryRow]:
    return list(read_queries(SourceConfig(path=str(path), **config), limit=limit))


def pairs(path: Path, **config: Any) -> list[tuple[str, str]]:
    found = rows(path, **config)
    assert [row.ordinal for row in found] == list(range(len(found)))
    assert all(row.status == "kept" for row in found)
    return [(row.query_id, row.query) for row in found]


TREC = """<top>
<num> Number: 7
<title> why is the sky
 red

<desc> Description:
Some more words.
</top>

<top><num>8</num><title>boil an egg</title></top>
"""

FORMS = {
    "q.jsonl": '{"_id": "7", "text": "why is the sky red"}\n\n{"qid": 8, "query": "boil an egg"}',
    "q.ndjson": '\ufeff{"id": "7", "title": " why is the sky red\\r"}\n{"qid": 8, "question": "boil an egg"}',
    "q.tsv": "7\twhy is the sky red\n8\tboil an egg\n",
    "bom.tsv": "\ufeff7\twhy is the sky red\r\n8\tboil an egg\r\n",
    "header.tsv": "text\tlanguage\tqid\nwhy is the sky red\ten\t7\nboil an egg\ten\t8\n",
    "q.csv": 'id,query\n7,"why is the sky red"\n8,boil an egg\n',
    "bom.csv": '\ufeff"qid","query"\n7,why is the sky red\n8,"boil an egg"\n',
    "bare.csv": "7,why is the sky red\n8,boil an egg\n",
    "table.txt": "7\twhy is the sky red\n8\tboil an egg\n",
    "trec.txt": TREC,
    "q.topics": TREC.lower(),
}


@pytest.mark.parametrize("suffix", ["", ".gz"])
@pytest.mark.parametrize("name", FORMS)
def test_every_text_form_gives_the_same_queries(tmp_path: Path, name: str, suffix: str) -> None:
    assert pairs(put(tmp_path / (name + suffix), FORMS[name])) == TWO


def test_lines_without_ids_get_the_digest_of_the_normalised_text(tmp_path: Path) -> None:
    plain = pairs(put(tmp_path / "q.txt", "Why is  the sky red\nboil an egg\n"))
    objects = pairs(put(tmp_path / "q.jsonl", '{"text": "why IS the sky red"}\n{"text": "boil an egg"}\n'))
    assert [text for _, text in plain] == ["Why is  the sky red", "boil an egg"]
    assert [i for i, _ in plain] == [i for i, _ in objects]
    assert all(len(i) == 16 for i, _ in plain)


def test_column_numbers_name_the_columns_of_a_table_without_header(tmp_path: Path) -> None:
    path = put(tmp_path / "nq.txt", "why is the sky red\t['dust']\nboil an egg\t['10']\n")
    assert [text for _, text in pairs(path, text_field="0")] == [text for _, text in TWO]
    assert pairs(path, text_field="0", id_field="1") == [("['dust']", TWO[0][1]), ("['10']", TWO[1][1])]


def test_fields_can_be_named(tmp_path: Path) -> None:
    content = '{"key": 7, "claim": "why is the sky red", "text": "no"}\n'
    assert pairs(put(tmp_path / "q.jsonl", content), id_field="key", text_field="claim") == TWO[:1]
    table = put(tmp_path / "q.csv", "key,claim\n7,why is the sky red\n")
    assert pairs(table, id_field="key", text_field="claim") == TWO[:1]
    topics = put(tmp_path / "q.topics", TREC.replace("</top>", "<desc> Description: egg time\n</top>"))
    assert [text for _, text in pairs(topics, text_field="desc", on_bad="reject", limit=1)] == ["egg time"]


def test_parquet(tmp_path: Path) -> None:
    table = pa.table({"qid": [7, 8], "text": [text for _, text in TWO], "vector": [[1.0], [2.0]]})
    pq.write_table(table, tmp_path / "q.parquet")
    assert pairs(tmp_path / "q.parquet") == TWO


@pytest.mark.parametrize("name", ["queries.jsonl", "queries.jsonl.gz"])
def test_beir_folder(tmp_path: Path, name: str) -> None:
    put(tmp_path / name, FORMS["q.jsonl"])
    assert pairs(tmp_path) == TWO
    assert pairs(tmp_path, format="beir") == TWO


def test_hugging_face_data_set(tmp_path: Path) -> None:
    put(
        tmp_path / "train.jsonl",
        '{"_id": "7", "text": "why is the sky red"}\n{"_id": "8", "text": "boil an egg"}\n',
    )
    config = SourceConfig(dataset=str(tmp_path))
    assert [(row.query_id, row.query) for row in read_queries(config)] == TWO
    before = source_digest(config)
    assert source_digest(config) == before
    put(
        tmp_path / "train.jsonl",
        '{"_id": "7", "text": "why is the sky red"}\n{"_id": "9", "text": "boil an egg"}\n',
    )
    assert source_digest(config) != before
    with pytest.raises(InputError, match="split"):
        list(read_queries(SourceConfig(dataset=str(tmp_path), split="nope")))
    with pytest.raises(InputError, match="nope"):
        source_digest(SourceConfig(dataset=str(tmp_path), split="nope"))
    with pytest.raises(InputError, match="Hugging Face data set"):
        list(read_queries(SourceConfig(dataset=str(tmp_path / "none"))))


# --- bad rows -------------------------------------------------------------------------------

GOOD = '{"_id":"1","text":"good"}\n'
BAD_OBJECTS = [
    # the second row, reason, words of the message
    ('{"_id":"2","text":" \\t"}', "empty_query", "field 'text': the query is empty"),
    ('{"_id":"2","text":"\\u200b"}', "empty_query", "the query is empty"),
    ('{"_id":"1","text":"other"}', "duplicate_id", "field '_id': the id '1' stands in row 1 too"),
    ('{"_id":"2","text":" \\uff27OOD"}', "duplicate_query", "field 'text': the query stands in row 1 too"),
    ('{"text":"GOOD"}', "duplicate_query", "field 'text': the query stands in row 1 too"),
    ('{"_id":"2","text":', "bad_row", "is not JSON"),
    ('{"_id":"2","text":"\\ud800"}', "bad_row", "is not JSON"),
    ('["x"]', "bad_row", "a JSON object with fields was expected"),
    ('{"_id":"2","words":"x"}', "bad_row", "expected one of text, query, title, question"),
    ('{"_id":"2","text":7}', "bad_row", "field 'text': text was expected, found int"),
    ('{"_id":"2","text":null}', "bad_row", "field 'text': text was expected, found null"),
    ('{"_id":"2","text":"a\\u0000b"}', "bad_row", "field 'text': holds the control character U+0000"),
    ('{"_id":true,"text":"x"}', "bad_row", "field '_id': text or a whole number was expected, found bool"),
    ('{"_id":"a\\tb","text":"x"}', "bad_row", "field '_id': the id holds a tab or line end"),
    ('{"_id":" ","text":"x"}', "bad_row", "field '_id': the id is empty"),
    (b'{"_id":"2","text":"\xe9"}', "bad_encoding", "byte 0xe9 at position 20 is not UTF-8"),
]
NUL = "\x00"
BAD_ROWS = [
    # name, content, row, reason, words of the message
    *(
        (f"{i}.jsonl", GOOD.encode() + (bad.encode() if isinstance(bad, str) else bad), 2, reason, message)
        for i, (bad, reason, message) in enumerate(BAD_OBJECTS)
    ),
    ("blank.jsonl", GOOD + "\n" + GOOD, 3, "duplicate_id", "stands in row 1 too"),
    ("same.jsonl", '{"text":"good"}\n{"text":"GOOD"}\n', 2, "duplicate_query", "stands in row 1 too"),
    ("a.tsv", "1\tgood\n2\n", 2, "bad_row", "2 columns were expected, found 1"),
    ("b.tsv", "1\tgood\n2\t\n", 2, "empty_query", "is empty"),
    ("c.tsv", b"1\tgood\n2\tcaf\xe9\n", 2, "bad_encoding", "byte 0xe9 at position 6 is not UTF-8"),
    ("d.txt", "good\nx\ty\n", 2, "bad_row", "1 column was expected, found 2"),
    ("a.csv", 'id,text\n1,"good\nlines"\n2,x,y\n', 4, "bad_row", "2 columns were expected, found 3"),
    ("b.csv", b'id,text\n1,good\n2,"caf\xe9"\n', 3, "bad_encoding", "byte 0xe9 at position 4"),
    ("c.csv", 'id,text\n1,good\n2,"x" y\n', 3, "bad_row", "is not CSV"),
    ("d.csv", f"id,text\n1,good\n2,a{NUL}b\n", 3, "bad_row", "U+0000"),
    ("a.topics", TREC + "<top>\n<num> 9\n</top>\n", 11, "bad_row", "expected one of text, query"),
    ("b.topics", TREC + "<top>\n<title> x\n</top>\n", 11, "bad_row", "no number"),
    ("c.topics", TREC + "<top>\n<num> 9 <title> x\n", 11, "bad_row", "no </top>"),
    ("d.topics", TREC.encode() + b"<top>\n<num> 9 <title> caf\xe9\n</top>", 11, "bad_encoding", "0xe9"),
]


@pytest.mark.parametrize(
    ("name", "content", "row", "reason", "message"), BAD_ROWS, ids=[b[0] for b in BAD_ROWS]
)
def test_a_bad_row_stops_the_run_or_is_a_reject_that_says_where_and_why(
    tmp_path: Path, name: str, content: bytes | str, row: int, reason: str, message: str
) -> None:
    path = put(tmp_path / name, content)
    with pytest.raises(InputError) as caught:
        rows(path)
    assert f"{path}, row {row}" in str(caught.value)
    assert message in str(caught.value)

    found = rows(path, on_bad="reject")
    assert found[-1].status == "rejected"
    assert found[-1].reason == reason
    assert (found[-1].detail or "").startswith(f"row {row}")
    assert message in (found[-1].detail or "")
    assert [r.status for r in found[:-1]] == ["kept"] * (len(found) - 1)


def test_rows_after_a_bad_one_are_read(tmp_path: Path) -> None:
    good = ["1,alpha", "2,beta", "3,gamma"]
    path = put(tmp_path / "q.csv", "\n".join(["id,text", good[0], 'x,"a" b', good[1], "y", good[2]]))
    found = rows(path, on_bad="reject")
    assert [(r.ordinal, r.status, r.query) for r in found] == [
        (0, "kept", "alpha"), (1, "rejected", ""), (2, "kept", "beta"), (3, "rejected", ""),
        (4, "kept", "gamma"),
    ]  # fmt: skip
    topics = put(tmp_path / "q.topics", "<top>\n<num> 1 <title> lost\n" + TREC)
    assert [r.query for r in rows(topics, on_bad="reject")] == ["", TWO[0][1], TWO[1][1]]


def test_an_earlier_good_row_wins_and_a_bad_row_takes_nothing(tmp_path: Path) -> None:
    content = [("1", ""), ("1", "first"), ("1", "second"), ("2", "First"), ("2", "second")]
    path = put(tmp_path / "q.jsonl", "\n".join(json.dumps({"_id": i, "text": t}) for i, t in content))
    assert [r.reason for r in rows(path, on_bad="reject")] == [
        "empty_query", None, "duplicate_id", "duplicate_query", None,
    ]  # fmt: skip


def test_parquet_with_text_that_is_not_utf8(tmp_path: Path) -> None:
    raw = pa.array([b"good", b"caf\xe9", None], pa.binary())
    text = pa.Array.from_buffers(pa.string(), 3, raw.buffers())
    pq.write_table(pa.table({"_id": ["1", "2", "3"], "text": text}), tmp_path / "q.parquet")
    assert [r.reason for r in rows(tmp_path / "q.parquet", on_bad="reject")] == [
        None,
        "bad_encoding",
        "bad_row",
    ]


def test_limit_counts_source_rows(tmp_path: Path) -> None:
    path = put(tmp_path / "q.tsv", "1\ta\n2\t\n3\tc\n")
    assert [r.status for r in rows(path, on_bad="reject", limit=2)] == ["kept", "rejected"]
    assert len(rows(path, limit=1)) == 1  # the bad row is not reached


def test_very_long_rows(tmp_path: Path) -> None:
    long = "word " * 400_000
    path = put(tmp_path / "q.csv", f"id,text\n1,{long}\n2,short\n")
    assert [len(r.query) for r in rows(path)] == [1_999_999, 5]
    assert len(rows(put(tmp_path / "q.jsonl", json.dumps({"text": long})))[0].query) == 1_999_999


def test_memory_does_not_grow_with_rows(tmp_path: Path) -> None:
    def peak(count: int) -> int:
        path = put(tmp_path / "q.tsv", "".join(f"{i}\tquery number {i}\n" for i in range(count)))
        tracemalloc.start()
        assert sum(1 for _ in read_queries(SourceConfig(path=str(path)))) == count
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return peak

    peak(10)
    assert peak(20_000) - peak(2_000) < 200_000  # a set of 18,000 digests takes 2 MB


# --- bad sources ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "content", "config", "message"),
    [
        ("q.jsonl", "", {}, "holds no rows"),
        ("q.csv", "id,text\n", {}, "holds no rows"),
        ("q.topics", "", {}, "holds no rows"),
        ("q.doc", "x", {}, "unknown form; expected a .jsonl"),
        ("q", "x", {}, "unknown form"),
        ("q.parquet", "not parquet", {}, "cannot be read as Parquet"),
        ("q.parquet.gz", "x", {}, "compressed inside"),
        ("q.jsonl", "{}", {"format": "beir"}, "a BEIR folder with queries.jsonl was expected"),
        ("q.jsonl", "{}", {"format": "huggingface"}, "source.dataset"),
        ("q.csv", "id,claim\n1,x\n", {}, "which column holds the query? set source.text_field"),
        ("q.csv", "id,claim\n1,x\n", {"text_field": "words"}, "field 'words': the header has no such column"),
        ("q.tsv", "who is it\t['me']\n", {}, "set source.text_field"),
        ("q.tsv", "1\tx\ty\n", {}, "the only columns"),
        ("q.tsv", "1\tx\n", {"text_field": "2"}, "a column number from 0 to 1"),
        ("q.tsv", "1\tx\n", {"id_field": "0"}, "source.text_field needs one too"),
        ("q.tsv", b"\xff\xfe1\x00\t\x00x\x00\n\x00", {}, "the first row tells the columns"),
    ],
)
def test_a_source_that_cannot_be_read_says_what_was_expected(
    tmp_path: Path, name: str, content: bytes | str, config: dict[str, Any], message: str
) -> None:
    path = put(tmp_path / name, content)
    with pytest.raises(InputError) as caught:
        rows(path, on_bad="reject", **config)
    assert str(path) in str(caught.value)
    assert message in str(caught.value)


def test_missing_file_folder_and_damaged_gzip(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="does not exist"):
        rows(tmp_path / "none.jsonl")
    with pytest.raises(InputError, match="does not exist"):
        source_digest(SourceConfig(path=str(tmp_path / "none.jsonl")))
    with pytest.raises(InputError, match=r"no queries\.jsonl in this folder"):
        rows(tmp_path)
    with pytest.raises(InputError, match="is a folder"):
        rows(tmp_path, format="csv")
    plain = tmp_path / "plain.jsonl.gz"
    plain.write_bytes(b'{"text": "x"}')
    with pytest.raises(InputError, match="no gzip file"):
        rows(plain)
    cut = put(tmp_path / "cut.tsv.gz", "".join(f"{i}\tquery {i * 7919}\n" for i in range(1000)))
    cut.write_bytes(cut.read_bytes()[:-100])
    with pytest.raises(InputError, match="damaged"):
        rows(cut)


def test_the_digest_is_of_form_and_bytes_not_of_the_place(tmp_path: Path) -> None:
    a, b = put(tmp_path / "a.tsv", "1\tx\n"), put(tmp_path / "b.tsv", "1\tx\n")
    assert source_digest(SourceConfig(path=str(a))) == source_digest(SourceConfig(path=str(b)))
    as_csv = put(tmp_path / "a.csv", "1\tx\n")
    assert source_digest(SourceConfig(path=str(a))) != source_digest(SourceConfig(path=str(as_csv)))
    put(b, "1\ty\n")
    assert source_digest(SourceConfig(path=str(a))) != source_digest(SourceConfig(path=str(b)))


# --- properties -----------------------------------------------------------------------------

VALUES = st.one_of(st.text(max_size=8), st.integers(0, 3), st.none(), st.sampled_from(["", "1", "a", "A"]))
OBJECTS = st.lists(
    st.dictionaries(st.sampled_from(["_id", "text", "other"]), VALUES, max_size=3), min_size=1, max_size=30
)
quick = settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@quick
@given(objects=OBJECTS)
def test_ids_are_unique_and_stable_and_ordinals_dense(tmp_path: Path, objects: list[dict[str, Any]]) -> None:
    path = put(tmp_path / "q.jsonl", "\n".join(json.dumps(o) for o in objects))
    found = rows(path, on_bad="reject")
    assert [r.ordinal for r in found] == list(range(len(objects)))
    assert len({r.id for r in found}) == len(found)
    assert rows(path, on_bad="reject") == found
    kept = [r for r in found if r.status == "kept"]
    assert len({r.query_id for r in kept}) == len(kept)
    assert all((r.reason is None) == (r.status == "kept") for r in found)
    for r in found:
        r.model_dump_json().encode()
    # What a row became never depends on the rows after it.
    half = len(objects) // 2 + 1
    assert rows(path, on_bad="reject", limit=half) == found[:half]


@quick
@given(data=st.binary(max_size=200), name=st.sampled_from(["q.jsonl", "q.tsv", "q.csv", "q.txt", "q.topics"]))
def test_arbitrary_bytes_give_rows_or_an_input_error(tmp_path: Path, data: bytes, name: str) -> None:
    try:
        found = rows(put(tmp_path / name, data), on_bad="reject")
    except InputError:
        return
    assert [r.ordinal for r in found] == list(range(len(found)))
    assert len({r.id for r in found}) == len(found)


CELLS = st.text(st.characters(codec="utf-8", categories=["L", "N", "P", "Zs"]), min_size=1, max_size=12)


@quick
@given(texts=st.lists(CELLS.filter(lambda t: t.strip() and t.isprintable()), min_size=1, max_size=10))
def test_csv_as_the_csv_module_writes_it_is_read_back(tmp_path: Path, texts: list[str]) -> None:
    path = tmp_path / "q.csv"
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file)
        writer.writerows([("qid", "text"), *((f"q{i}", f"{text}\n{i}") for i, text in enumerate(texts))])
    assert pairs(path) == [(f"q{i}", f"{text}\n{i}".strip()) for i, text in enumerate(texts)]


# --- real data ------------------------------------------------------------------------------


@pytest.mark.realdata
@pytest.mark.parametrize(
    ("name", "count", "first"),
    [
        ("queries/topics.msmarco-passage.dev-subset.txt", 6980, ("1048585", "what is paula deen's brother")),
        ("recorded/graded_lists.jsonl", 300, ("772928", "what is moca")),
        ("trec_dl2020_passage_text", 54, ("23849", "are naturalization records public information")),
        ("llmjudge2024_dev_text/queries.jsonl", 25, ("q18", "dog age by teeth")),
    ],
)
def test_real_queries_are_all_good(realdata: Path, name: str, count: int, first: tuple[str, str]) -> None:
    found = pairs(realdata / name)
    assert len(found) == count
    assert found[0] == first


@pytest.mark.realdata
def test_real_questions_without_ids(realdata: Path) -> None:
    found = rows(realdata / "queries" / "topics.nq.dev.txt", text_field="0")
    assert len(found) == 8757
    assert found[0].query == "who sings does he love me with reba"


@pytest.mark.realdata
def test_real_duplicates_are_counted(realdata: Path) -> None:
    path = realdata / "scifact" / "claims_validation.csv"
    found = rows(path, text_field="claim", on_bad="reject")
    with path.open(encoding="utf-8", newline="") as file:
        claims = list(csv.DictReader(file))
    assert len(found) == len(claims)
    assert sum(r.status == "kept" for r in found) == len({claim["id"] for claim in claims})


@pytest.mark.realdata
def test_the_sample_queries_are_ours(realdata: Path) -> None:
    sample = Path(__file__).parents[2] / "data" / "samples" / "queries.jsonl"
    ours = {query.casefold() for _, query in pairs(sample)}
    assert len(ours) == 24
    for name, config in [
        ("queries/topics.msmarco-passage.dev-subset.txt", {}),
        ("queries/topics.nq.dev.txt", {"text_field": "0"}),
        ("trec_dl2019_passage_text", {}),
        ("trec_dl2020_passage_text", {}),
        ("llmjudge2024_dev_text", {}),
    ]:
        assert not ours & {r.query.casefold() for r in rows(realdata / name, **config)}


def test_a_column_that_stands_twice_is_refused(tmp_path: Path) -> None:
    twice = pa.Table.from_arrays([pa.array(["a b"]), pa.array(["c d"])], names=["text", "text"])
    pq.write_table(twice, tmp_path / "q.parquet")
    with pytest.raises(InputError, match=r"q\.parquet: a column stands there twice"):
        list(read_queries(SourceConfig(path=str(tmp_path / "q.parquet"))))


@pytest.mark.parametrize(
    ("name", "header"),
    [("q.csv", "id;text"), ("q.csv", "id\ttext"), ("q.tsv", "id,query"), ("q.csv", "qid|title")],
)
def test_another_separator_is_not_read_as_one_column_of_queries(
    tmp_path: Path, name: str, header: str
) -> None:
    (tmp_path / name).write_text(f"{header}\n1{header[2]}why is the sky blue\n")
    with pytest.raises(InputError, match="row 1: one column was found, and its name looks like several"):
        list(read_queries(SourceConfig(path=str(tmp_path / name))))
