"""Exact and near duplicates over the whole data set: a sequential pass with its index on disk.

A list is dropped if and only if one of its passages matches a passage of an earlier list that this
stage kept: the same folded words (`duplicate`), or else a Jaccard similarity of word shingles of at
least the threshold (`near_duplicate`). A passage with fewer words than a shingle has is compared for
equality alone. Which pairs are compared is up to MinHash: two passages of similarity s meet in one
of b bands of r rows with the chance 1 - (1 - s^r)^b (Leskovec et al., Mining of Massive Datasets,
ch. 3); with the defaults .95 at s = .8 and .9995 at .9. Whether they match is decided by their true
similarity, so a decision is never a false alarm.
"""

from __future__ import annotations

import sqlite3
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import blake2b
from importlib.metadata import version
from itertools import chain, islice
from pathlib import Path
from types import TracebackType

import numpy as np
import orjson
from rensa import RMinHash

from gradeloom.schemas.config import NearDuplicatesFilter, content_view
from gradeloom.schemas.errors import InputError
from gradeloom.schemas.rows import DecisionRow, ListRow
from gradeloom.tasks.filter.text import jaccard, mix, ngram_hashes, normalised, shingles

_CACHE_MB = 32
_CHUNK = 1024  # passages signed at once

_TABLES = """
CREATE TABLE IF NOT EXISTS made_with (settings TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS shards (
    ordinal INTEGER PRIMARY KEY, name TEXT UNIQUE NOT NULL, last INTEGER NOT NULL
);
CREATE TABLE IF NOT EXISTS passages (
    number INTEGER PRIMARY KEY, query_id TEXT NOT NULL, grade INTEGER NOT NULL, text TEXT NOT NULL
);
CREATE TABLE IF NOT EXISTS keys (key INTEGER, number INTEGER, PRIMARY KEY (key, number)) WITHOUT ROWID;
CREATE TEMP TABLE asked (key INTEGER NOT NULL, place INTEGER NOT NULL);
CREATE TEMP TABLE candidates (place INTEGER, number INTEGER, PRIMARY KEY (place, number)) WITHOUT ROWID;
"""


@dataclass(frozen=True, slots=True)
class _Passage:
    """A passage by its folded words, and what it is called in a decision's detail."""

    query_id: str
    grade: int
    text: str


@dataclass(frozen=True, slots=True)
class _Signed:
    """A passage with the keys it is found by: of its exact text, then of each band."""

    passage: _Passage
    keys: tuple[int, ...]


class _Kept:
    """What a shard has kept so far, found by key."""

    def __init__(self) -> None:
        self.signed: list[_Signed] = []
        self._by_key: dict[int, list[int]] = defaultdict(list)

    def add(self, passages: Iterable[_Signed]) -> None:
        for signed in passages:
            for key in signed.keys:
                self._by_key[key].append(len(self.signed))
            self.signed.append(signed)

    def sharing(self, keys: Iterable[int]) -> Iterator[_Passage]:
        """Those that share a key, in the order in which they were added."""
        numbers = {number for key in keys for number in self._by_key.get(key, ())}
        return (self.signed[number].passage for number in sorted(numbers))


class NearDuplicateIndex:
    """The passages kept so far, on disk, and the decisions that follow from them. A context manager.

    Shards are decided in order and each is committed under its name with its decisions, in one
    transaction. Memory is bounded by the page cache and one shard; on disk a passage of 60 words
    takes about 0.7 kB.

    Args:
        path: the SQLite file; made when it is not there.
        config: the filter's settings. An index made with others, or by another version of the
            library that computes signatures, is emptied (`sync` fills it again).

    Raises:
        InputError: the file cannot be opened or written, is no index or is damaged. Every method does.
    """

    def __init__(self, path: Path, config: NearDuplicatesFilter) -> None:
        self._path = path
        self._config = config
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise InputError(f"cannot make the index: {error.strerror}", file=path) from error
        with self._reported():
            # One thread at a time, but not always the same.
            self._db = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
            try:
                self._open()
            except sqlite3.Error:
                self._db.close()
                raise

    def _open(self) -> None:
        # One process has the run: no shared memory file. NORMAL in WAL mode may lose the last
        # commits in a power cut, never the file; `sync` makes up for them.
        for setting in ("locking_mode = EXCLUSIVE", "journal_mode = WAL", "synchronous = NORMAL"):
            self._db.execute(f"PRAGMA {setting}")
        self._db.execute(f"PRAGMA cache_size = -{_CACHE_MB * 1024}")
        self._db.executescript(_TABLES)
        settings = orjson.dumps([1, content_view(self._config), version("rensa")]).decode()
        if self._db.execute("SELECT settings FROM made_with").fetchone() != (settings,):
            with self._transaction():
                self._empty("made_with", "shards", "passages", "keys")
                self._db.execute("INSERT INTO made_with VALUES (?)", (settings,))

    def __enter__(self) -> NearDuplicateIndex:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        with self._reported():
            self._db.close()

    def sync(self, finished: Sequence[str], kept_rows: Callable[[str], Sequence[ListRow]]) -> None:
        """Make the index hold exactly the finished shards, whatever happened before.

        What it holds beyond the longest common beginning is taken out; the kept rows of finished
        shards that it lacks are put in again.

        Args:
            finished: names of the shards whose decisions are written, in order.
            kept_rows: the rows of such a shard that this stage kept, in order.
        """
        with self._reported():
            held = [name for (name,) in self._db.execute("SELECT name FROM shards ORDER BY ordinal")]
            common = 0
            while common < min(len(held), len(finished)) and held[common] == finished[common]:
                common += 1
            if common < len(held):
                self._truncate(common)
            for name in finished[common:]:
                signed = [passage for row in self._sign_lists(kept_rows(name)) for passage in row]
                with self._transaction():
                    self._add(name, signed)

    def decide(self, shard: str, rows: Sequence[ListRow]) -> list[DecisionRow]:
        """Decide on the next shard and put what is kept into the index under the shard's name.

        Passages of a list are looked at in the list's order, candidates from the earliest on; the
        first match decides. `detail` names the earlier list and passage, `grade` the own passage.

        Args:
            shard: a name that the index does not hold; `sync` comes before when in doubt.
            rows: the rows that reached this stage, in order.
        """
        lists = self._sign_lists(rows)
        kept = _Kept()
        decisions = []
        place = 0
        with self._reported(), self._transaction():
            known = self._db.execute("SELECT 1 FROM shards WHERE name = ?", (shard,)).fetchone()
            assert known is None, f"shard {shard} is decided already"
            found = self._look_up(signed.keys for passages in lists for signed in passages)
            for row, passages in zip(rows, lists, strict=True):
                match = self._first_match(passages, place, found, kept)
                if match is None:
                    kept.add(passages)
                decisions.append(_decision(row, match))
                place += len(passages)
            self._add(shard, kept.signed)
        return decisions

    def _first_match(
        self, passages: Sequence[_Signed], place: int, found: set[int], kept: _Kept
    ) -> _Match | None:
        for n, signed in enumerate(passages, place):
            earlier = self._earlier(n) if n in found else ()
            match = self._match(signed.passage, chain(earlier, kept.sharing(signed.keys)))
            if match is not None:
                return match
        return None

    def _match(self, own: _Passage, candidates: Iterable[_Passage]) -> _Match | None:
        """The first candidate that is the same as, or nearly the same as, the passage."""
        size, threshold = self._config.shingle, self._config.threshold
        own_shingles: set[tuple[str, ...]] | None = None
        for other in candidates:
            if other.text == own.text:
                return _Match("duplicate", 1.0, own, other)
            if own_shingles is None:
                own_shingles = shingles(own.text.split(), size)
            similarity = jaccard(own_shingles, shingles(other.text.split(), size))
            if similarity >= threshold:
                return _Match("near_duplicate", similarity, own, other)
        return None

    def _look_up(self, keys: Iterable[Sequence[int]]) -> set[int]:
        """Fill table `candidates` with who shares a key with the n-th passage; the n that have any."""
        asked = sorted((key, place) for place, several in enumerate(keys) for key in several)
        self._db.execute("DELETE FROM asked")
        self._db.execute("DELETE FROM candidates")
        self._db.executemany("INSERT INTO asked VALUES (?, ?)", asked)
        # CROSS JOIN keeps the loops in this order: keys ascend, so every page is read once.
        self._db.execute(
            "INSERT OR IGNORE INTO candidates "
            "SELECT place, number FROM asked CROSS JOIN keys ON keys.key = asked.key"
        )
        return {place for (place,) in self._db.execute("SELECT DISTINCT place FROM candidates")}

    def _earlier(self, place: int) -> Iterator[_Passage]:
        rows = self._db.execute(
            "SELECT query_id, grade, text FROM candidates CROSS JOIN passages USING (number) "
            "WHERE place = ? ORDER BY number",
            (place,),
        )
        return (_Passage(*row) for row in rows)

    # --- signatures ---------------------------------------------------------------------------

    def _sign_lists(self, rows: Sequence[ListRow]) -> list[list[_Signed]]:
        passages = [
            _Passage(row.query_id, passage.grade, normalised(passage.text))
            for row in rows
            for passage in row.passages
        ]
        signed = self._sign(passages)
        return [list(islice(signed, len(row.passages))) for row in rows]

    def _sign(self, passages: Sequence[_Passage]) -> Iterator[_Signed]:
        for start in range(0, len(passages), _CHUNK):
            chunk = passages[start : start + _CHUNK]
            bands = _band_keys([passage.text for passage in chunk], self._config)
            for passage, of_bands in zip(chunk, bands, strict=True):
                yield _Signed(passage, (_text_key(passage.text), *of_bands))

    # --- the file -----------------------------------------------------------------------------

    def _add(self, shard: str, signed: Sequence[_Signed]) -> None:
        first = self._last_number() + 1
        self._db.executemany(
            "INSERT INTO passages VALUES (?, ?, ?, ?)",
            ((n, s.passage.query_id, s.passage.grade, s.passage.text) for n, s in enumerate(signed, first)),
        )
        keys = sorted({(key, n) for n, s in enumerate(signed, first) for key in s.keys})
        self._db.executemany("INSERT INTO keys VALUES (?, ?)", keys)
        self._db.execute("INSERT INTO shards (name, last) VALUES (?, ?)", (shard, first + len(signed) - 1))

    def _last_number(self) -> int:
        row = self._db.execute("SELECT last FROM shards ORDER BY ordinal DESC LIMIT 1").fetchone()
        return int(row[0]) if row else 0

    def _truncate(self, shards: int) -> None:
        """Keep the first so many shards."""
        with self._transaction():
            self._db.execute(
                "DELETE FROM shards WHERE ordinal NOT IN "
                "(SELECT ordinal FROM shards ORDER BY ordinal LIMIT ?)",
                (shards,),
            )
            last = self._last_number()
            if not last:
                self._empty("passages", "keys")
                return
            # Keys do not stand by passage: they are computed again.
            while passages := self._db.execute(
                "SELECT number, query_id, grade, text FROM passages WHERE number > ? ORDER BY number LIMIT ?",
                (last, _CHUNK),
            ).fetchall():
                signed = self._sign([_Passage(*rest) for _, *rest in passages])
                numbers = [number for number, *_ in passages]
                keys = sorted((key, n) for n, s in zip(numbers, signed, strict=True) for key in s.keys)
                self._db.executemany("DELETE FROM keys WHERE key = ? AND number = ?", keys)
                self._db.executemany("DELETE FROM passages WHERE number = ?", ((n,) for n in numbers))

    def _empty(self, *tables: str) -> None:
        for table in tables:
            self._db.execute(f"DELETE FROM {table}")

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        self._db.execute("BEGIN IMMEDIATE")
        try:
            yield
            self._db.execute("COMMIT")
        finally:
            # SQLite has rolled back by itself after some errors (a full disk).
            if self._db.in_transaction:
                self._db.execute("ROLLBACK")

    @contextmanager
    def _reported(self) -> Iterator[None]:
        try:
            yield
        except sqlite3.DatabaseError as error:
            name = getattr(error, "sqlite_errorname", "")
            if name.startswith(("SQLITE_CORRUPT", "SQLITE_NOTADB")):
                problem = "damaged index; delete it and start the run again, it is made anew"
            elif isinstance(error, sqlite3.OperationalError):
                problem = f"cannot use the index: {error}"
            else:
                raise
            raise InputError(problem, file=self._path) from error


@dataclass(frozen=True, slots=True)
class _Match:
    reason: str
    similarity: float
    own: _Passage
    other: _Passage


def _decision(row: ListRow, match: _Match | None) -> DecisionRow:
    if match is None:
        return DecisionRow(id=row.id, ordinal=row.ordinal)
    other = match.other
    return DecisionRow(
        id=row.id,
        ordinal=row.ordinal,
        status="rejected",
        reason=match.reason,
        detail=f"{match.similarity:.3f} like the passage of grade {other.grade} of query {other.query_id}",
        grade=match.own.grade,
    )


def _text_key(text: str) -> int:
    data = blake2b(text.encode(), digest_size=8).digest()
    return int.from_bytes(data, "little", signed=True)


def _band_keys(texts: Sequence[str], config: NearDuplicatesFilter) -> list[list[int]]:
    """The keys (signed 64 bit) of every text's bands; none for a text shorter than a shingle."""
    hashes = [ngram_hashes(text.split(), config.shingle) for text in texts]
    ends = np.cumsum([0, *map(len, hashes)], dtype=np.uint64)
    permutations = config.bands * config.rows_per_band
    matrix = RMinHash.digest_matrix_from_flat_token_hashes(
        np.concatenate(hashes), ends, permutations, config.seed % (1 << 64)
    )
    signatures = np.array(matrix.to_rows(), np.uint64).reshape(len(texts), config.bands, config.rows_per_band)
    keys = np.broadcast_to(mix(np.arange(1, config.bands + 1, dtype=np.uint64)), signatures.shape[:2])
    for row in range(config.rows_per_band):
        keys = mix(keys ^ signatures[:, :, row])
    return [
        of_text if len(hashed) else []
        for of_text, hashed in zip(keys.view(np.int64).tolist(), hashes, strict=True)
    ]
