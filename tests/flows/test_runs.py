"""Run directories: counted, refused while at work, removed whole or only what is stale."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from gradeloom.flows.runs import list_runs, prune, to_prune
from gradeloom.schemas.errors import InputError
from gradeloom.schemas.rows import QueryRow
from gradeloom.tasks.run import RunDirectory


def make_run(root: Path, name: str, fingerprint: str = "aaa") -> RunDirectory:
    """Two source shards of 2 and 1 rows of the given fingerprint, one of 2 rows of an older one."""
    run = RunDirectory(root / name)
    with run.locked():
        run.describe({"name": name, "stages": {"source": fingerprint, "near_duplicates": "nnn"}})
        for print_, ordinal, ids in ((fingerprint, 0, "ab"), (fingerprint, 1, "c"), ("old", 0, "de")):
            stage = run.stage("source", print_, QueryRow)
            rows = [QueryRow(id=i, ordinal=n, query_id=i, query="q") for n, i in enumerate(ids)]
            stage.write(stage.path(ordinal, list(ids)), list(ids), rows)
        run.index("nnn").write_bytes(b"1234")
        run.index("ooo").write_bytes(b"12345678")
    return run


def size(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())


def test_a_run_is_counted(tmp_path: Path) -> None:
    make_run(tmp_path, "one")
    (tmp_path / "not-a-run").mkdir()
    (found,) = list_runs(tmp_path)
    assert (found.name, found.state, found.pid) == ("one", "idle", None)
    assert (found.shards, found.rows) == (3, 3)
    assert found.bytes == size(tmp_path / "one")
    assert found.stale_bytes == size(tmp_path / "one/shards/source-old") + 8
    assert list_runs(tmp_path / "nowhere") == []


def test_a_run_at_work_is_named_and_refused(tmp_path: Path) -> None:
    run = make_run(tmp_path, "one")
    with run.locked():
        (found,) = list_runs(tmp_path)
        assert (found.state, found.pid) == ("running", os.getpid())
        with pytest.raises(InputError, match=r"run 'one' is at work \(pid"):
            to_prune(tmp_path, ["one"], older_than=None)
        assert to_prune(tmp_path, [], older_than=0) == []
        with pytest.raises(InputError, match="works on this run"):
            prune(found)
    assert run.path.is_dir()


def test_pruning_removes_the_whole_run(tmp_path: Path) -> None:
    make_run(tmp_path, "one")
    make_run(tmp_path, "two")
    (chosen,) = to_prune(tmp_path, ["one"], older_than=None)
    assert prune(chosen) == chosen.bytes
    assert [run.name for run in list_runs(tmp_path)] == ["two"]


def test_pruning_the_stale_keeps_what_the_run_names(tmp_path: Path) -> None:
    make_run(tmp_path, "one")
    (chosen,) = to_prune(tmp_path, ["one"], older_than=None, stale=True)
    assert prune(chosen, stale=True) == chosen.stale_bytes > 8
    (found,) = list_runs(tmp_path)
    assert (found.shards, found.rows, found.stale_bytes) == (2, 3, 0)
    assert sorted(p.name for p in (tmp_path / "one").glob("index-*")) == ["index-nnn.sqlite"]
    assert to_prune(tmp_path, ["one"], older_than=None, stale=True) == []


def test_only_old_runs_when_asked(tmp_path: Path) -> None:
    make_run(tmp_path, "one")
    make_run(tmp_path, "two")
    ten_days_ago = time.time() - 10 * 86400
    for path in [tmp_path / "one", *(tmp_path / "one").rglob("*")]:
        os.utime(path, (ten_days_ago, ten_days_ago))
    assert [run.name for run in to_prune(tmp_path, [], older_than=9)] == ["one"]
    assert to_prune(tmp_path, ["two"], older_than=9) == []


@pytest.mark.parametrize("name", ["nope", "../one", "."])
def test_an_unknown_name_is_refused(tmp_path: Path, name: str) -> None:
    make_run(tmp_path, "one")
    with pytest.raises(InputError, match="there are: one"):
        to_prune(tmp_path, [name], older_than=None)


def test_pruning_everything_by_accident_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="name the runs"):
        to_prune(tmp_path, [], older_than=None)
