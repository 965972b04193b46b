"""What two releases of one kind differ in: rows, grades, columns, settings, figures, accounting.

Tables and their columns are read from the Parquet files, so that a release of any kind can be compared;
what a row is known by is the one thing that must be told per table (`KEYS`). Rows go through an index on
disk: memory does not grow with their number.
"""

from __future__ import annotations

import sqlite3
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import orjson
import pyarrow as pa
import pyarrow.parquet as pq

from gradeloom.schemas.errors import InputError
from gradeloom.schemas.manifest import Content, Manifest, StageAccount
from gradeloom.schemas.rows import digest
from gradeloom.tasks.release.catalog import read_manifest, table_rows
from gradeloom.tasks.release.tables import index_on_disk, locate, read_rows, row_at, table_files
from gradeloom.tasks.release.verify import require_untouched

KEYS: dict[str, tuple[str, ...]] = {
    "lists": ("query_id",),
    "queries": ("_id",),
    "corpus": ("_id",),
    "qrels": ("query-id", "corpus-id"),
    "rejects": ("query_id",),
}
"""Table -> the columns that a row is known by. A row of any other table is known by all it holds."""

GRADES = ("qrels", "score")
"""The table and column whose values are followed from one release to the other."""

EXAMPLES = 3
"""Rows shown per table of those added, removed and changed."""

What = Literal["added", "removed", "changed"]


@dataclass(frozen=True)
class Side:
    """One of the two releases."""

    name: str
    version: str
    digest: str
    path: str


@dataclass(frozen=True)
class Change:
    """A named value that is not the same: `old` is None when added, `new` when removed."""

    path: str
    what: What
    old: Any
    new: Any


@dataclass(frozen=True)
class Example:
    """A row that was added (`new`: all of it), removed (`old`) or changed (both: what is not the same)."""

    what: What
    key: list[Any]
    old: dict[str, Any] | None
    new: dict[str, Any] | None


@dataclass(frozen=True)
class TableDiff:
    """What one table differs in.

    Attributes:
        a, b: rows of either.
        added, removed, changed: rows by key; `changed` in the columns that both have with one type.
        reordered: the very same rows, in another order.
        columns: added, removed, or of another type (`old`, `new`).
        changed_columns: column -> changed rows that differ in it.
        examples: a few rows, the first of each sort.
    """

    table: str
    a: int
    b: int
    added: int
    removed: int
    changed: int
    reordered: bool
    columns: list[Change]
    changed_columns: dict[str, int]
    examples: list[Example]


@dataclass(frozen=True)
class GradeMoves:
    """Grades of the (query, passage) pairs that both releases have.

    Attributes:
        grades: ascending.
        matrix: pairs by grade in A (rows) and in B (columns).
        pairs: all of them.
        moved: those whose grade is another.
    """

    grades: list[int]
    matrix: list[list[int]]
    pairs: int
    moved: int


@dataclass(frozen=True)
class Figure:
    """A quality figure of both; `difference` is b - a of numbers, else None. What is not there is None."""

    name: str
    a: Any
    b: Any
    difference: float | None


@dataclass(frozen=True)
class StageDiff:
    """The accounting of one stage; None where a release has no such stage."""

    stage: str
    a: StageAccount | None
    b: StageAccount | None


@dataclass(frozen=True)
class ReleaseDiff:
    """From release A to release B.

    Attributes:
        tables: all that either has, in the order of their names.
        grade_moves: None when there is no table of grades.
        config, prompts, models, steps: what is not the same. Of the configuration, a release's name,
            version and parent are left out.
        quality, accounting: side by side, equal or not.
        documents: other files of the content that say something else (but for name, version, recipe).
    """

    a: Side
    b: Side
    kind: str
    tables: list[TableDiff]
    grade_moves: GradeMoves | None
    config: list[Change]
    prompts: list[Change]
    models: list[Change]
    steps: list[Change]
    quality: list[Figure]
    accounting: list[StageDiff]
    documents: list[str]


def diff(a: Path, b: Path) -> ReleaseDiff:
    """Compare two release folders, A the earlier one.

    Raises:
        InputError: one is no release or was changed since it was released, or they are of different
            kinds; or there is no room for the index.
    """
    for folder in (a, b):
        require_untouched(folder)
    one, other = read_manifest(a), read_manifest(b)
    old, new = one.content, other.content
    if old.kind != new.kind:
        raise InputError(
            f"of kind '{new.kind}', and {a} of kind '{old.kind}'; only releases of one kind compare", file=b
        )
    tables, moves = _tables(a, b, old, new)
    return ReleaseDiff(
        a=_side(a, one),
        b=_side(b, other),
        kind=old.kind,
        tables=tables,
        grade_moves=moves,
        config=changes(_config(old), _config(new)),
        prompts=changes(old.prompts, new.prompts),
        models=changes(_models(old), _models(new)),
        steps=changes(old.steps, new.steps),
        quality=_figures(old.quality, new.quality),
        accounting=_accounting(old, new),
        documents=_documents(a, b, old, new),
    )


def _side(folder: Path, manifest: Manifest) -> Side:
    return Side(manifest.content.name, manifest.content.version, manifest.digest, str(folder))


# --- tables ---------------------------------------------------------------------------------


def _tables(a: Path, b: Path, old: Content, new: Content) -> tuple[list[TableDiff], GradeMoves | None]:
    before, after = table_rows(old), table_rows(new)
    moves = None
    found = []
    for table in sorted(before.keys() | after.keys()):
        with index_on_disk() as index:
            compared = _Compared(table, a, b, index)
            found.append(compared.diff(before.get(table, 0), after.get(table, 0)))
            if table == GRADES[0] and GRADES[1] in compared.columns:
                moves = _grade_moves(index)
    return found, moves


_INDEX = """
CREATE TABLE {side} (key TEXT, nth INTEGER, digests TEXT, grade INTEGER, place INTEGER,
                     PRIMARY KEY (key, nth)) WITHOUT ROWID;
"""
_INSERT = """
INSERT INTO {side} VALUES (:key, (SELECT COALESCE(MAX(nth) + 1, 0) FROM {side} WHERE key = :key),
                           :digests, :grade, :place)
"""
_BOTH = "FROM a JOIN b USING (key, nth)"
_ONLY = (
    "FROM {side} WHERE NOT EXISTS (SELECT 1 FROM {other} o WHERE o.key = {side}.key AND o.nth = {side}.nth)"
)
_CHANGED = f"{_BOTH} WHERE a.digests != b.digests"
_GRADES = f"SELECT a.grade, b.grade, COUNT(*) {_BOTH} GROUP BY 1, 2"
_DIGEST = 16  # characters of one column's digest


class _Compared:
    """One table of both releases in an index: a digest a column, so that it is known which ones changed.

    Rows of one key (rejects may have them) are told apart by their order.
    """

    def __init__(self, table: str, a: Path, b: Path, index: sqlite3.Connection) -> None:
        self.table, self.folders, self.index = table, {"a": a, "b": b}, index
        schemas = _schema(a, table), _schema(b, table)
        self.column_changes = _column_changes(*schemas)
        not_comparable = {change.path for change in self.column_changes}
        self.columns = [name for name in schemas[0].names if name not in not_comparable]
        key = KEYS.get(table, ())
        self.key = key if set(key) <= set(self.columns) else ()
        for side, folder in self.folders.items():
            index.execute(_INDEX.format(side=side))
            if self.columns:
                index.executemany(_INSERT.format(side=side), self._indexed(folder))

    def _indexed(self, folder: Path) -> Iterator[dict[str, Any]]:
        for number, (_, row) in enumerate(read_rows(folder, self.table, self.columns)):
            digests = "".join(digest(orjson.dumps(row[name], default=str)) for name in self.columns)
            yield {
                "key": orjson.dumps([row[name] for name in self.key], default=str) if self.key else digests,
                "digests": digests,
                "grade": row.get(GRADES[1]) if self.table == GRADES[0] else None,
                "place": number,
            }

    def diff(self, rows_a: int, rows_b: int) -> TableDiff:
        """Count and show; a table without comparable columns is another table."""
        added, removed = (self._count(_only(side)) for side in "ba") if self.columns else (rows_b, rows_a)
        changed, changed_columns = self._changed()
        same_rows = not (added or removed or changed)
        return TableDiff(
            table=self.table,
            a=rows_a,
            b=rows_b,
            added=added,
            removed=removed,
            changed=changed,
            reordered=same_rows and self._count(f"{_BOTH} WHERE a.place != b.place") > 0,
            columns=self.column_changes,
            changed_columns=changed_columns,
            examples=[*self._examples("added"), *self._examples("removed"), *self._examples("changed")],
        )

    def _count(self, what: str) -> int:
        return int(self.index.execute(f"SELECT COUNT(*) {what}").fetchone()[0])

    def _changed(self) -> tuple[int, dict[str, int]]:
        rows, columns = 0, Counter[str]()
        for one, other in self.index.execute(f"SELECT a.digests, b.digests {_CHANGED}"):
            rows += 1
            columns.update(
                name
                for i, name in enumerate(self.columns)
                if one[i * _DIGEST : (i + 1) * _DIGEST] != other[i * _DIGEST : (i + 1) * _DIGEST]
            )
        return rows, {name: columns[name] for name in self.columns if name in columns}

    def _examples(self, what: What) -> Iterator[Example]:
        first = {
            "added": f"SELECT NULL, place {_only('b')}",
            "removed": f"SELECT place, NULL {_only('a')}",
            "changed": f"SELECT a.place, b.place {_CHANGED}",
        }[what]
        chosen = self.index.execute(f"{first} ORDER BY {1 if what == 'removed' else 2} LIMIT {EXAMPLES}")
        for place_a, place_b in chosen.fetchall():
            old, new = self._row("a", place_a), self._row("b", place_b)
            key = [(new or old or {})[name] for name in self.key]
            if old is not None and new is not None:
                unlike = [name for name in self.columns if old[name] != new[name]]
                old, new = {name: old[name] for name in unlike}, {name: new[name] for name in unlike}
            yield Example(what, key, old, new)

    def _row(self, side: str, number: int | None) -> dict[str, Any] | None:
        return None if number is None else row_at(locate(self.folders[side], self.table, number))


def _only(side: str) -> str:
    return _ONLY.format(side=side, other="a" if side == "b" else "b")


def _schema(folder: Path, table: str) -> pa.Schema:
    """The columns of a table; none when there is no such table."""
    files = table_files(folder, table)
    if not files:
        return pa.schema([])
    try:
        return pq.read_schema(files[0]).remove_metadata()
    except (pa.ArrowException, OSError) as error:
        raise InputError(f"cannot be read as Parquet ({error})", file=files[0]) from error


def _column_changes(old: pa.Schema, new: pa.Schema) -> list[Change]:
    def told(schema: pa.Schema) -> dict[str, str]:
        return {f.name: f"{f.type}{'' if f.nullable else ' not null'}" for f in schema}

    return _named_changes(told(old), told(new))


def _grade_moves(index: sqlite3.Connection) -> GradeMoves:
    counts = {(old, new): n for old, new, n in index.execute(_GRADES)}
    grades = sorted({grade for pair in counts for grade in pair})
    return GradeMoves(
        grades=grades,
        matrix=[[counts.get((old, new), 0) for new in grades] for old in grades],
        pairs=sum(counts.values()),
        moved=sum(n for (old, new), n in counts.items() if old != new),
    )


# --- manifests ------------------------------------------------------------------------------


def changes(old: Any, new: Any) -> list[Change]:
    """What is not the same in two nested values, by dotted path (`filters.1.max_words`), in order."""
    return _named_changes(dict(_leaves(old)), dict(_leaves(new)))


def _named_changes(old: dict[str, Any], new: dict[str, Any]) -> list[Change]:
    found = []
    for path in [*old, *(path for path in new if path not in old)]:
        if path not in new:
            found.append(Change(path, "removed", old[path], None))
        elif path not in old:
            found.append(Change(path, "added", None, new[path]))
        elif old[path] != new[path]:
            found.append(Change(path, "changed", old[path], new[path]))
    return found


def _leaves(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """The plain values of a nested one, each with its dotted path; what is empty is a value."""
    inside: dict[Any, Any] = {}
    if isinstance(value, dict):
        inside = value
    elif isinstance(value, list):
        inside = dict(enumerate(value))
    if not inside:
        yield path, value
    for name, part in inside.items():
        yield from _leaves(part, f"{path}.{name}" if path else str(name))


def _config(content: Content) -> dict[str, Any]:
    """The configuration without what names the release."""
    release = content.config.get("release")
    if not isinstance(release, dict):
        return content.config
    rest = {name: value for name, value in release.items() if name not in ("name", "version", "parent")}
    return {**content.config, "release": rest}


def _models(content: Content) -> dict[str, Any]:
    return {model.role: model.model_dump(exclude={"role"}) for model in content.models}


def _figures(old: dict[str, Any], new: dict[str, Any]) -> list[Figure]:
    """Every figure of either; a matrix is one figure."""
    a, b = dict(_scalars(old)), dict(_scalars(new))
    names = [*a, *(name for name in b if name not in a)]
    return [Figure(name, a.get(name), b.get(name), _difference(a.get(name), b.get(name))) for name in names]


def _scalars(value: dict[str, Any], path: str = "") -> Iterator[tuple[str, Any]]:
    for name, part in value.items():
        inner = f"{path}.{name}" if path else name
        if isinstance(part, dict) and part:
            yield from _scalars(part, inner)
        else:
            yield inner, part


def _difference(a: Any, b: Any) -> float | None:
    numbers = all(isinstance(value, int | float) and not isinstance(value, bool) for value in (a, b))
    return round(b - a, 6) if numbers else None


def _accounting(old: Content, new: Content) -> list[StageDiff]:
    a, b = ({account.stage: account for account in content.accounting} for content in (old, new))
    return [StageDiff(stage, a.get(stage), b.get(stage)) for stage in dict.fromkeys([*a, *b])]


def _documents(a: Path, b: Path, old: Content, new: Content) -> list[str]:
    """The files that are no tables and do not say the same."""
    said = _said(a, old), _said(b, new)
    return sorted(path for path in said[0].keys() | said[1].keys() if said[0].get(path) != said[1].get(path))


def _said(folder: Path, content: Content) -> dict[str, bytes]:
    """Path -> bytes of each document, the words that no two versions have in common left out."""
    found = {}
    for file in content.files:
        if file.rows is None:
            found[file.path] = (folder / file.path).read_bytes()
            for word in (content.recipe, content.version, content.parent, content.name):
                found[file.path] = found[file.path].replace((word or "\0").encode(), b"")
    return found
