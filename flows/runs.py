"""The run directories under a root: what there is, and what may go."""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson
import pyarrow as pa
import pyarrow.parquet as pq

from gradeloom.schemas.config import NAME
from gradeloom.schemas.errors import InputError
from gradeloom.tasks.run import RunDirectory, is_locked

DESCRIPTION = "run.json"


@dataclass(frozen=True)
class RunSummary:
    """One line of `runs list`.

    Attributes:
        state: `running` (a live process holds it) or `idle`.
        pid: of that process.
        shards: files of all stages.
        rows: source rows that were cut into shards for the present configuration.
        bytes: of everything in the folder.
        stale_bytes: of shards and indexes of fingerprints that `run.json` no longer names.
        changed: seconds since the epoch of the last change.
    """

    path: Path
    name: str
    state: str
    pid: int | None
    shards: int
    rows: int
    bytes: int
    stale_bytes: int
    changed: float


def list_runs(root: Path | str) -> list[RunSummary]:
    """Every run directory under a root, by name."""
    root = Path(root)
    if not root.is_dir():
        return []
    return [_summary(path) for path in sorted(root.iterdir()) if (path / DESCRIPTION).is_file()]


def _summary(path: Path) -> RunSummary:
    stages = _stages(path)
    shards = [p for p in path.glob("shards/*/*.parquet") if not p.name.startswith(".")]
    source = f"source-{stages.get('source')}"
    files = list(_files(path))
    pid = is_locked(path)
    return RunSummary(
        path=path,
        name=path.name,
        state="idle" if pid is None else "running",
        pid=pid,
        shards=len(shards),
        rows=sum(_rows(shard) for shard in shards if shard.parent.name == source),
        bytes=sum(size for _, size, _ in files),
        stale_bytes=sum(size for stale in _stale(path) for _, size, _ in _files(stale)),
        changed=max((changed for _, _, changed in files), default=path.stat().st_mtime),
    )


def _stages(path: Path) -> dict[str, str]:
    """Stage -> fingerprint as the run was last configured."""
    try:
        described = orjson.loads((path / DESCRIPTION).read_bytes())
    except (OSError, orjson.JSONDecodeError) as error:
        raise InputError(f"cannot be read: {error}", file=path / DESCRIPTION) from error
    stages: Any = described.get("stages") if isinstance(described, dict) else None
    return stages if isinstance(stages, dict) else {}


def _files(path: Path) -> Iterator[tuple[Path, int, float]]:
    """Path, size and time of last change of every file at or under a path; what vanishes is left out."""
    for file in [path] if path.is_file() else path.rglob("*"):
        try:
            stat = file.stat()
        except FileNotFoundError:
            continue
        if file.is_file():
            yield file, stat.st_size, stat.st_mtime


def _rows(shard: Path) -> int:
    try:
        return int(pq.read_metadata(shard).num_rows)
    except (pa.ArrowInvalid, OSError) as error:
        raise InputError(f"damaged shard ({error}); delete it", file=shard) from error


def _stale(path: Path) -> list[Path]:
    """Shard folders and indexes of fingerprints that the run's present configuration does not have."""
    stages = _stages(path)
    if not stages:
        return []
    current = {f"{stage}-{fingerprint}" for stage, fingerprint in stages.items()}
    folders = [p for p in path.glob("shards/*-*") if p.name not in current]
    indexes = [
        p for p in path.glob("index-*.sqlite*")
        if p.name.removeprefix("index-").partition(".sqlite")[0] not in stages.values()
    ]  # fmt: skip
    return sorted(folders) + sorted(indexes)


def to_prune(
    root: Path | str, names: Sequence[str], *, older_than: float | None, stale: bool = False
) -> list[RunSummary]:
    """The runs that a `runs prune` would touch.

    Args:
        root: folder of run directories.
        names: run names; none means all that are old enough.
        older_than: days without a change; None means any age.
        stale: only what is stale in them will go, so runs without that are left out.

    Raises:
        InputError: an unknown name, a running run, or neither names nor an age.
    """
    if not names and older_than is None and not stale:
        raise InputError("name the runs, or give --older-than DAYS or --stale")
    runs = {run.name: run for run in list_runs(root)}
    for name in names:
        if not NAME.fullmatch(name) or name not in runs:
            raise InputError(f"no run '{name}' under {root}; there are: {', '.join(runs) or 'none'}")
        if runs[name].state == "running":
            raise InputError(f"run '{name}' is at work (pid {runs[name].pid}); stop it first")
    chosen = [run for run in runs.values() if run.name in names or (not names and run.state == "idle")]
    if older_than is not None:
        chosen = [run for run in chosen if time.time() - run.changed > older_than * 86400]
    return [run for run in chosen if run.stale_bytes] if stale else chosen


def prune(run: RunSummary, *, stale: bool = False) -> int:
    """Remove a run directory, or only what is stale in it; how many bytes that was.

    The run is locked meanwhile, so that none can start in the middle.

    Raises:
        InputError: a process works on it, or it cannot be removed.
    """
    with RunDirectory(run.path).locked():
        going = _stale(run.path) if stale else [run.path]
        freed = sum(size for path in going for _, size, _ in _files(path))
        for path in going:
            try:
                shutil.rmtree(path) if path.is_dir() else path.unlink()
            except OSError as error:
                raise InputError(f"cannot remove: {error.strerror}", file=path) from error
    return freed
