"""The forms a source may have: which one a path has, and a reader for each.

A reader knows one form and yields what it finds, row by row: the fields of a row, or the `Fault`
that made it unreadable. Nothing here holds more than one row in memory.
"""

from __future__ import annotations

import csv
import gzip
import hashlib
import re
import zlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, NoReturn, cast

import orjson
import pyarrow as pa
import pyarrow.parquet as pq

from gradeloom.schemas.config import SourceConfig
from gradeloom.schemas.errors import InputError
from gradeloom.schemas.rows import digest

ID_FIELDS = ("_id", "query_id", "qid", "id")
TEXT_FIELDS = ("text", "query", "title", "question")

_FORMATS = {
    ".jsonl": "jsonl", ".ndjson": "jsonl", ".tsv": "tsv", ".csv": "csv", ".parquet": "parquet",
    ".txt": "text", ".topics": "text",
}  # fmt: skip
_EXPECTED = (
    "a .jsonl, .tsv, .csv, .parquet, .txt or .topics file (all but .parquet also as .gz) or a BEIR folder"
)
_BOM = b"\xef\xbb\xbf"
_LARGEST_CSV_FIELD = 1 << 26  # an unclosed quote must not swallow the rest of a large file into memory


@dataclass(frozen=True, slots=True)
class Fault:
    """Why a row is no query: the reject's reason, what is wrong and was expected, and the field."""

    reason: str
    detail: str
    field: str | None = None


Found = tuple[int, dict[str, Any] | Fault]
"""1-based row (the line on which it begins) and its fields, or why there are none."""


# --- which form, and where ------------------------------------------------------------------


def rows(config: SourceConfig) -> Iterator[Found]:
    """Every row of a source, in its order.

    Raises:
        InputError: the source is missing or of an unknown form.
    """
    if config.dataset is not None:
        return _huggingface_rows(config)
    path, form = _locate(config)
    if form == "parquet":
        return _parquet_rows(path, config)
    if form == "trec":
        return _trec_rows(path)
    if form in ("tsv", "csv"):
        return _delimited_rows(path, form, config)
    return _jsonl_rows(path)


def _locate(config: SourceConfig) -> tuple[Path, str]:
    """The file to read and its form: `jsonl`, `tsv`, `csv`, `parquet` or `trec`."""
    assert config.path is not None
    path = Path(config.path)
    if config.format == "huggingface":
        raise InputError("give a Hugging Face name as source.dataset, not as source.path", file=path)
    if not path.exists():
        raise InputError(f"does not exist; expected {_EXPECTED}", file=path)
    if path.is_dir():
        return _queries_of_folder(path, config.format), "jsonl"
    if config.format == "beir":
        raise InputError("is a file; a BEIR folder with queries.jsonl was expected", file=path)
    if config.format != "auto":
        return path, config.format
    form = _form_by_name(path)
    return path, _sniff(path) if form == "text" else form


def _queries_of_folder(folder: Path, form: str) -> Path:
    if form not in ("auto", "beir"):
        raise InputError(f"is a folder; format {form} expects a file", file=folder)
    for name in ("queries.jsonl", "queries.jsonl.gz"):
        if (folder / name).is_file():
            return folder / name
    raise InputError("no queries.jsonl in this folder; a BEIR folder was expected", file=folder)


def _form_by_name(path: Path) -> str:
    suffixes = [suffix.lower() for suffix in path.suffixes]
    if suffixes[-1:] == [".gz"]:
        suffixes.pop()
        if suffixes[-1:] == [".parquet"]:
            raise InputError("Parquet is compressed inside; a .parquet file was expected", file=path)
    form = _FORMATS.get(suffixes[-1]) if suffixes else None
    if form is None:
        raise InputError(f"unknown form; expected {_EXPECTED}, or set source.format", file=path)
    return form


def _sniff(path: Path) -> str:
    """TREC topics, or lines: one query a line is a table of one column."""
    for _, line in lines(path):
        return "trec" if line.lstrip().lower().startswith((b"<top", b"<?xml")) else "tsv"
    return "tsv"


def source_digest(config: SourceConfig) -> str:
    """What a source held when it was read: 32 hex digits over the form and the bytes.

    For a Hugging Face data set: over its name, configuration, split and files; a hub file is named
    with its commit, a local one is read.

    Raises:
        InputError: as for `read_queries`, but rows are not looked at.
    """
    if config.dataset is not None:
        return _huggingface_digest(config)
    path, form = _locate(config)
    return digest(form, sha256(path), length=32)


# --- readers --------------------------------------------------------------------------------


@contextmanager
def _opened(path: Path) -> Iterator[BinaryIO]:
    """The file's bytes, unpacked if its name ends in .gz."""
    try:
        if path.suffix.lower() == ".gz":
            with gzip.open(path, "rb") as file:
                yield cast(BinaryIO, file)
        else:
            with path.open("rb") as file:
                yield file
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise InputError(f"damaged or no gzip file ({error})", file=path) from error
    except OSError as error:
        raise InputError(f"cannot be read: {error.strerror or error}", file=path) from error


def lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """Lines that are not empty, with their 1-based numbers, without byte order mark and line end."""
    with _opened(path) as file:
        for number, line in enumerate(file, 1):
            content = _unmarked(number, line).rstrip(b"\r\n")
            if content.strip(b" "):
                yield number, content


def _unmarked(number: int, line: bytes) -> bytes:
    """The line without the byte order mark that a file may begin with."""
    return line.removeprefix(_BOM) if number == 1 else line


def _not_utf8(error: UnicodeDecodeError) -> Fault:
    byte = error.object[error.start]
    return Fault("bad_encoding", f"byte 0x{byte:02x} at position {error.start + 1} is not UTF-8")


def _jsonl_rows(path: Path) -> Iterator[Found]:
    for number, line in lines(path):
        try:
            line.decode()
            value = orjson.loads(line)
        except UnicodeDecodeError as error:
            yield number, _not_utf8(error)
        except orjson.JSONDecodeError as error:
            yield number, Fault("bad_row", f"is not JSON ({error})")
        else:
            found = value if isinstance(value, dict) else None
            yield number, found or Fault("bad_row", "a JSON object with fields was expected")


def _delimited_rows(path: Path, form: str, config: SourceConfig) -> Iterator[Found]:
    """TSV (no quoting, as MS MARCO's and TREC's files are) or CSV (RFC 4180)."""
    names: list[str] | None = None
    for number, cells in _csv_cells(path) if form == "csv" else _tsv_cells(path):
        if names is None:
            if isinstance(cells, Fault):
                raise InputError(f"{cells.detail}; the first row tells the columns", file=path, row=number)
            names, is_header = _columns(cells, config, path, number)
            if is_header:
                continue
        if isinstance(cells, Fault):
            yield number, cells
        elif len(cells) != len(names):
            yield number, Fault("bad_row", f"{_count(len(names))} expected, found {len(cells)}")
        else:
            yield number, dict(zip(names, cells, strict=True))


def _count(columns: int) -> str:
    return "1 column was" if columns == 1 else f"{columns} columns were"


def _tsv_cells(path: Path) -> Iterator[tuple[int, list[str] | Fault]]:
    for number, line in lines(path):
        try:
            yield number, line.decode().split("\t")
        except UnicodeDecodeError as error:
            yield number, _not_utf8(error)


def _csv_cells(path: Path) -> Iterator[tuple[int, list[str] | Fault]]:
    # Bytes that are not UTF-8 travel through the parser as lone surrogates, so that the row they
    # stand in can be named, quoted line ends included.
    csv.field_size_limit(_LARGEST_CSV_FIELD)
    with _opened(path) as file:
        text = (_unmarked(n, line).decode(errors="surrogateescape") for n, line in enumerate(file, 1))
        reader = csv.reader(text, strict=True)
        while True:
            number = reader.line_num + 1
            try:
                cells = next(reader)
            except StopIteration:
                return
            except csv.Error as error:
                yield number, Fault("bad_row", f"is not CSV ({error})")
                continue
            if any(cell.strip() for cell in cells) or len(cells) > 1:
                yield number, _decoded(cells)


def _decoded(cells: list[str]) -> list[str] | Fault:
    try:
        for cell in cells:
            cell.encode(errors="surrogateescape").decode()
    except UnicodeDecodeError as error:
        return _not_utf8(error)
    return cells


def few(names: Iterable[str]) -> str:
    """The first names of many, for a message."""
    names = list(names)
    return ", ".join(repr(name)[:40] for name in names[:8]) + (", …" if len(names) > 8 else "") or "no fields"


def _columns(first: list[str], config: SourceConfig, path: Path, number: int) -> tuple[list[str], bool]:
    """The columns' names, and whether the first row is a header.

    Column numbers as field names mean that there is none. Without any field set, a first row with a
    known name in it is a header; otherwise the columns are id and text, or text alone.

    Raises:
        InputError: a field is set that the header lacks, or which column holds the text is unclear.
    """

    def unclear(message: str, field: str | None = None) -> NoReturn:
        raise InputError(f"{message}; the columns are {few(first)}", file=path, row=number, field=field)

    wanted = [name for name in (config.id_field, config.text_field) if name is not None]
    header = [cell.strip() for cell in first]
    numbers = [str(column) for column in range(len(first))]
    if any(name.isdecimal() for name in wanted) and not set(wanted) <= set(header):
        if config.text_field is None:
            unclear("the id column has a number, so source.text_field needs one too")
        for name in wanted:
            if name not in numbers:
                unclear(f"a column number from 0 to {len(first) - 1} was expected", name)
        return numbers, False
    for name in wanted:
        if name not in header:
            unclear("the header has no such column", name)
    has_text = any(name in TEXT_FIELDS for name in header)
    has_id = any(name in ID_FIELDS for name in header)
    if config.text_field is not None or (has_text and not any(cell.isdecimal() for cell in header)):
        return header, True
    if has_id or config.id_field is not None:
        unclear("which column holds the query? set source.text_field")
    if len(first) == 1:
        apart = {name.strip() for name in re.split(r"[;,|\t]", header[0])}
        if len(apart) > 1 and not apart.isdisjoint({*ID_FIELDS, *TEXT_FIELDS}):
            separator = "commas" if ".csv" in path.suffixes else "tabs"
            unclear(
                f"one column was found, and its name looks like several; expected {separator} between them"
            )
        return ["text"], False
    if len(first) > 2 or any(ch.isspace() for ch in header[0]):
        unclear(
            "id and text were expected as the only columns; "
            "set source.text_field (and source.id_field) to a column number, the first is 0"
        )
    return ["_id", "text"], False


_TREC_TAG = re.compile(r"<(/?)([a-zA-Z]+)[^>]*>")
_TREC_LABEL = re.compile(r"\s*(number|topic|description|narrative)\s*:", re.IGNORECASE)


def _trec_rows(path: Path) -> Iterator[Found]:
    """`<top>` blocks with `<num>` and `<title>`; end tags inside a block may be missing, as in TREC's."""
    begin, block = 0, b""
    for number, line in lines(path):
        tag = line.strip().lower()
        if tag.startswith(b"<top>"):
            if begin:
                yield begin, Fault("bad_row", "the topic has no </top>")
            begin, block, line = number, b"", line.strip()[len(b"<top>") :]
        if not begin:
            continue
        block += line + b"\n"
        if tag.endswith(b"</top>"):
            yield begin, _topic(block.rstrip()[: -len(b"</top>")])
            begin = 0
    if begin:
        yield begin, Fault("bad_row", "the topic has no </top>")


def _topic(block: bytes) -> dict[str, Any] | Fault:
    try:
        text = block.decode()
    except UnicodeDecodeError as error:
        return _not_utf8(error)
    fields: dict[str, Any] = {}
    tags = list(_TREC_TAG.finditer(text))
    for tag, following in zip(tags, [*tags[1:], None], strict=True):
        if not tag[1]:
            value = text[tag.end() : following.start() if following else len(text)]
            fields[tag[2].lower()] = " ".join(_TREC_LABEL.sub("", value, count=1).split())
    if not fields.get("num"):
        return Fault("bad_row", "the topic has no number", "num")
    return {"_id": fields["num"], **fields}


def _parquet_rows(path: Path, config: SourceConfig) -> Iterator[Found]:
    try:
        with pq.ParquetFile(path) as file:
            there = file.schema_arrow.names
            wanted = {*ID_FIELDS, *TEXT_FIELDS, config.id_field, config.text_field}
            columns = [name for name in there if name in wanted]
            if len(set(columns)) < len(columns):
                raise InputError(f"a column stands there twice; the columns are {few(there)}", file=path)
            if not columns:
                raise InputError(f"no column holds the query; the columns are {few(there)}", file=path)
            number = 0
            # Group by group: over a whole file what was read is not given back until its end.
            for group in range(file.num_row_groups):
                for batch in file.iter_batches(1024, row_groups=[group], columns=columns):
                    for i in range(batch.num_rows):
                        number += 1
                        yield number, _record(batch, i)
    except (pa.ArrowException, OSError) as error:
        raise InputError(f"cannot be read as Parquet ({error})", file=path) from error


def _record(batch: pa.RecordBatch, i: int) -> dict[str, Any] | Fault:
    try:
        return {name: batch.column(name)[i].as_py() for name in batch.schema.names}
    except UnicodeDecodeError as error:
        return _not_utf8(error)


def sha256(path: Path) -> str:
    """The SHA-256 of a file's bytes, 64 hex digits.

    Raises:
        InputError: the file cannot be read.
    """
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise InputError(f"cannot be read: {error.strerror or error}", file=path) from error


# --- Hugging Face ---------------------------------------------------------------------------


@contextmanager
def _hub(config: SourceConfig) -> Iterator[None]:
    """Errors of `datasets` as one line; it raises its own, OSError and ValueError for wrong names."""
    from datasets.exceptions import DatasetsError

    try:
        yield
    except (DatasetsError, pa.ArrowException, OSError, ValueError) as error:
        why = " ".join(str(error).split())
        raise InputError(f"cannot be read as a Hugging Face data set ({why})", file=config.dataset) from error


def _huggingface_rows(config: SourceConfig) -> Iterator[Found]:
    import datasets

    with _hub(config):
        rows = datasets.load_dataset(
            config.dataset, config.config, split=config.split, revision=config.revision, streaming=True
        )
        for number, row in enumerate(rows, 1):
            yield number, dict(row)


def _huggingface_digest(config: SourceConfig) -> str:
    import datasets

    with _hub(config):
        builder = datasets.load_dataset_builder(config.dataset, config.config, revision=config.revision)
        files = (builder.config.data_files or {}).get(config.split)
    if files is None:
        raise InputError(f"has no split {config.split}", file=config.dataset, field="source.split")
    local = [sha256(Path(name)) if Path(name).is_file() else name for name in map(str, files)]
    return digest("huggingface", str(config.dataset), str(config.config), config.split, *local, length=32)
