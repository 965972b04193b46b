"""The Parquet tables of a graded release: their Arrow schemas, how they are written and read back."""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from gradeloom.schemas.errors import InputError

FILE_ROWS = 200_000
ROW_GROUP_ROWS = 2_000  # writer and readers hold a few whole row groups, and a list is kilobytes

WRITER_OPTIONS: dict[str, Any] = {
    "compression": "zstd",
    "compression_level": 3,
    "version": "2.6",
    "data_page_version": "1.0",
    "data_page_size": 1 << 20,
    "use_dictionary": True,
    "write_statistics": True,
    "store_schema": True,
}
"""Pinned, so that the same rows give the same bytes whatever a library's next default is."""


def _list(of: pa.DataType, *, nullable: bool = False) -> pa.DataType:
    return pa.list_(pa.field("element", of, nullable=nullable))


def _required(name: str, kind: pa.DataType) -> pa.Field[Any]:
    return pa.field(name, kind, nullable=False)


_QUERY = [_required("query_id", pa.string()), _required("query", pa.string())]
_PASSAGES = [
    _required("passages", _list(pa.string())),
    _required("passage_ids", _list(pa.string())),
    _required("intended", _list(pa.int64())),
    _required("judged", _list(pa.int64(), nullable=True)),
    _required("expected", _list(pa.float64(), nullable=True)),
    _required("entropy", _list(pa.float64(), nullable=True)),
    _required("mass", _list(pa.float64(), nullable=True)),
    _required("abstained", _list(pa.bool_())),
]
_ATTRIBUTES = [pa.field(name, pa.string()) for name in ("length", "audience", "style")]

TABLES: dict[str, pa.Schema] = {
    "lists": pa.schema([*_QUERY, *_PASSAGES, _required("grade", _list(pa.float64())), *_ATTRIBUTES]),
    "queries": pa.schema([_required("_id", pa.string()), _required("text", pa.string())]),
    "corpus": pa.schema([_required(name, pa.string()) for name in ("_id", "title", "text")]),
    "qrels": pa.schema(
        [
            _required("query-id", pa.string()),
            _required("corpus-id", pa.string()),
            _required("score", pa.int64()),
        ]
    ),
    "rejects": pa.schema(
        [
            *_QUERY,
            *_PASSAGES,
            *_ATTRIBUTES,
            _required("stage", pa.string()),
            _required("status", pa.string()),
            _required("reason", pa.string()),
            pa.field("detail", pa.string()),
            pa.field("at_grade", pa.int64()),
        ]
    ),
}
"""Configuration name -> schema, the default configuration first."""


class TableWriter:
    """Writes the rows of one table to `<folder>/train-NNNNN.parquet`, holding at most one row group.

    A table without rows is one file without rows, so that its schema stands in every release.
    """

    def __init__(self, folder: Path, schema: pa.Schema) -> None:
        self.rows = 0
        self._folder = folder
        self._schema = schema
        self._group: list[dict[str, Any]] = []
        self._files = 0
        self._file_rows = 0
        self._writer: pq.ParquetWriter | None = None
        folder.mkdir()

    def add(self, row: dict[str, Any]) -> None:
        self.rows += 1
        self._group.append(row)
        if len(self._group) == ROW_GROUP_ROWS:
            self._flush()

    def close(self) -> None:
        """Write what is left and make all of it last."""
        if self._group or not self._files:
            self._flush()
        self._end_file()

    def abort(self) -> None:
        """Let go of a file that was not finished; nothing to do after `close`."""
        if self._writer is not None:
            with suppress(OSError):
                self._writer.close()

    def _flush(self) -> None:
        if self._writer is None:
            self._path = self._folder / f"train-{self._files:05d}.parquet"
            self._writer = pq.ParquetWriter(self._path, self._schema, **WRITER_OPTIONS)
            self._files += 1
        if self._group:
            self._writer.write_table(pa.Table.from_pylist(self._group, schema=self._schema))
        self._file_rows += len(self._group)
        self._group = []
        if self._file_rows >= FILE_ROWS:
            self._end_file()

    def _end_file(self) -> None:
        if self._writer is None:
            return
        self._writer.close()
        self._writer, self._file_rows = None, 0
        sync_file(self._path)


def sync_file(path: Path) -> None:
    with path.open("rb") as f:
        os.fsync(f.fileno())


def table_files(folder: Path, table: str) -> list[Path]:
    """The Parquet files of one table, in row order."""
    return sorted((folder / table).glob("train-*.parquet"))


@dataclass(frozen=True)
class Place:
    """Where a row stands: a file of the release and the 1-based row in it."""

    file: Path
    row: int


def read_rows(
    folder: Path, table: str, columns: Sequence[str] | None = None
) -> Iterator[tuple[Place, dict[str, Any]]]:
    """The rows of one table in order, a row group at a time in memory.

    Raises:
        InputError: a file cannot be read as Parquet, or lacks a column.
    """
    for path in table_files(folder, table):
        number = 0
        try:
            with pq.ParquetFile(path) as file:
                # Group by group: over a whole file what was read is not given back until its end.
                for group in range(file.num_row_groups):
                    batches = file.iter_batches(
                        1000, row_groups=[group], columns=list(columns) if columns else None
                    )
                    for row in chain.from_iterable(batch.to_pylist() for batch in batches):
                        number += 1
                        yield Place(path, number), row
        except (pa.ArrowException, OSError) as error:
            raise InputError(f"cannot be read as Parquet ({error})", file=path) from error


def locate(folder: Path, table: str, number: int) -> Place:
    """The file and row of the `number`-th row (from 0) of a table."""
    for path in table_files(folder, table):
        rows = pq.read_metadata(path).num_rows
        if number < rows:
            return Place(path, number + 1)
        number -= rows
    raise AssertionError(f"{table} has no row {number}")


def row_at(place: Place) -> dict[str, Any]:
    """One row, whole; its row group is what is read.

    Raises:
        InputError: the file cannot be read as Parquet.
    """
    number = place.row - 1
    try:
        with pq.ParquetFile(place.file) as file:
            for group in range(file.num_row_groups):
                rows = file.metadata.row_group(group).num_rows
                if number < rows:
                    found: dict[str, Any] = file.read_row_group(group).slice(number, 1).to_pylist()[0]
                    return found
                number -= rows
    except (pa.ArrowException, OSError) as error:
        raise InputError(f"cannot be read as Parquet ({error})", file=place.file) from error
    raise AssertionError(f"{place.file} has no row {place.row}")


@contextmanager
def index_on_disk() -> Iterator[sqlite3.Connection]:
    """An empty index of rows that SQLite keeps in the temporary folder, not in memory, while it is open.

    Raises:
        InputError: it cannot be kept there.
    """
    try:
        with closing(sqlite3.connect("")) as index:
            index.executescript("PRAGMA journal_mode = OFF; PRAGMA cache_size = -16384;")
            yield index
    except sqlite3.OperationalError as error:
        raise InputError(f"cannot keep the index of its rows in the temporary folder: {error}") from error
