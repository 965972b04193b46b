"""A disk that is full, really, or cannot be written: one clear line, nothing lost, and then on it goes.

The full disk is a small tmpfs in a mount namespace of its own, for root (as in CI) is not stopped by
permissions, and a place that cannot be written is a path under a regular file.
"""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from runs_for_tests import Ended, Place, fault_place

from gradeloom.schemas.rows import ListRow, QueryRow
from gradeloom.tasks.run import Stage

QUERIES = 40
ROOTS = ["run", "release", "cache"]
FULL = (
    "No space left on device",
    "database or disk is full",
    "0 bytes are free on its disk",
    "Not enough disk space",  # as `datasets` says it
)
FOLDERS = {"run": "runs", "release": "releases", "cache": "cache"}


def made(root: Path) -> Place:
    return fault_place(root, QUERIES, engine={"bad_json": 0.1, "window": 8}, run={"shard_rows": 5, "wave": 2})


@pytest.fixture(scope="session")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Place:
    place = made(tmp_path_factory.mktemp("disk") / "undisturbed")
    assert place.run_on().code == 0
    return place


class SmallDisk:
    """A folder that is a file system of its own, of so many kilobytes; seen by one namespace only."""

    def __init__(self, folder: Path, keeper: subprocess.Popen[str]) -> None:
        self.folder, self.keeper = folder, keeper

    @property
    def seen(self) -> Path:
        """The folder as its own namespace has it."""
        return Path(f"/proc/{self.keeper.pid}/root{self.folder}")

    def grow(self, kilobytes: int) -> None:
        self._mount(f"remount,size={kilobytes}k")

    def _mount(self, options: str) -> None:
        command = ["nsenter", "-t", str(self.keeper.pid), "-m", "mount", "-o", options, str(self.folder)]
        subprocess.run(command, check=True)


@contextmanager
def small_disk(folder: Path, kilobytes: int) -> Iterator[SmallDisk]:
    folder.mkdir(parents=True)
    mount = f"mount -t tmpfs -o size={kilobytes}k none '{folder}' && echo mounted && exec sleep 1000"
    keeper = subprocess.Popen(["unshare", "-m", "sh", "-c", mount], stdout=subprocess.PIPE, text=True)
    try:
        assert keeper.stdout is not None
        assert keeper.stdout.readline() == "mounted\n"
        yield SmallDisk(folder, keeper)
    finally:
        keeper.kill()
        keeper.wait()


def one_line(ended: Ended) -> str:
    """The error of a run that ended with exit 2: one line, the last one, and nothing of a traceback."""
    assert ended.code == 2, ended.error
    assert "Traceback" not in ended.error
    errors = [line for line in ended.error.splitlines() if line.startswith("gradeloom")]
    assert errors == [ended.last_line]
    assert ended.last_line.startswith("gradeloom: error: ")
    return ended.last_line


def fills_up(which: str, kilobytes: int, root: Path, digest: str) -> bool:
    """Run on a disk of so many kilobytes, then on a larger one; False when nothing filled up."""
    place = made(root)
    with small_disk(place.root / FOLDERS[which], kilobytes) as disk:
        place = replace(place, namespace=disk.keeper.pid)
        ended = place.run_on()
        if ended.code == 0:
            return False
        said = one_line(ended)
        assert str(place.root / FOLDERS[which]) in said
        assert any(words in said for words in FULL), said
        if which == "release":
            assert not list(disk.seen.rglob("*.json"))
            assert not list(disk.seen.rglob(".staging*"))
        seen = disk.seen if which == "run" else place.root / "runs"
        shards = {shard: shard.stat().st_mtime_ns for shard in seen.rglob("*.parquet")}
        assert all(intact(shard) for shard in shards)
        again = place.run_on()
        if again.code == 0:
            # A log of SQLite's is folded in when a run ends: a disk too small by a little may now do.
            assert again.digest == digest
        else:  # still full: said again, and nothing is worse
            assert str(place.root / FOLDERS[which]) in one_line(again)
        disk.grow(20_000)
        ended = place.run_on()
        assert ended.code == 0, ended.error
        assert ended.digest == digest
        assert all(shard.stat().st_mtime_ns == written for shard, written in shards.items())
    return True


def intact(shard: Path) -> bool:
    stage, _, fingerprint = shard.parent.name.rpartition("-")
    row_type = {"source": QueryRow, "generate": ListRow}.get(stage)
    if row_type is None:
        return shard.stat().st_size > 0
    return bool(Stage(shard.parent, stage, fingerprint, row_type).read(shard))


@pytest.mark.parametrize(
    ("which", "kilobytes"), [("run", 24), ("run", 400), ("release", 80), ("cache", 24), ("cache", 120)]
)
def test_full_disk(which: str, kilobytes: int, tmp_path: Path, undisturbed: Place) -> None:
    assert fills_up(which, kilobytes, tmp_path / "full", undisturbed.digest())


@pytest.mark.long
@pytest.mark.parametrize("which", ROOTS)
def test_disk_that_is_full_at_any_moment(which: str, tmp_path: Path, undisturbed: Place) -> None:
    kilobytes = 0
    while True:
        kilobytes += 8 if kilobytes < 120 else 40
        root = tmp_path / str(kilobytes)
        if not fills_up(which, kilobytes, root, undisturbed.digest()):
            break
        shutil.rmtree(root)
    assert kilobytes > 100


@pytest.mark.parametrize("which", ROOTS)
def test_unwritable_place(which: str, tmp_path: Path, undisturbed: Place) -> None:
    place = made(tmp_path / "unwritable")
    (place.root / "file").write_text("no folder")
    root = place.root / "file" / "below"
    said = one_line(place.run_on(f"{which}.root={root}"))
    assert str(place.root / "file") in said
    assert "Not a directory" in said
    assert not place.log.exists()  # found before anything is spent
    ended = place.run_on()
    assert ended.digest == undisturbed.digest()
