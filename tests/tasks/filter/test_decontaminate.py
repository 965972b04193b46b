from __future__ import annotations

import gzip
import json
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gradeloom.schemas.config import DecontaminateFilter
from gradeloom.schemas.errors import InputError
from gradeloom.schemas.rows import ListRow, Passage
from gradeloom.tasks.filter.decontaminate import Contamination, EvaluationSet, Overlap
from gradeloom.tasks.filter.rules import filter_list
from gradeloom.tasks.filter.text import ngram_hashes, shingles, words

THIRTEEN = "one two three four five six seven eight nine ten eleven twelve thirteen"
FILTERS = (DecontaminateFilter(),)


def lines(*records: object) -> str:
    return "".join(json.dumps(record) + "\n" for record in records)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    beir = tmp_path / "beir"
    beir.mkdir()
    (beir / "queries.jsonl").write_text(lines({"_id": "1", "text": "How hot is tea?"}))
    with gzip.open(beir / "corpus.jsonl.gz", "wt") as corpus:
        corpus.write(lines({"_id": "a", "title": "Numbers", "text": f"Zero, {THIRTEEN.upper()}; fourteen."}))
    return beir


def load(place: Path, ngram: int = 13, name: str = "set") -> Contamination:
    return Contamination.load(DecontaminateFilter(sets={name: str(place)}, ngram=ngram))


def a_list(query: str, *texts: str) -> ListRow:
    passages = [Passage(grade=len(texts) - 1 - n, text=text) for n, text in enumerate(texts)]
    return ListRow(id="r", ordinal=0, query_id="q", query=query, passages=passages)


def test_queries_match_whatever_they_look_like(folder: Path) -> None:
    known = load(folder)
    assert known.query("how  hot is TEA") == "set"
    assert known.query("how hot is tea really") is None
    assert known.query("how hot is") is None


def test_thirteen_words_in_a_row_are_an_overlap_and_twelve_are_not(folder: Path) -> None:
    known = load(folder)
    assert known.passage(f"It says: {THIRTEEN}. Enough.") == Overlap("set", THIRTEEN)
    twelve = THIRTEEN.rsplit(" ", 1)[0]
    assert known.passage(f"It says: {twelve} and enough of it is said.") is None
    assert known.passage(f"{twelve} plus thirteen") is None
    assert load(folder, ngram=12).passage(f"It says: {twelve} and enough.") == Overlap("set", twelve)


def test_decisions(folder: Path) -> None:
    known = load(folder)
    cases = [
        (a_list("how hot is tea", THIRTEEN), "contaminated_query", None, "a query of set"),
        (a_list("why", "fine", THIRTEEN), "contaminated_passage", 0, f"shares {THIRTEEN!r} with set"),
        (a_list("why", "fine", "how hot is tea"), None, None, None),
    ]
    for row, reason, grade, detail in cases:
        decision = filter_list(FILTERS, row, grades=(1, 0), contamination=known)
        assert (decision.reason, decision.grade, decision.detail) == (reason, grade, detail)


def test_a_single_file_holds_queries_and_passages(tmp_path: Path) -> None:
    table = tmp_path / "topics.tsv.gz"
    table.write_bytes(gzip.compress(f"7\thow hot is tea\r\n8\t{THIRTEEN}\n".encode()))
    known = load(table)
    assert known.query("how hot is tea?") == "set"
    assert known.query("how hot is") is None
    assert known.passage(f"so {THIRTEEN}") == Overlap("set", THIRTEEN)
    answers = tmp_path / "nq.txt"
    answers.write_text("who sings it\t['Linda Davis']\n")
    assert load(answers).query("Who sings it?") == "set"


def test_the_first_set_by_name_is_named(folder: Path) -> None:
    both = DecontaminateFilter(sets={"zeta": str(folder), "beta": str(folder)})
    known = Contamination.load(both)
    assert known.query("how hot is tea") == "beta"
    overlap = known.passage(THIRTEEN)
    assert overlap is not None
    assert overlap.name == "beta"


def test_the_digest_says_what_decisions_depend_on(folder: Path, tmp_path: Path) -> None:
    copied = tmp_path / "elsewhere"
    copied.mkdir()
    (copied / "queries.jsonl.gz").write_bytes(gzip.compress((folder / "queries.jsonl").read_bytes()))
    with gzip.open(folder / "corpus.jsonl.gz") as corpus:
        (copied / "passages.jsonl").write_bytes(corpus.read())
    digest = load(folder).digest
    assert load(copied).digest == digest
    assert load(folder, ngram=12).digest != digest
    assert load(folder, name="other").digest != digest
    (folder / "queries.jsonl").write_text(lines({"text": "how cold is tea"}))
    assert load(folder).digest != digest
    assert Contamination.load(DecontaminateFilter()).digest != digest


@pytest.mark.parametrize(
    ("name", "content", "where"),
    [
        ("queries.jsonl", b'{"text": "fine"}\n{"text": \n', "queries.jsonl, row 2: not JSON"),
        ("queries.jsonl", b'{"_id": "1"}\n', "queries.jsonl, row 1, field 'text': an object with a text"),
        ("queries.jsonl", b"[1]\n", "queries.jsonl, row 1, field 'text': an object with a text"),
        ("queries.tsv", b"1\tfine\n2\t\xff\xfe\n", "queries.tsv, row 2: not UTF-8"),
        ("queries.jsonl.gz", b"no gzip", "queries.jsonl.gz, row 1: cannot read"),
        ("queries.jsonl.gz", gzip.compress(b'{"text": "fine"}\n' * 9)[:-9], "cannot read"),
        ("queries.jsonl", b"\n", "evaluation set 'set': no query or passage in it"),
        ("qrels.txt", b"1 0 2 3\n", "a folder with queries.jsonl and corpus.jsonl"),
    ],
)
def test_what_cannot_be_read_is_an_input_error(tmp_path: Path, name: str, content: bytes, where: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(InputError) as error:
        load(tmp_path)
    assert where in str(error.value)
    assert str(tmp_path) in str(error.value)


def test_missing_places_and_other_files_are_input_errors(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no such file or folder"):
        load(tmp_path / "nothing")
    (tmp_path / "queries.parquet").write_bytes(b"PAR1")
    with pytest.raises(InputError, match=r"a \.jsonl, \.tsv or \.txt file expected"):
        load(tmp_path / "queries.parquet")


few_words = st.lists(st.sampled_from("abc"), max_size=14)


@settings(max_examples=200)
@given(st.lists(few_words, max_size=4), few_words)
def test_overlap_equals_a_search_for_every_run(corpus: list[list[str]], asked: list[str]) -> None:
    hashes = [ngram_hashes(passage, 3) for passage in corpus] or [np.empty(0, np.uint64)]
    known = Contamination([EvaluationSet("set", frozenset(), np.unique(np.concatenate(hashes)))], 3)
    texts = [f" {' '.join(passage)} " for passage in corpus]
    runs = [" ".join(asked[i : i + 3]) for i in range(len(asked) - 2)]
    first = next((run for run in runs if any(f" {run} " in text for text in texts)), None)
    assert known.passage(" ".join(asked)) == (first and Overlap("set", first))


@pytest.mark.realdata
def test_dl19_knows_itself(realdata: Path) -> None:
    dl19 = realdata / "trec_dl2019_passage_text"
    known = load(dl19, name="dl19")
    queries = [json.loads(line)["text"] for line in (dl19 / "queries.jsonl").read_text().splitlines()]
    with gzip.open(dl19 / "passages.jsonl.gz", "rt") as corpus:
        passages = [json.loads(line)["text"] for line in corpus]
    assert [known.query(query) for query in queries] == ["dl19"] * 43
    long = [text for text in passages if len(words(text)) >= 13]
    assert len(long) > 9_000
    assert all(known.passage(text) for text in long[::20])
    assert not any(known.passage(text) for text in passages if len(words(text)) < 13)

    found: Counter[str | None] = Counter()
    with (realdata / "recorded" / "graded_lists.jsonl").open() as recorded:
        for line in recorded:
            record = json.loads(line)
            row = a_list(record["query"], *record["passages"].values())
            found[filter_list(FILTERS, row, grades=(3, 2, 1, 0), contamination=known).reason] += 1
    assert found == {None: 300}

    # Rewrites of its passages: some kept a long run of words.
    runs = {run for text in passages for run in shingles(words(text), 13)}
    twins = (realdata / "recorded" / "twins_dl19.jsonl").read_text().splitlines()
    rewritten = [json.loads(line)["twin"] for line in twins]
    kept_a_run = [bool(shingles(words(text), 13) & runs) for text in rewritten]
    assert [known.passage(text) is not None for text in rewritten] == kept_a_run
    assert (sum(kept_a_run), len(kept_a_run)) == (6, 160)


def test_a_byte_order_mark_is_no_part_of_a_set(tmp_path: Path) -> None:
    (tmp_path / "set.jsonl").write_bytes(b'\xef\xbb\xbf{"text": "How hot is tea?"}\n')
    assert load(tmp_path / "set.jsonl").query("how hot is tea") == "set"


@pytest.mark.parametrize("place", [12, 20, 40, -4])
def test_a_damaged_gzip_file_is_said(tmp_path: Path, place: int) -> None:
    packed = bytearray(gzip.compress(lines(*({"text": f"tea number {n}"} for n in range(5000))).encode()))
    packed[place] ^= 0x55
    (tmp_path / "set.jsonl.gz").write_bytes(packed)
    with pytest.raises(InputError, match=r"set\.jsonl\.gz, row \d+: "):
        load(tmp_path / "set.jsonl.gz")
