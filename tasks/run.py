"""The run directory: shards, row accounting, resume.

    runs/<name>/
      lock                                     held while a process works here
      run.json                                 what was asked for, for people and `runs list`
      ledger.sqlite                            every model outcome, by (stage, row, part, attempt)
      index-<fingerprint>.sqlite               signatures of a cross-row stage
      shards/<stage>-<fingerprint>/NNNNNN-<digest of its input ids>.parquet

Files are the truth for progress, `run.json` for configuration. A shard is written once: temporary
file, fsync, rename. Killed at any instant and started again, what is there is whole and is reused.
"""

from __future__ import annotations

import fcntl
import os
import signal
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Generic, TypeVar

import orjson
import pyarrow as pa
import pyarrow.parquet as pq
from pydantic import ValidationError

from gradeloom.schemas.errors import InputError
from gradeloom.schemas.manifest import StageAccount
from gradeloom.schemas.rows import Row, Status, arrow_schema, digest

R = TypeVar("R", bound=Row)

CRASH_POINTS = ("after-response", "before-commit", "after-temporary-file", "after-rename", "before-manifest")
_crossed: Counter[str] = Counter()


def crash_point(name: str) -> None:
    """For tests: die here by SIGKILL when GRADELOOM_CRASH is `<name>:<n>` and this is the n-th passing."""
    wanted = os.environ.get("GRADELOOM_CRASH")
    if wanted is None:
        return
    assert name in CRASH_POINTS, name
    _crossed[name] += 1
    if wanted == f"{name}:{_crossed[name]}":
        os.kill(os.getpid(), signal.SIGKILL)


def write_whole(path: Path, write: Callable[[Path], None]) -> None:
    """Write a file whole or not at all: `write` fills a temporary file beside it, then fsync, rename.

    Raises:
        InputError: no space, no permission, or a parent that is no folder.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write(temporary)
        with temporary.open("rb") as f:
            os.fsync(f.fileno())
        crash_point("after-temporary-file")
        temporary.rename(path)
        sync_folder(path.parent)
    except OSError as error:
        raise InputError(f"cannot write: {error.strerror or error}", file=path) from error
    finally:
        with suppress(OSError):
            temporary.unlink()
    crash_point("after-rename")


def write_bytes_whole(path: Path, data: bytes) -> None:
    """`write_whole` of what is in memory already."""

    def write(temporary: Path) -> None:
        temporary.write_bytes(data)

    write_whole(path, write)


def sync_folder(folder: Path) -> None:
    """Make renames in a folder last through a power cut."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_rows(path: Path, rows: Sequence[Row], row_type: type[Row]) -> None:
    """Write rows as one Parquet file, whole or not at all."""
    schema = arrow_schema(row_type)
    table = pa.Table.from_pylist([row.model_dump() for row in rows], schema=schema)
    write_whole(
        path,
        # Without checksums one flipped bit in twenty is read back as another row.
        lambda temporary: pq.write_table(table, temporary, compression="zstd", write_page_checksum=True),
    )


@dataclass(frozen=True)
class Stage(Generic[R]):
    """One stage of one run: where its shards lie, and what a shard must satisfy.

    A shard is named by its ordinal and the digest of its input ids. For a cross-row stage the
    caller passes `after`, the name of the shard before, so that a name vouches for everything that
    a decision may have looked at.
    """

    folder: Path
    name: str
    fingerprint: str
    row_type: type[R]

    def path(self, ordinal: int, ids: Sequence[str], after: str = "") -> Path:
        return self.folder / f"{ordinal:06d}-{digest(after, *ids)}.parquet"

    def read(self, path: Path) -> list[R] | None:
        """The shard's rows, or None when it is not there yet.

        Raises:
            InputError: the file is there but cannot be read.
        """
        if not path.exists():
            return None
        try:
            table = pq.read_table(path, schema=arrow_schema(self.row_type), page_checksum_verification=True)
            return [self.row_type.model_validate(row) for row in table.to_pylist()]
        except (pa.ArrowException, OSError, UnicodeDecodeError, ValidationError) as error:
            problem = " ".join(str(error).split())[:200]
            raise InputError(
                f"damaged shard ({problem}); delete it and start the run again", file=path
            ) from error

    def write(self, path: Path, ids: Sequence[str], rows: Sequence[R]) -> None:
        """Write a shard; every input id must stand in it exactly once, in order."""
        assert [row.id for row in rows] == list(ids), f"stage {self.name}: rows do not match their input"
        assert all((row.status == "kept") == (row.reason is None) for row in rows), (
            f"stage {self.name}: a row that is not kept needs a reason, and only such a row"
        )
        write_rows(path, rows, self.row_type)


@dataclass
class Accounting:
    """Counts of what became of rows, stage by stage, in the order the stages first appear."""

    _counts: dict[str, Counter[tuple[str, str | None]]] = field(default_factory=dict)

    def add(self, stage: str, rows: Iterable[Row]) -> None:
        self._counts.setdefault(stage, Counter()).update((row.status, row.reason) for row in rows)

    def count(self, stage: str, status: Status, reason: str | None, rows: int) -> None:
        """Add rows that no stage has looked at."""
        self._counts.setdefault(stage, Counter())[status, reason] += rows

    def stages(self) -> list[StageAccount]:
        accounts = []
        for stage, counts in self._counts.items():
            status: Counter[str] = Counter()
            reasons: Counter[str] = Counter()
            for (what, reason), n in counts.items():
                status[what] += n
                if reason is not None:
                    reasons[reason] += n
            account = StageAccount(
                stage=stage, rows=sum(status.values()), **status, reasons=dict(sorted(reasons.items()))
            )
            account.assert_adds_up()
            accounts.append(account)
        return accounts


class RunDirectory:
    """A run's folder, locked for as long as the context is open."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @property
    def ledger(self) -> Path:
        return self.path / "ledger.sqlite"

    def index(self, fingerprint: str) -> Path:
        return self.path / f"index-{fingerprint}.sqlite"

    def stage(self, name: str, fingerprint: str, row_type: type[R]) -> Stage[R]:
        return Stage(self.path / "shards" / f"{name}-{fingerprint}", name, fingerprint, row_type)

    def describe(self, facts: dict[str, object]) -> None:
        """Write `run.json`."""
        data = orjson.dumps(facts, option=orjson.OPT_INDENT_2 | orjson.OPT_SORT_KEYS)
        write_bytes_whole(self.path / "run.json", data)

    @contextmanager
    def locked(self) -> Iterator[RunDirectory]:
        """Hold the run. The kernel gives the lock back when its holder dies, however it dies.

        Raises:
            InputError: another live process works here, or the folder cannot be made.
        """
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            handle = os.open(self.path / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise InputError(f"cannot make the run directory: {error.strerror}", file=self.path) from error
        try:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                holder = os.pread(handle, 32, 0).decode().strip() or "unknown"
                raise InputError(
                    f"another process (pid {holder}) works on this run; wait for it or stop it",
                    file=self.path,
                ) from None
            try:
                # Before the disk is asked for anything: what a killed process left may be what fills it.
                self._remove_leftovers()
                os.ftruncate(handle, 0)
                os.pwrite(handle, str(os.getpid()).encode(), 0)
            except OSError as error:
                raise InputError(f"cannot take the run: {error.strerror}", file=self.path) from error
            yield self
        finally:
            os.close(handle)

    def _remove_leftovers(self) -> None:
        """Temporary files of a process that was killed in the middle of a write."""
        for leftover in self.path.glob("**/.*.tmp"):
            leftover.unlink(missing_ok=True)


def is_locked(path: Path) -> int | None:
    """The pid that works on a run directory (0 when it has not said so yet), or None."""
    try:
        handle = os.open(path / "lock", os.O_RDONLY)
    except OSError:
        return None
    try:
        # Shared: two that only look do not take each other for the holder.
        fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
        return None
    except BlockingIOError:
        holder = os.pread(handle, 32, 0)
        return int(holder) if holder.isdigit() else 0
    finally:
        os.close(handle)
