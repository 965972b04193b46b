"""Sources: queries out of files, folders and Hugging Face data sets, one `QueryRow` a source row.

What a query is (which field, what is empty, what is a duplicate) is decided here, once for all forms.
"""

from __future__ import annotations

import re
import sqlite3
import unicodedata
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any

from gradeloom.schemas.config import SourceConfig
from gradeloom.schemas.errors import InputError
from gradeloom.schemas.rows import QueryRow, digest
from gradeloom.tasks.source_forms import ID_FIELDS, TEXT_FIELDS, Fault, few, rows

_UNUSABLE = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f]")


def read_queries(config: SourceConfig, *, limit: int | None = None) -> Iterator[QueryRow]:
    """The rows of a source, in its order, with ordinals 0, 1, 2, …

    Empty lines are no rows. With `on_bad: reject` a bad row is a `QueryRow` with status `rejected`
    and reason `bad_encoding`, `bad_row`, `empty_query`, `duplicate_id` or `duplicate_query`; an
    earlier good row wins over a later duplicate. A query is compared after NFKC, case folding and
    collapsing white space; it is kept as written, without surrounding white space.

    Args:
        config: where the queries are.
        limit: read only the first `limit` rows, bad ones included.

    Raises:
        InputError: the source is missing, empty or of an unknown form; or, with `on_bad: error`, a
            row is bad: file, row and field are named.
    """
    place = str(config.path or config.dataset)
    ordinal = -1
    with _Seen() as seen:
        for ordinal, (number, found) in enumerate(islice(rows(config), limit)):
            query = found if isinstance(found, Fault) else _query(found, config)
            fault = query if isinstance(query, Fault) else seen.duplicate(query, number)
            if fault is None:
                assert isinstance(query, _Query)
                yield QueryRow(
                    id=digest(query.id, query.text), ordinal=ordinal, query_id=query.id, query=query.text
                )
            elif config.on_bad == "error":
                raise InputError(fault.detail, file=place, row=number, field=fault.field)
            else:
                yield _rejected(query, fault, number, ordinal)
    if ordinal < 0:
        raise InputError("holds no rows; at least one query was expected", file=place)


# --- from fields to queries -----------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Query:
    id: str
    text: str
    derived: bool  # the id is a digest of the text, the source gave none
    id_field: str | None
    text_field: str


def _query(values: dict[str, Any], config: SourceConfig) -> _Query | Fault:
    """Find id and text among a row's fields."""
    text_field = config.text_field or next((name for name in TEXT_FIELDS if name in values), None)
    if text_field is None:
        return Fault(
            "bad_row",
            f"no field holds the query; expected one of {', '.join(TEXT_FIELDS)}, or set source.text_field",
        )
    text = _text(values, text_field)
    if isinstance(text, Fault):
        return text
    if not any(ch.isprintable() and not ch.isspace() for ch in text):
        return Fault("empty_query", "the query is empty", text_field)

    id_field = config.id_field or next((name for name in ID_FIELDS if values.get(name) is not None), None)
    if id_field is None:
        return _Query(digest(_normalised(text)), text, True, None, text_field)
    value = values.get(id_field)
    if isinstance(value, int) and not isinstance(value, bool):
        values = {id_field: str(value)}
    query_id = _text(values, id_field, expected="text or a whole number")
    if isinstance(query_id, Fault):
        return query_id
    if not query_id:
        return Fault("bad_row", "the id is empty", id_field)
    if re.search(r"[\t\n\r]", query_id):
        return Fault("bad_row", "the id holds a tab or line end, which qrels files cannot", id_field)
    return _Query(query_id, text, False, id_field, text_field)


def _text(values: dict[str, Any], field: str, expected: str = "text") -> str | Fault:
    """The field's text without surrounding white space."""
    if field not in values:
        return Fault("bad_row", f"the field is missing; the row has {few(values)}", field)
    value = values[field]
    if not isinstance(value, str):
        kind = "null" if value is None else type(value).__name__
        return Fault("bad_row", f"{expected} was expected, found {kind}", field)
    unusable = _UNUSABLE.search(value)
    if unusable:
        return Fault("bad_row", f"holds the control character U+{ord(unusable[0]):04X}", field)
    try:
        value.encode()
    except UnicodeEncodeError:
        return Fault("bad_encoding", "holds an unpaired surrogate; UTF-8 text was expected", field)
    return value.strip()


def _normalised(text: str) -> str:
    return " ".join(unicodedata.normalize("NFKC", text).casefold().split())


def _rejected(query: _Query | Fault, fault: Fault, number: int, ordinal: int) -> QueryRow:
    field = f", field '{fault.field}'" if fault.field is not None else ""
    query_id, text = (query.id, query.text) if isinstance(query, _Query) else ("", "")
    return QueryRow(
        id=digest("rejected", str(number), fault.reason),
        ordinal=ordinal,
        status="rejected",
        reason=fault.reason,
        detail=f"row {number}{field}: {fault.detail}",
        query_id=query_id,
        query=text,
    )


class _Seen:
    """Ids and normalised texts of the good rows so far: digests in a temporary SQLite file.

    SQLite holds at most 16 MiB of it in memory and removes the file when it is closed.
    """

    def __enter__(self) -> _Seen:
        self._db = sqlite3.connect("", isolation_level=None, check_same_thread=False)
        self._db.executescript(
            "PRAGMA journal_mode = OFF; PRAGMA synchronous = OFF; PRAGMA cache_size = -16384;"
            "CREATE TABLE seen (key BLOB PRIMARY KEY, number INTEGER) WITHOUT ROWID; BEGIN"
        )
        return self

    def __exit__(self, *_: object) -> None:
        self._db.close()

    def duplicate(self, query: _Query, number: int) -> Fault | None:
        """The fault of a query whose id or text stood in an earlier good row; else remember it."""
        id_key, text_key = _key("id", query.id), _key("text", _normalised(query.text))
        try:
            id_row, text_row = self._row(id_key), self._row(text_key)
            if id_row is None and text_row is None:
                self._db.executemany("INSERT INTO seen VALUES (?, ?)", [(id_key, number), (text_key, number)])
                return None
        except sqlite3.OperationalError as error:
            raise InputError(
                f"cannot keep the index of duplicates in the temporary folder: {error}"
            ) from error
        # An id made from the text repeats because the text does: say so.
        if id_row is not None and not (query.derived and text_row is not None):
            return Fault(
                "duplicate_id", f"the id {query.id[:80]!r} stands in row {id_row} too", query.id_field
            )
        return Fault("duplicate_query", f"the query stands in row {text_row} too", query.text_field)

    def _row(self, key: bytes) -> int | None:
        row = self._db.execute("SELECT number FROM seen WHERE key = ?", (key,)).fetchone()
        return None if row is None else int(row[0])


def _key(kind: str, text: str) -> bytes:
    return bytes.fromhex(digest(kind, text, length=32))
