"""What has been asked and answered, on disk: a run's ledger and the request cache that runs share.

Both are SQLite in WAL mode with one writer thread each. What is recorded within a few milliseconds is
committed together, at most 256 rows a commit, and whoever recorded it goes on once it is committed.
A commit survives any death of this process (`synchronous=NORMAL`: a power cut may take the last few,
which are then asked again).
"""

from __future__ import annotations

import asyncio
import shutil
import sqlite3
import threading
import time
from collections.abc import Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import orjson

from gradeloom.schemas.errors import InputError
from gradeloom.tasks.engine.types import Asked, Completion
from gradeloom.tasks.run import crash_point

BATCH_ROWS = 256
"""Rows of one commit at most."""

LINGER = 0.002
"""Seconds that a commit waits for more rows: far below 50 ms, for whoever waits holds a window slot."""

FORMAT = 1
BUSY_SECONDS = 60.0
"""How long to wait for another process that writes to the same cache."""

Pairs = tuple[tuple[str, float], ...]


class _Store:
    """A SQLite file with one table, read from any thread and written by one thread of its own."""

    schema: str
    insert: str

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise InputError(
                f"cannot make the folder: {error.strerror or error}", file=path.parent
            ) from error
        try:
            self._reader = self._open()
            self._writer = _Writer(path, self._open(), self.insert)
        except sqlite3.Error as error:
            raise _unusable(path, error) from error

    def _open(self) -> sqlite3.Connection:
        """A connection in autocommit mode; the table is made if it is not there."""
        db = sqlite3.connect(self.path, timeout=BUSY_SECONDS, isolation_level=None, check_same_thread=False)
        db.execute("PRAGMA journal_mode = WAL")
        db.execute("PRAGMA synchronous = NORMAL")
        (version,) = db.execute("PRAGMA user_version").fetchone()
        if version not in (0, FORMAT):
            db.close()
            raise InputError(
                f"was written in format {version} by another version of gradeloom; this one reads {FORMAT}",
                file=self.path,
            )
        db.execute(self.schema)
        db.execute(f"PRAGMA user_version = {FORMAT}")
        return db

    def _query(self, sql: str, values: Sequence[Any] = ()) -> list[Any]:
        try:
            return self._reader.execute(sql, values).fetchall()
        except sqlite3.Error as error:
            raise _unusable(self.path, error) from error

    def close(self) -> None:
        """Commit what is waiting and close the file. Closing twice is fine."""
        self._writer.close()
        self._reader.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class Ledger(_Store):
    """Every model outcome of a run, by (stage, fingerprint, row, part, attempt): none is asked twice.

    Args:
        path: the SQLite file; made, with its folder, if it is not there.

    Raises:
        InputError: from every method: the file cannot be opened, read or written (disk full, no
            folder, no database).
    """

    schema = """
        CREATE TABLE IF NOT EXISTS outcomes (
            stage TEXT NOT NULL, fingerprint TEXT NOT NULL, row TEXT NOT NULL, part TEXT NOT NULL,
            attempt INTEGER NOT NULL, outcome TEXT NOT NULL, text TEXT NOT NULL,
            prompt_tokens INTEGER NOT NULL, completion_tokens INTEGER NOT NULL, logprobs BLOB,
            cached INTEGER NOT NULL, UNIQUE (fingerprint, row, part, attempt, stage))"""
    insert = "INSERT INTO outcomes VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?) ON CONFLICT DO NOTHING"

    def get(self, asked: Asked) -> Completion | None:
        """What this attempt has already led to, as `cached`; None when it was never answered."""
        found = self._query(
            "SELECT outcome, text, prompt_tokens, completion_tokens, logprobs FROM outcomes "
            "WHERE fingerprint = ? AND row = ? AND part = ? AND attempt = ? AND stage = ?",
            (asked.fingerprint, asked.row, asked.part, asked.attempt, asked.stage),
        )
        if not found:
            return None
        outcome, text, prompt_tokens, completion_tokens, logprobs = found[0]
        return Completion(outcome, text, prompt_tokens, completion_tokens, _unpack(logprobs), cached=True)

    async def record(self, asked: Asked, completion: Completion) -> None:
        """Record an outcome; returns when it is committed. The first recording of an attempt stands.

        `not_recorded` and `unreachable` say nothing about the model and have no place here.
        """
        assert completion.outcome not in ("not_recorded", "unreachable"), completion.outcome
        values = (
            asked.stage, asked.fingerprint, asked.row, asked.part, asked.attempt, completion.outcome,
            completion.text, completion.prompt_tokens, completion.completion_tokens,
            _pack(completion.logprobs), completion.cached,
        )  # fmt: skip
        await self._writer.add(values)

    def spent(self, fingerprints: Sequence[str]) -> int:
        """Prompt and completion tokens of these stages that a server was really asked for."""
        marks = ", ".join("?" * len(fingerprints))
        ((tokens,),) = self._query(
            "SELECT COALESCE(SUM(prompt_tokens + completion_tokens), 0) FROM outcomes "
            f"WHERE NOT cached AND fingerprint IN ({marks})",
            fingerprints,
        )
        return int(tokens)


def read_outcomes(path: Path, asked: Asked) -> list[tuple[Asked, Completion]]:
    """What a run's ledger holds of a row at a stage, by part and attempt; it is only looked at.

    Args:
        path: the ledger.
        asked: names stage, fingerprint and row; its part and attempt do not count.

    Raises:
        InputError: it is not there or cannot be read.
    """
    try:
        with closing(sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True)) as db:
            found = db.execute(
                "SELECT part, attempt, outcome, text, prompt_tokens, completion_tokens, logprobs, cached "
                "FROM outcomes WHERE stage = ? AND fingerprint = ? AND row = ? ORDER BY part, attempt",
                (asked.stage, asked.fingerprint, asked.row),
            ).fetchall()
    except sqlite3.Error as error:
        raise _unusable(path, error) from error
    return [
        (
            replace(asked, part=part, attempt=attempt),
            Completion(outcome, text, prompt_tokens, completion_tokens, _unpack(logprobs), bool(cached)),
        )
        for part, attempt, outcome, text, prompt_tokens, completion_tokens, logprobs, cached in found
    ]


@dataclass(frozen=True)
class CacheStats:
    """What the request cache holds. `bytes` on disk; ages in seconds since the epoch, None when empty."""

    entries: int
    bytes: int
    oldest: float | None
    newest: float | None


class RequestCache(_Store):
    """Successful completions by request digest, shared by all runs.

    Args:
        root: the folder of the cache; the file is `requests.sqlite` in it.

    Raises:
        InputError: from every method, as in `Ledger`.
    """

    schema = """
        CREATE TABLE IF NOT EXISTS completions (
            digest TEXT PRIMARY KEY, text TEXT NOT NULL, prompt_tokens INTEGER NOT NULL,
            completion_tokens INTEGER NOT NULL, logprobs BLOB, made REAL NOT NULL)"""
    insert = "INSERT INTO completions VALUES (?, ?, ?, ?, ?, ?) ON CONFLICT DO NOTHING"

    def __init__(self, root: Path) -> None:
        super().__init__(root / "requests.sqlite")

    def get(self, key: str) -> Completion | None:
        """The completion of the request with this digest, as `cached`."""
        found = self._query(
            "SELECT text, prompt_tokens, completion_tokens, logprobs FROM completions WHERE digest = ?",
            (key,),
        )
        if not found:
            return None
        text, prompt_tokens, completion_tokens, logprobs = found[0]
        return Completion("stop", text, prompt_tokens, completion_tokens, _unpack(logprobs), cached=True)

    async def put(self, key: str, completion: Completion) -> None:
        """Keep a completion that came to its own end; returns when it is committed."""
        assert completion.outcome == "stop", completion.outcome
        tokens = completion.prompt_tokens, completion.completion_tokens
        await self._writer.add((key, completion.text, *tokens, _pack(completion.logprobs), time.time()))

    def stats(self) -> CacheStats:
        """Entries, size on disk and ages."""
        ((entries, oldest, newest),) = self._query("SELECT COUNT(*), MIN(made), MAX(made) FROM completions")
        files = self.path.parent.glob(self.path.name + "*")
        return CacheStats(entries, sum(file.stat().st_size for file in files), oldest, newest)

    def prune(self, older_than_days: float) -> int:
        """Drop completions made more than this many days ago, give the space back, return how many."""
        before = time.time() - older_than_days * 86400
        try:
            dropped = self._reader.execute("DELETE FROM completions WHERE made < ?", (before,)).rowcount
            self._reader.execute("VACUUM")
            self._reader.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        except sqlite3.Error as error:
            raise _unusable(self.path, error) from error
        return dropped


class _Writer:
    """A thread that inserts rows in batches and tells each waiter when its row is committed."""

    def __init__(self, path: Path, db: sqlite3.Connection, insert: str) -> None:
        self._path, self._db, self._insert = path, db, insert
        self._changed = threading.Condition()
        self._pending: list[tuple[tuple[Any, ...], asyncio.Future[None]]] = []
        self._closed = False
        self._thread = threading.Thread(target=self._run, name=f"writer of {path.name}", daemon=True)
        self._thread.start()

    async def add(self, values: tuple[Any, ...]) -> None:
        """Returns when the row is committed. Cancelling the wait does not take the row back.

        Raises:
            InputError: the row could not be written.
        """
        done = asyncio.get_running_loop().create_future()
        with self._changed:
            if self._closed:
                raise RuntimeError(f"{self._path} is closed")
            self._pending.append((values, done))
            if len(self._pending) in (1, BATCH_ROWS):
                self._changed.notify()
        await done

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify()
        self._thread.join()
        self._db.close()

    def _run(self) -> None:
        while batch := self._next_batch():
            error = self._commit([values for values, _ in batch])
            for loop, group in groupby((done for _, done in batch), key=asyncio.Future.get_loop):
                _tell(loop, list(group), error)

    def _next_batch(self) -> list[tuple[tuple[Any, ...], asyncio.Future[None]]]:
        """Up to BATCH_ROWS rows, LINGER after the first one; empty when closed and done."""
        with self._changed:
            self._changed.wait_for(lambda: self._pending or self._closed)
            self._changed.wait_for(lambda: len(self._pending) >= BATCH_ROWS or self._closed, LINGER)
            batch = self._pending[:BATCH_ROWS]
            del self._pending[:BATCH_ROWS]
        return batch

    def _commit(self, rows: list[tuple[Any, ...]]) -> Exception | None:
        crash_point("before-commit")
        try:
            self._db.execute("BEGIN IMMEDIATE")
            self._db.executemany(self._insert, rows)
            self._db.execute("COMMIT")
        except sqlite3.Error as error:
            return self._rolled_back(_unusable(self._path, error))
        except Exception as defect:  # whoever waits must hear of it: this thread has nobody to tell
            return self._rolled_back(defect)
        return None

    def _rolled_back(self, error: Exception) -> Exception:
        try:
            if self._db.in_transaction:
                self._db.execute("ROLLBACK")
        except sqlite3.Error as second:
            error.add_note(f"and rolling back: {second}")
        return error


def _tell(
    loop: asyncio.AbstractEventLoop, waiting: list[asyncio.Future[None]], error: Exception | None
) -> None:
    def settle() -> None:
        for done in waiting:
            if done.done():
                continue  # its waiter was cancelled
            if error is None:
                done.set_result(None)
            else:
                done.set_exception(error)

    try:
        loop.call_soon_threadsafe(settle)
    except RuntimeError:
        return  # the loop is closed, and so nobody waits


def _unusable(path: Path, error: sqlite3.Error) -> InputError:
    """The error of a store; what SQLite calls an I/O error is mostly a full disk, so say what is free."""
    free = ""
    if getattr(error, "sqlite_errorname", "").startswith("SQLITE_IOERR"):
        with suppress(OSError):
            free = f"; {shutil.disk_usage(path.parent).free:,} bytes are free on its disk"
    return InputError(f"cannot be used: {error}{free}", file=path)


def _pack(logprobs: Pairs | None) -> bytes | None:
    return None if logprobs is None else orjson.dumps(logprobs)


def _unpack(packed: bytes | None) -> Pairs | None:
    return None if packed is None else tuple((token, value) for token, value in orjson.loads(packed))
