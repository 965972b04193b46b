from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from made_stories import GRADES, cut, dropped, facts, kept, some

from gradeloom.schemas.config import ReleaseConfig
from gradeloom.schemas.errors import InputError
from gradeloom.schemas.rows import digest
from gradeloom.tasks.release import tables
from gradeloom.tasks.release.catalog import list_releases
from gradeloom.tasks.release.verify import verify
from gradeloom.tasks.release.write import cut_release, existing

HERE = Path(__file__).parent


def rows(folder: Path, table: str) -> list[dict[str, object]]:
    return pq.read_table(folder / table).to_pylist()


def everything_under(root: Path) -> list[str]:
    return sorted(str(path.relative_to(root)) for path in root.rglob("*"))


def python(code: str, *args: str, **env: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", f"import sys; sys.path.insert(0, {str(HERE)!r})\n{code}", *args],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=os.environ | env,
    )  # fmt: skip


# --- what stands in a release ---------------------------------------------------------------


def test_kept_rows_stand_in_four_tables_and_dropped_ones_in_rejects(standing: Path) -> None:
    folder = standing / "made" / "0.1.0"
    ids = [digest("row2", str(g), f"passage of level {g} about thing 2") for g in GRADES]

    assert [row["_id"] for row in rows(folder, "queries")] == ["q0", "q2", "q4"]
    assert rows(folder, "corpus")[4] == {
        "_id": ids[0],
        "title": "",
        "text": "passage of level 3 about thing 2",
    }
    assert rows(folder, "qrels")[4:8] == [
        {"query-id": "q2", "corpus-id": i, "score": g} for i, g in zip(ids, GRADES, strict=True)
    ]
    assert rows(folder, "lists")[1] == {
        "query_id": "q2",
        "query": "what is thing 2?",
        "passages": [f"passage of level {g} about thing 2" for g in GRADES],
        "passage_ids": ids,
        "intended": [3, 2, 1, 0],
        "judged": [2, 2, 1, 0],
        "expected": [2.25, 2.25, 1.25, 0.25],
        "entropy": [0.5] * 4,
        "mass": [0.75] * 4,
        "abstained": [False] * 4,
        "grade": [3.0, 2.0, 1.0, 0.0],
        "length": "short",
        "audience": "a student",
        "style": "a forum reply",
    }
    failed, rejected = rows(folder, "rejects")
    assert failed | {"detail": None} == {
        "query_id": "q1", "query": "what is thing 1?", "passages": [], "passage_ids": [], "intended": [],
        "judged": [], "expected": [], "entropy": [], "mass": [], "abstained": [], "length": None,
        "audience": None, "style": None, "stage": "generate", "status": "failed", "reason": "unparsable",
        "detail": None, "at_grade": None,
    }  # fmt: skip
    assert (rejected["query_id"], rejected["stage"], rejected["status"]) == ("q3", "filter", "rejected")
    assert (rejected["reason"], rejected["detail"], rejected["at_grade"]) == ("too_short", "why", 2)
    assert rejected["passages"] == [f"passage of level {g} about thing 3" for g in GRADES]
    assert rejected["judged"] == [None] * 4
    assert rejected["abstained"] == [False] * 4


def test_it_loads_through_datasets(standing: Path, tmp_path: Path) -> None:
    from datasets import List, Value, load_dataset

    folder = str(standing / "made" / "0.1.0")
    lists = load_dataset(folder, "lists", split="train", cache_dir=str(tmp_path))
    assert lists["query_id"] == ["q0", "q2", "q4"]
    assert lists.features["grade"] == List(Value("float64"))
    assert lists.features["judged"] == List(Value("int64"))
    # The default configuration is `lists`.
    assert (
        load_dataset(str(standing / "made" / "0.1.0"), split="train", cache_dir=str(tmp_path)).num_rows == 3
    )


def test_expected_grades_are_fractions_in_lists_and_rounded_half_up_in_qrels(tmp_path: Path) -> None:
    folder = cut(tmp_path, [kept(0, labels=(2.5, 1.75, 1.4999, 0.5))], policy="expected").path
    assert rows(folder, "lists")[0]["grade"] == [2.5, 1.75, 1.4999, 0.5]
    assert [row["score"] for row in rows(folder, "qrels")] == [3, 2, 1, 1]
    verify(folder)


NASTY = [
    "<script>alert(1)</script> | a cell\nand a line\r\nand another",
    "tab\there, \"quotes\" and 'more', a NUL \x00 and a line separator \u2028 end",
    "```\n---\nlicense: mit\n---\n# heading {{ jinja }} {% raw %}",
    "日本語 🙂 e\u0301 \u202e right to left",
]


def test_any_text_survives_as_data(tmp_path: Path) -> None:
    from datasets import load_dataset

    story = kept(0, query='<b>|"q"\n?', texts=NASTY, query_id='id "with" quotes')
    folder = cut(tmp_path, [story, dropped(1, "filter", "too_short")]).path
    lists = load_dataset(str(folder), "lists", split="train", cache_dir=str(tmp_path / "cache"))
    assert lists[0]["passages"] == NASTY
    assert (lists[0]["query"], lists[0]["query_id"]) == ('<b>|"q"\n?', 'id "with" quotes')
    verify(folder)


def test_without_a_judge_nothing_is_judged_and_nobody_abstained(tmp_path: Path) -> None:
    folder = cut(tmp_path, [kept(0, judged=False)], judge_independent=None).path
    row = rows(folder, "lists")[0]
    assert (row["judged"], row["mass"], row["abstained"]) == ([None] * 4, [None] * 4, [False] * 4)
    assert "No judge read the passages" in (folder / "README.md").read_text()


def test_a_release_without_rejects_still_has_the_table(tmp_path: Path) -> None:
    folder = cut(tmp_path, [kept(0)]).path
    table = pq.read_table(folder / "rejects" / "train-00000.parquet")
    assert (table.num_rows, table.schema) == (0, tables.TABLES["rejects"])
    assert "`streaming=True`" in (folder / "README.md").read_text()


def test_files_and_row_groups_are_cut_at_fixed_row_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tables, "ROW_GROUP_ROWS", 3)
    monkeypatch.setattr(tables, "FILE_ROWS", 6)
    folder = cut(tmp_path, [kept(n) for n in range(7)]).path
    sizes = {
        str(path.relative_to(folder)): [
            pq.ParquetFile(path).metadata.row_group(i).num_rows
            for i in range(pq.ParquetFile(path).metadata.num_row_groups)
        ]
        for table in ("lists", "corpus")
        for path in tables.table_files(folder, table)
    }
    assert sizes == {
        "lists/train-00000.parquet": [3, 3],
        "lists/train-00001.parquet": [1],
        "corpus/train-00000.parquet": [3, 3],
        "corpus/train-00001.parquet": [3, 3],
        "corpus/train-00002.parquet": [3, 3],
        "corpus/train-00003.parquet": [3, 3],
        "corpus/train-00004.parquet": [3, 1],
    }
    assert [row["query_id"] for _, row in tables.read_rows(folder, "lists")] == [f"q{n}" for n in range(7)]
    verify(folder)


# --- the same rows, the same release --------------------------------------------------------


def test_the_same_rows_give_the_same_bytes_wherever_they_are_cut(standing: Path, tmp_path: Path) -> None:
    first, second = standing / "made" / "0.1.0", cut(tmp_path / "elsewhere").path
    names = [path for path in everything_under(first) if (first / path).is_file()]
    assert names == [path for path in everything_under(second) if (second / path).is_file()]
    for name in set(names) - {"manifest.json"}:
        assert (first / name).read_bytes() == (second / name).read_bytes(), name
        assert b"elsewhere" not in (second / name).read_bytes()
    a, b = (json.loads((folder / "manifest.json").read_bytes()) for folder in (first, second))
    assert (a["content"], a["digest"]) == (b["content"], b["digest"])
    assert a["observed"]["run"] != b["observed"]["run"]


def test_cut_again_it_is_already_released(tmp_path: Path) -> None:
    first = cut(tmp_path)
    before = (first.path / "manifest.json").read_bytes()
    again = cut(tmp_path)
    assert (first.already, again.already) == (False, True)
    assert (again.path, again.manifest) == (first.path, first.manifest)
    assert (first.path / "manifest.json").read_bytes() == before
    assert existing(ReleaseConfig(name="made", version="0.1.0", root=str(tmp_path))) == first.manifest
    assert existing(ReleaseConfig(name="made", version="0.2.0", root=str(tmp_path))) is None


def test_other_rows_under_the_same_version_are_refused(tmp_path: Path) -> None:
    folder = cut(tmp_path).path
    (tmp_path / "made" / "0.2.0").mkdir()
    before = {path: (folder / path).read_bytes() for path in ("manifest.json", "README.md")}
    with pytest.raises(InputError, match=r"made/0\.1\.0: .*other content.*next free version is 0\.3\.0"):
        cut(tmp_path, [kept(0)])
    assert {path: (folder / path).read_bytes() for path in before} == before
    assert [name for name in everything_under(tmp_path / "made") if "/" not in name] == [
        ".lock", "0.1.0", "0.2.0",
    ]  # fmt: skip


# --- what is refused ------------------------------------------------------------------------


def test_nothing_kept_is_no_release(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no list was kept"):
        cut(tmp_path, [dropped(0, "filter", "too_short")])
    assert everything_under(tmp_path) == ["made", "made/.lock"]


def test_two_equal_passages_in_one_list_are_refused(tmp_path: Path) -> None:
    story = kept(0)
    assert story.generated is not None
    twice = story.generated.model_copy(update={"passages": [story.generated.passages[0]] * 4})
    with pytest.raises(InputError, match="query 'q0': two passages of its list are the same"):
        cut(tmp_path, [type(story)(story.query, twice, None, story.label, "label", story.decision)])


def test_a_query_id_that_stands_twice_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"queries/.*\.parquet, row 2, field '_id': 'q0' stands here"):
        cut(tmp_path, [kept(0), kept(1, query_id="q0")])
    assert everything_under(tmp_path) == ["made", "made/.lock"]


def test_a_failure_of_the_caller_leaves_nothing(tmp_path: Path) -> None:
    def broken_quality(folder: Path) -> dict[str, object]:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        cut_release(
            ReleaseConfig(name="made", root=str(tmp_path)), some(), facts(some()),
            quality=broken_quality, observed=dict,
        )  # fmt: skip
    assert everything_under(tmp_path) == ["made", "made/.lock"]


def test_an_unwritable_place_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a folder")
    with pytest.raises(InputError, match=r"file/made/0\.1\.0: cannot write the release: Not a directory"):
        cut(tmp_path / "file")


# --- deaths, rivals, full disks -------------------------------------------------------------

CUT = "import made_stories; print(made_stories.cut(__import__('pathlib').Path(sys.argv[1])).already)"


def test_killed_before_the_manifest_nothing_is_visible_and_the_next_start_succeeds(tmp_path: Path) -> None:
    killed = python(CUT, str(tmp_path), GRADELOOM_CRASH="before-manifest:1")
    killed.communicate()
    assert killed.returncode == -signal.SIGKILL
    leftovers = [path.name for path in (tmp_path / "made").iterdir() if path.name != ".lock"]
    assert leftovers == [f".staging-0.1.0-{killed.pid}"]
    assert list_releases(tmp_path) == []
    assert existing(ReleaseConfig(name="made", root=str(tmp_path))) is None

    assert not cut(tmp_path).already
    assert [path.name for path in sorted((tmp_path / "made").iterdir())] == [".lock", "0.1.0"]


def test_of_several_who_cut_one_version_at_once_one_wins(tmp_path: Path) -> None:
    code = """
import time, pathlib, made_stories, datasets
from gradeloom.schemas.errors import InputError
root = pathlib.Path(sys.argv[1])
stories = made_stories.some()[:int(sys.argv[2])]
print("ready", flush=True)
while not (root / "go").exists():
    time.sleep(0.005)
try:
    print("already" if made_stories.cut(root, stories).already else "cut")
except InputError as error:
    print(error)
"""
    rivals = [python(code, str(tmp_path), n) for n in ("6", "6", "5")]
    for rival in rivals:
        assert rival.stdout is not None
        assert rival.stdout.readline() == "ready\n"
    (tmp_path / "go").touch()
    said = [rival.communicate()[0].strip() for rival in rivals]

    first = said.index("cut")
    for n, words in enumerate(said):
        if n != first and (n < 2) == (first < 2):
            assert words == "already"
        elif n != first:
            assert "other content" in words
            assert "0.2.0" in words
    assert [path.name for path in sorted((tmp_path / "made").iterdir())] == [".lock", "0.1.0"]
    verify(tmp_path / "made" / "0.1.0")


def test_on_a_full_disk_there_is_an_error_and_no_half_release(tmp_path: Path) -> None:
    """A small tmpfs of its own, filled so far that the disk is full at one moment after another."""
    code = """
import pathlib, made_stories, random
from gradeloom.schemas.errors import InputError
root = pathlib.Path(sys.argv[1])
draw = random.Random(0)
text = lambda: "".join(chr(draw.randrange(0x4E00, 0x9FFF)) for _ in range(300))
stories = [made_stories.kept(n, texts=[text() for _ in range(4)]) for n in range(8)]
ballast = root / "ballast"
for kilobytes in (1020, 1000, 984, 960, 940, 920, 900, 880, 840, 800, 700):
    ballast.write_bytes(bytes(1024 * kilobytes))
    try:
        folder = made_stories.cut(root, stories).path
        print("cut")
        break
    except InputError as error:
        print(error)
        left = [p.name for p in root.rglob("*")]
        assert set(left) <= {"ballast", "made", ".lock"}, left
"""
    disk = tmp_path / "disk"
    disk.mkdir()
    command = f'mount -t tmpfs -o size=1m tmpfs {disk} && exec {sys.executable} -c "$CODE" {disk}'
    result = subprocess.run(
        ["unshare", "--mount", "sh", "-c", command], capture_output=True, text=True,
        env=os.environ | {"CODE": f"import sys; sys.path.insert(0, {str(HERE)!r})\n{code}"},
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    *errors, last = result.stdout.splitlines()
    assert last == "cut"
    assert len(errors) >= 3
    for error in errors:
        assert error.startswith(f"{disk}/made/0.1.0: cannot "), error
        assert "No space left on device" in error or "Not enough disk space" in error, error
