"""Is a release whole, and does it agree with itself? Says the first thing that is wrong."""

from __future__ import annotations

import hashlib
import math
import sqlite3
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq

from gradeloom.schemas.errors import InputError
from gradeloom.schemas.manifest import Content, Manifest
from gradeloom.schemas.rows import digest
from gradeloom.tasks.release.catalog import MANIFEST, read_manifest, table_rows
from gradeloom.tasks.release.tables import TABLES, Place, index_on_disk, locate, read_rows, table_files


def verify(folder: Path) -> list[str]:
    """Check a release folder in full.

    Returns:
        What was checked, one line each.

    Raises:
        InputError: at the first thing that is wrong, naming the file, the row and the field.
    """
    manifest = _unedited(folder)
    return [f"manifest: digest {manifest.digest}", *check(folder, manifest.content)]


def require_untouched(folder: Path) -> None:
    """The cheap part of `verify`: every byte is still what was released, and checked then.

    Raises:
        InputError: at the first file that is missing, added or changed.
    """
    _check_files(folder, _unedited(folder).content)


def _unedited(folder: Path) -> Manifest:
    manifest = read_manifest(folder)
    require_unedited(manifest, folder / MANIFEST)
    return manifest


def require_unedited(manifest: Manifest, file: Path | str) -> None:
    """The content of a manifest must have the digest that is written beside it.

    Raises:
        InputError: it has not.
    """
    if manifest.content.digest() != manifest.digest:
        raise InputError(
            "`content` does not have the digest that is written beside it; the manifest was edited",
            file=file,
            field="digest",
        )


def check(folder: Path, content: Content) -> list[str]:
    """Check the files of a release against the content part of its manifest; as `verify` otherwise."""
    return [
        _check_files(folder, content),
        _check_tables(folder, content),
        _check_rows(folder, content),
        _check_accounting(folder, content),
    ]


def round_half_up(grade: float) -> int:
    """The integer score in `qrels` of a grade in `lists`."""
    return math.floor(grade + 0.5)


# --- files ----------------------------------------------------------------------------------


def _check_files(folder: Path, content: Content) -> str:
    declared = {file.path: file for file in content.files}
    present = {str(f.relative_to(folder)) for f in folder.rglob("*") if not f.is_dir()} - {MANIFEST}
    for missing in sorted(declared.keys() - present):
        raise InputError("listed in the manifest, but missing", file=folder / missing)
    for extra in sorted(present - declared.keys()):
        raise InputError("not listed in the manifest; a release is never added to", file=folder / extra)
    for name, file in declared.items():
        path = folder / name
        size = path.stat().st_size
        if size != file.bytes:
            raise InputError(f"{size} bytes, the manifest says {file.bytes}", file=path, field="bytes")
        if sha256(path) != file.sha256:
            raise InputError(
                "its bytes are not those that were released (SHA-256)", file=path, field="sha256"
            )
    return f"files: {len(declared)}, sizes and SHA-256 as in the manifest"


def sha256(path: Path) -> str:
    """The SHA-256 of a file, 64 hex digits.

    Raises:
        InputError: the file cannot be read.
    """
    try:
        with path.open("rb") as f:
            return hashlib.file_digest(f, "sha256").hexdigest()
    except OSError as error:
        raise InputError(f"cannot be read: {error.strerror}", file=path) from error


# --- tables ---------------------------------------------------------------------------------


def _check_tables(folder: Path, content: Content) -> str:
    rows = {file.path: file.rows for file in content.files}
    for table, schema in TABLES.items():
        files = table_files(folder, table)
        if not files:
            raise InputError(f"no Parquet file of the table '{table}'", file=folder / table)
        for path in files:
            try:
                with pq.ParquetFile(path) as file:
                    found, count = file.schema_arrow.remove_metadata(), file.metadata.num_rows
            except (pa.ArrowException, OSError) as error:
                raise InputError(f"cannot be read as Parquet ({error})", file=path) from error
            _check_schema(path, found, schema)
            declared = rows.get(f"{table}/{path.name}")
            if count != declared:
                raise InputError(f"{count} rows, the manifest says {declared}", file=path, field="rows")
    counts = ", ".join(f"{table} {n}" for table, n in table_rows(content).items())
    return f"tables: columns and row counts as declared ({counts})"


def _check_schema(path: Path, found: pa.Schema, expected: pa.Schema) -> None:
    if found.names != expected.names:
        raise InputError(f"columns {found.names}, expected {expected.names}", file=path)
    for have, want in zip(found, expected, strict=True):
        if not have.equals(want):
            raise InputError(f"has the type {have}, expected {want}", file=path, field=want.name)


# --- rows: keys, references, grades ---------------------------------------------------------

_INDEX = """
CREATE TABLE queries (id TEXT PRIMARY KEY, text TEXT, place INTEGER) WITHOUT ROWID;
CREATE TABLE corpus (id TEXT PRIMARY KEY, text TEXT, place INTEGER) WITHOUT ROWID;
CREATE TABLE qrels (query TEXT, passage TEXT, score INTEGER, place INTEGER,
                    PRIMARY KEY (query, passage)) WITHOUT ROWID;
CREATE TABLE lists (query TEXT PRIMARY KEY, text TEXT, place INTEGER) WITHOUT ROWID;
CREATE TABLE listed (query TEXT, passage TEXT, score INTEGER, text TEXT, place INTEGER,
                     PRIMARY KEY (query, passage)) WITHOUT ROWID;
"""


class _Rule(NamedTuple):
    """What must find nothing: `bad` selects (place, words of the message) of rows that break it."""

    table: str
    field: str
    bad: str
    message: str


_RULES = (
    _Rule("qrels", "query-id",
          "SELECT r.place, r.query FROM qrels r LEFT JOIN queries q ON q.id = r.query WHERE q.id IS NULL",
          "'{}' stands in no row of queries"),
    _Rule("qrels", "corpus-id",
          "SELECT r.place, r.passage FROM qrels r LEFT JOIN corpus c ON c.id = r.passage WHERE c.id IS NULL",
          "'{}' stands in no row of corpus"),
    _Rule("lists", "query_id",
          "SELECT l.place, l.query FROM lists l LEFT JOIN queries q ON q.id = l.query WHERE q.id IS NULL",
          "'{}' stands in no row of queries"),
    _Rule("lists", "passage_ids",
          "SELECT l.place, l.passage FROM listed l LEFT JOIN corpus c ON c.id = l.passage WHERE c.id IS NULL",
          "'{}' stands in no row of corpus"),
    _Rule("lists", "query",
          "SELECT l.place, l.query FROM lists l JOIN queries q ON q.id = l.query WHERE q.text != l.text",
          "'{}' has another text in queries"),
    _Rule("lists", "passages",
          "SELECT l.place, l.passage FROM listed l JOIN corpus c ON c.id = l.passage WHERE c.text != l.text",
          "'{}' has another text in corpus"),
    _Rule("queries", "_id",
          "SELECT q.place, q.id FROM queries q LEFT JOIN lists l ON l.query = q.id WHERE l.query IS NULL",
          "'{}' has no list"),
    _Rule("corpus", "_id",
          "SELECT c.place, c.id FROM corpus c WHERE c.id NOT IN (SELECT passage FROM listed)",
          "'{}' stands in no list"),
    _Rule("lists", "passage_ids",
          "SELECT l.place, l.query, l.passage FROM listed l LEFT JOIN qrels r"
          " ON r.query = l.query AND r.passage = l.passage WHERE r.query IS NULL",
          "({}, {}) has no row in qrels"),
    _Rule("qrels", "corpus-id",
          "SELECT r.place, r.query, r.passage FROM qrels r LEFT JOIN listed l"
          " ON r.query = l.query AND r.passage = l.passage WHERE l.query IS NULL",
          "({}, {}) stands in no list"),
    _Rule("qrels", "score",
          "SELECT r.place, r.score, l.score FROM qrels r JOIN listed l"
          " ON r.query = l.query AND r.passage = l.passage WHERE r.score != l.score",
          "{}, but the grade in lists rounds to {}"),
)  # fmt: skip


def _check_rows(folder: Path, content: Content) -> str:
    """Keys, references and grades, through an index that SQLite keeps on disk, not in memory."""
    with index_on_disk() as index:
        index.executescript(_INDEX)
        _fill(index, folder, content)
        for rule in _RULES:
            broken = index.execute(f"{rule.bad} ORDER BY 1 LIMIT 1").fetchone()
            if broken is not None:
                place = locate(folder, rule.table, broken[0])
                raise InputError(
                    rule.message.format(*broken[1:]), file=place.file, row=place.row, field=rule.field
                )
    return "rows: keys unique, references resolve, scores are the rounded grades, grades are levels"


def _fill(index: sqlite3.Connection, folder: Path, content: Content) -> None:
    """Put every row into the index; a second row with one key is an error."""
    # Texts are compared, so their digest is enough.
    _insert(index, "queries", ("_id",), (
        (place, (row["_id"], digest(row["text"])))
        for place, row in read_rows(folder, "queries")
    ))  # fmt: skip
    _insert(index, "corpus", ("_id",), (
        (place, (row["_id"], digest(row["text"])))
        for place, row in read_rows(folder, "corpus", ["_id", "text"])
    ))  # fmt: skip
    _insert(index, "qrels", ("query-id", "corpus-id"), (
        (place, (row["query-id"], row["corpus-id"], row["score"]))
        for place, row in read_rows(folder, "qrels")
    ))  # fmt: skip
    _insert(index, "lists", ("query_id",), (
        (place, (row["query_id"], digest(row["query"])))
        for place, row in read_rows(folder, "lists", ["query_id", "query"])
    ))  # fmt: skip
    _fill_listed(index, folder, content)


def _insert(
    index: sqlite3.Connection,
    table: str,
    key: tuple[str, ...],
    rows: Iterable[tuple[Place, tuple[Any, ...]]],
) -> None:
    last: tuple[Place, tuple[Any, ...]] | None = None

    def numbered() -> Iterator[tuple[Any, ...]]:
        nonlocal last
        for number, (place, values) in enumerate(rows):
            last = place, values
            yield (*values, number)

    width = len(index.execute(f"SELECT * FROM {table} LIMIT 0").description)
    try:
        index.executemany(f"INSERT INTO {table} VALUES ({', '.join('?' * width)})", numbered())
    except sqlite3.IntegrityError:
        assert last is not None
        place, values = last
        shown = ", ".join(str(value) for value in values[: len(key)])
        raise InputError(
            f"'{shown}' stands here a second time; it must be unique",
            file=place.file,
            row=place.row,
            field=", ".join(key),
        ) from None


def _fill_listed(index: sqlite3.Connection, folder: Path, content: Content) -> None:
    """The passages of every list; `place` is their list's, so that an error names its row."""
    levels = _levels(folder, content)
    fractions = content.quality.get("label_policy") == "expected"
    columns = [field.name for field in TABLES["lists"] if pa.types.is_list(field.type)]
    for number, (place, row) in enumerate(read_rows(folder, "lists", ["query_id", *columns])):
        _check_list(place, row, columns, levels, fractions=fractions)
        listed = [
            (row["query_id"], passage, round_half_up(grade), digest(text), number)
            for passage, grade, text in zip(row["passage_ids"], row["grade"], row["passages"], strict=True)
        ]
        try:
            index.executemany("INSERT INTO listed VALUES (?, ?, ?, ?, ?)", listed)
        except sqlite3.IntegrityError:
            raise InputError(
                "one passage stands twice in the list", file=place.file, row=place.row, field="passage_ids"
            ) from None


def _check_list(
    place: Place, row: dict[str, Any], columns: list[str], levels: set[int], *, fractions: bool
) -> None:
    for column in columns:
        if len(row[column]) != len(row["passages"]):
            raise InputError(
                f"{len(row[column])} values for {len(row['passages'])} passages",
                file=place.file,
                row=place.row,
                field=column,
            )
    low, high = min(levels), max(levels)
    allowed: dict[str, Callable[[Any], bool]] = {
        "intended": lambda grade: grade in levels,
        "judged": lambda grade: grade is None or grade in levels,
        "grade": lambda grade: low <= grade <= high if fractions else grade in levels,
    }
    for column, fits in allowed.items():
        for grade in row[column]:
            if not fits(grade):
                known = ", ".join(str(level) for level in sorted(levels))
                raise InputError(
                    f"{grade} is not among the levels {known}", file=place.file, row=place.row, field=column
                )


def _levels(folder: Path, content: Content) -> set[int]:
    try:
        return {int(level["grade"]) for level in content.config["levels"]}
    except (KeyError, TypeError, ValueError):
        raise InputError(
            "expected a list of levels with their grades",
            file=folder / MANIFEST,
            field="content.config.levels",
        ) from None


# --- accounting -----------------------------------------------------------------------------


def _check_accounting(folder: Path, content: Content) -> str:
    def wrong(message: str) -> InputError:
        return InputError(message, file=folder / MANIFEST, field="content.accounting")

    if not content.accounting:
        raise wrong("no stage is accounted for")
    handed_on = content.accounting[0].rows
    for account in content.accounting:
        try:
            account.assert_adds_up()
        except AssertionError as error:
            raise wrong(str(error)) from None
        if account.rows != handed_on:
            raise wrong(f"stage {account.stage}: {account.rows} rows in, the stage before kept {handed_on}")
        handed_on = account.kept
    rows = table_rows(content)
    if rows["queries"] != handed_on:
        raise wrong(f"the last stage kept {handed_on} rows, queries holds {rows['queries']}")
    _check_rejects(folder, content)
    unused = sum(account.unused for account in content.accounting)
    went = f"{handed_on} released, {rows['rejects']} in rejects, {unused} unused"
    return f"accounting: {content.accounting[0].rows} rows in, {went}"


def _check_rejects(folder: Path, content: Content) -> None:
    """Every rejected or failed row stands in `rejects`, under its stage."""
    found: Counter[tuple[str, str]] = Counter()
    for place, row in read_rows(folder, "rejects", ["stage", "status"]):
        if row["status"] not in ("rejected", "failed"):
            raise InputError(
                f"'{row['status']}', expected rejected or failed",
                file=place.file,
                row=place.row,
                field="status",
            )
        found[row["stage"], row["status"]] += 1
    counted = Counter(
        {
            (account.stage, status): n
            for account in content.accounting
            for status, n in (("rejected", account.rejected), ("failed", account.failed))
        }
    )
    for stage, status in sorted(found.keys() | counted.keys()):
        have, want = found[stage, status], counted[stage, status]
        if have != want:
            raise InputError(
                f"{have} {status} rows of stage {stage}, the accounting says {want}", file=folder / "rejects"
            )
