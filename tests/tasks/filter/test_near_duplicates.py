from __future__ import annotations

import json
import os
import random
import sqlite3
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gradeloom.schemas.config import NearDuplicatesFilter
from gradeloom.schemas.errors import InputError
from gradeloom.schemas.rows import DecisionRow, ListRow, Passage
from gradeloom.tasks.filter.near_duplicates import NearDuplicateIndex

DEFAULT = NearDuplicatesFilter()
# Two passages of similarity 1/2 miss each other with a chance of 2^-64.
SURE = NearDuplicatesFilter(threshold=0.5, shingle=2, bands=64, rows_per_band=1)

# Hundreds of indexes are made: in memory where there is such a folder, since each waits for the disk.
MEMORY = "/dev/shm" if Path("/dev/shm").is_dir() else None


def a_list(number: int, *texts: str) -> ListRow:
    return ListRow(
        id=f"r{number}", ordinal=number, query_id=f"q{number}", query="why",
        passages=[Passage(grade=len(texts) - 1 - n, text=text) for n, text in enumerate(texts)],
    )  # fmt: skip


def lists(*several: Sequence[str]) -> list[ListRow]:
    return [a_list(number, *texts) for number, texts in enumerate(several)]


@contextmanager
def an_index(config: NearDuplicatesFilter) -> Iterator[NearDuplicateIndex]:
    with (
        TemporaryDirectory(dir=MEMORY) as folder,
        NearDuplicateIndex(Path(folder) / "index.sqlite", config) as index,
    ):
        yield index


def decide(rows: Sequence[ListRow], config: NearDuplicatesFilter = DEFAULT) -> list[DecisionRow]:
    with an_index(config) as index:
        return index.decide("all", rows)


def words(seed: int, count: int = 60) -> list[str]:
    rng = random.Random(seed)
    return [f"w{rng.randrange(5000)}" for _ in range(count)]


def text(seed: int, **changed: str) -> str:
    """Sixty random words, the named ones (`w5="x"`: the fifth) changed."""
    chosen = words(seed)
    for place, word in changed.items():
        chosen[int(place[1:])] = word
    return " ".join(chosen)


# --- what is dropped ------------------------------------------------------------------------


def test_a_list_with_a_passage_of_an_earlier_one_is_dropped() -> None:
    decisions = decide(lists([text(1), text(2)], [text(3), text(4)], [text(5), text(2).upper() + " !"]))
    assert [d.status for d in decisions] == ["kept", "kept", "rejected"]
    last = decisions[2]
    assert (last.id, last.ordinal, last.reason, last.grade) == ("r2", 2, "duplicate", 0)
    assert last.detail == "1.000 like the passage of grade 0 of query q0"


def test_the_true_similarity_decides() -> None:
    # One word in the middle changed: 3 of 58 shingles, J = 55 / 61 = .902; four far apart: 46 / 70.
    one = text(1, w30="x")
    four = text(1, w10="x", w20="x", w30="x", w40="x")
    decisions = decide(lists([text(1)], [one], [four]))
    assert [d.reason for d in decisions] == [None, "near_duplicate", None]
    assert decisions[1].detail == "0.902 like the passage of grade 0 of query q0"
    # .902 is no match when .91 is asked for; when .6 is, the third is one too.
    assert [d.reason for d in decide(lists([text(1)], [one]), NearDuplicatesFilter(threshold=0.91))] == [
        None,
        None,
    ]
    low = NearDuplicatesFilter(threshold=0.6, bands=20, rows_per_band=3)
    assert decide(lists([text(1)], [four]), low)[1].reason == "near_duplicate"


def test_a_dropped_list_drops_no_other() -> None:
    # The second list goes because of its first passage; its second passage then counts for nothing.
    decisions = decide(lists([text(1)], [text(1), text(2)], [text(2)]))
    assert [d.status for d in decisions] == ["kept", "rejected", "kept"]


def test_passages_of_one_list_are_not_compared() -> None:
    assert decide(lists([text(1), text(1)]))[0].status == "kept"


def test_a_passage_shorter_than_a_shingle_is_compared_for_equality() -> None:
    decisions = decide(lists(["green tea"], ["green teas"], ["Green tea!"], ["tea"], ["🙂"], ["🙃"], ["🙂 "]))
    assert [d.reason for d in decisions] == [None, None, "duplicate", None, None, None, "duplicate"]


def test_texts_without_spaces_are_compared_by_characters() -> None:
    first = "绿茶最好用八十度左右的热水冲泡因为沸水会烫坏茶叶并使茶汤变得苦涩难以入口"
    decisions = decide(lists([first], [first.replace("沸", "滚")], [first[::-1]]))
    assert [d.reason for d in decisions] == [None, "near_duplicate", None]


def test_no_rows_and_rows_without_passages() -> None:
    assert decide([]) == []
    assert [d.status for d in decide(lists([], []))] == ["kept", "kept"]


# --- properties -----------------------------------------------------------------------------

few_words = st.lists(st.sampled_from("abcde"), min_size=0, max_size=7).map(" ".join)
some_lists = st.lists(st.lists(few_words, max_size=3), max_size=10).map(lambda several: lists(*several))


def reference(rows: Sequence[ListRow], config: NearDuplicatesFilter) -> list[tuple[str | None, int | None]]:
    """All pairs, by the definition."""
    kept: list[list[str]] = []
    decisions: list[tuple[str | None, int | None]] = []
    for row in rows:
        decision: tuple[str | None, int | None] = (None, None)
        for passage in row.passages:
            own = passage.text.split()
            for other in kept:
                if decision[0] is None and own == other:
                    decision = "duplicate", passage.grade
                a, b = set(pairwise(own)), set(pairwise(other))
                if decision[0] is None and a | b and len(a & b) / len(a | b) >= config.threshold:
                    decision = "near_duplicate", passage.grade
        if decision[0] is None:
            kept += [passage.text.split() for passage in row.passages]
        decisions.append(decision)
    return decisions


@settings(max_examples=150, deadline=None)
@given(some_lists)
def test_decisions_equal_those_of_all_pairs(rows: list[ListRow]) -> None:
    assert [(d.reason, d.grade) for d in decide(rows, SURE)] == reference(rows, SURE)


@settings(max_examples=60, deadline=None)
@given(some_lists, st.lists(st.integers(0, 10), max_size=4), st.integers(0, 10))
def test_decisions_depend_on_nothing_but_the_rows_before(
    rows: list[ListRow], cuts: list[int], length: int
) -> None:
    whole = decide(rows, SURE)
    assert decide(rows[:length], SURE) == whole[:length]  # not on what follows
    edges = sorted({0, len(rows), *(min(cut, len(rows)) for cut in cuts)})
    with an_index(SURE) as index:  # nor on where shards begin
        sharded = [d for a, b in pairwise(edges) for d in index.decide(f"{a}", rows[a:b])]
    assert sharded == whole


@settings(max_examples=25, deadline=None)
@given(st.lists(some_lists, min_size=1, max_size=4), st.data())
def test_resumed_anywhere_decisions_are_those_of_an_undisturbed_run(
    shards: list[list[ListRow]], data: st.DataObject
) -> None:
    with an_index(SURE) as index:
        expected = [index.decide(str(n), rows) for n, rows in enumerate(shards)]

    def kept_rows(name: str) -> list[ListRow]:
        rows, decisions = shards[int(name)], expected[int(name)]
        return [row for row, d in zip(rows, decisions, strict=True) if d.status == "kept"]

    with TemporaryDirectory(dir=MEMORY) as folder:
        path = Path(folder) / "index.sqlite"
        done = 0
        for _ in range(4):
            # The index of an earlier process, which got anywhere; the files say `written`.
            with NearDuplicateIndex(path, SURE) as index:
                index.sync([str(n) for n in range(done)], kept_rows)
                got = data.draw(st.integers(done, len(shards)))
                for n in range(done, got):
                    assert index.decide(str(n), shards[n]) == expected[n]
            done = data.draw(st.integers(0, got))
            if data.draw(st.booleans()):
                path.unlink()
        with NearDuplicateIndex(path, SURE) as index:
            index.sync([str(n) for n in range(done)], kept_rows)
            for n in range(done, len(shards)):
                assert index.decide(str(n), shards[n]) == expected[n]
            held = contents(path.with_name("copy.sqlite"), index)
    with an_index(SURE) as undisturbed:
        for n, rows in enumerate(shards):
            undisturbed.decide(str(n), rows)
        with TemporaryDirectory(dir=MEMORY) as folder:
            assert contents(Path(folder) / "copy.sqlite", undisturbed) == held


def contents(copy: Path, index: NearDuplicateIndex) -> list[list[object]]:
    """Passages and keys as they stand, read from a copy (the index is locked)."""
    with sqlite3.connect(copy) as db:
        index._db.backup(db)
        tables = (
            "SELECT query_id, grade, text FROM passages ORDER BY number",
            "SELECT key FROM keys ORDER BY 1",
        )
        return [db.execute(table).fetchall() for table in tables]


# --- the index on disk ----------------------------------------------------------------------


def nothing_kept(name: str) -> list[ListRow]:
    raise AssertionError(f"{name} need not be read again")


def test_an_extra_shard_is_taken_out(tmp_path: Path) -> None:
    first, second = lists([text(1)], [text(2)]), lists([text(2)], [text(3)])
    with NearDuplicateIndex(tmp_path / "i", DEFAULT) as index:
        index.decide("a", first)
        before = index.decide("b", second)
        # Killed before b's decisions were written: b is decided again, and as before.
        index.sync(["a"], nothing_kept)
        assert index.decide("b", second) == before
        index.sync(["a", "b"], nothing_kept)
        # Under other names nothing is known.
        index.sync([], nothing_kept)
        assert [d.status for d in index.decide("c", second)] == ["kept", "kept"]


def test_shards_that_are_missing_are_read_again(tmp_path: Path) -> None:
    read: list[str] = []

    def kept_rows(name: str) -> list[ListRow]:
        read.append(name)
        return lists([text(int(name))])

    with NearDuplicateIndex(tmp_path / "i", DEFAULT) as index:
        index.sync(["1", "2", "3"], kept_rows)
        index.sync(["1", "4", "5"], kept_rows)
        assert read == ["1", "2", "3", "4", "5"]
        decisions = index.decide("6", lists(*([text(n)] for n in range(1, 6))))
        assert [d.status for d in decisions] == ["rejected", "kept", "kept", "rejected", "rejected"]


def test_shards_without_passages_stay(tmp_path: Path) -> None:
    with NearDuplicateIndex(tmp_path / "i", DEFAULT) as index:
        index.decide("a", [])
        index.decide("b", lists([text(1)]))
        index.sync(["a"], nothing_kept)
        index.sync(["a"], nothing_kept)
        assert index.decide("b", lists([text(1)]))[0].status == "kept"
        index.sync(["a", "b"], nothing_kept)


def test_a_shard_is_decided_once(tmp_path: Path) -> None:
    with NearDuplicateIndex(tmp_path / "i", DEFAULT) as index:
        index.decide("a", lists([text(1)]))
        with pytest.raises(AssertionError, match="decided already"):
            index.decide("a", lists([text(2)]))
        # Nothing of the refused shard is left behind.
        assert index.decide("b", lists([text(2)]))[0].status == "kept"


def test_an_index_of_other_settings_is_made_anew(tmp_path: Path) -> None:
    with NearDuplicateIndex(tmp_path / "i", DEFAULT) as index:
        index.decide("a", lists([text(1)]))
    with NearDuplicateIndex(tmp_path / "i", DEFAULT) as index:
        assert index.decide("b", lists([text(1)]))[0].status == "rejected"
    with NearDuplicateIndex(tmp_path / "i", NearDuplicatesFilter(seed=-1)) as index:
        assert index.decide("b", lists([text(1)]))[0].status == "kept"


def test_signatures_are_the_same_in_every_process() -> None:
    code = (
        "from gradeloom.schemas.config import NearDuplicatesFilter;"
        "from gradeloom.tasks.filter.near_duplicates import _band_keys;"
        "print(_band_keys(['to be or not to be that is the question'], NearDuplicatesFilter()))"
    )
    seen = set()
    for seed in ("1", "2"):
        environment = {**os.environ, "PYTHONHASHSEED": seed, "RAYON_NUM_THREADS": seed}
        run = subprocess.run(
            [sys.executable, "-c", code], env=environment, check=True, capture_output=True, text=True
        )
        seen.add(run.stdout)
    assert len(seen) == 1
    assert len(json.loads(seen.pop())[0]) == DEFAULT.bands


def test_recall_is_that_of_minhash() -> None:
    # Two words changed, J = 52 / 64: 1 - (1 - .8125^6)^10 = .966 of 300 pairs, within four sigma.
    pairs = [lists([text(n)], [text(n, w20="x", w40="x")]) for n in range(300)]
    found = 0
    with an_index(DEFAULT) as index:
        for n, (first, second) in enumerate(pairs):
            found += index.decide(str(n), [first, second])[1].status == "rejected"
    assert 0.924 < found / 300 <= 1


# --- what can go wrong ----------------------------------------------------------------------


def test_a_place_under_a_file_is_an_input_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match=r"file/i\.sqlite: cannot make the index"):
        NearDuplicateIndex(tmp_path / "file" / "i.sqlite", DEFAULT)


def test_a_folder_in_its_place_is_an_input_error(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="cannot use the index: unable to open"):
        NearDuplicateIndex(tmp_path, DEFAULT)


def test_a_file_that_is_no_index_is_an_input_error(tmp_path: Path) -> None:
    path = tmp_path / "i.sqlite"
    path.write_bytes(b"no database at all" * 500)
    with pytest.raises(InputError, match="damaged index; delete it"):
        NearDuplicateIndex(path, DEFAULT)


def test_a_damaged_index_is_an_input_error(tmp_path: Path) -> None:
    path = tmp_path / "i.sqlite"
    rows = lists(*([text(n)] for n in range(200)))
    with NearDuplicateIndex(path, DEFAULT) as index:
        index.decide("a", rows)
    data = path.read_bytes()
    path.write_bytes(data[:4096] + b"\xff" * (len(data) - 4096))
    with pytest.raises(InputError, match="damaged index"), NearDuplicateIndex(path, DEFAULT) as index:
        index.decide("b", rows)


FILL = """
import sys
from pathlib import Path
from gradeloom.schemas.config import NearDuplicatesFilter
from gradeloom.schemas.errors import InputError
from gradeloom.schemas.rows import ListRow, Passage
from gradeloom.tasks.filter.near_duplicates import NearDuplicateIndex

def rows(shard):
    return [ListRow(id=f"{shard} {n}", ordinal=n, query_id="q", query="why", passages=[
        Passage(grade=0, text=" ".join(f"{shard}x{n}x{word}" for word in range(60)))]) for n in range(200)]

with NearDuplicateIndex(Path(sys.argv[1]) / "index.sqlite", NearDuplicatesFilter()) as index:
    for shard in range(100):
        try:
            index.decide(str(shard), rows(shard))
        except InputError as error:
            print(error)
            break
    assert 2 < shard < 99, shard
    # What was committed before is whole: the finished shards need not be read again ...
    index.sync([str(n) for n in range(shard)], lambda name: 1 / 0)
    # ... and on a disk with room the work goes on.
    (Path(sys.argv[1]) / "ballast").unlink()
    assert {d.status for d in index.decide(str(shard), rows(shard))} == {"kept"}
    assert {d.status for d in index.decide("again", rows(0) + rows(shard))} == {"rejected"}
"""


def test_a_full_disk_is_an_input_error_and_nothing_is_lost(tmp_path: Path) -> None:
    script = (
        'mount -t tmpfs -o size=6m tmpfs $0 && head -c 3000000 /dev/zero > $0/ballast && exec "$1" -c "$2" $0'
    )
    run = subprocess.run(
        ["unshare", "-m", "sh", "-c", script, str(tmp_path), sys.executable, FILL],
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stderr
    assert "index.sqlite: cannot use the index: database or disk is full" in run.stdout


@pytest.mark.realdata
def test_recorded_lists_hold_no_near_duplicates(realdata: Path) -> None:
    rows = []
    with (realdata / "recorded" / "graded_lists.jsonl").open() as recorded:
        for n, line in enumerate(recorded):
            rows.append(a_list(n, *json.loads(line)["passages"].values()))
    again = [row.model_copy(update={"id": f"again {row.id}"}) for row in rows]
    with an_index(DEFAULT) as index:
        assert {d.reason for d in index.decide("first", rows)} == {None}
        assert {d.reason for d in index.decide("second", again)} == {"duplicate"}
