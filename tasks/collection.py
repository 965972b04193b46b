"""Collections: queries, passages and graded judgements, out of a release, a BEIR folder or three files."""

from __future__ import annotations

import csv
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from gradeloom.schemas.config import SourceConfig
from gradeloom.schemas.errors import InputError
from gradeloom.schemas.retriever import CollectionConfig
from gradeloom.tasks.source_forms import ID_FIELDS, Fault, few, lines, rows, sha256

Qrels = dict[str, dict[str, float]]
"""Query id -> passage id -> grade."""

Run = dict[str, dict[str, float]]
"""Query id -> passage id -> score."""

LABELS = ("intended", "judged", "expected")
"""Grades that a release's lists hold beside the final one."""

_QRELS_COLUMNS = ("query-id", "corpus-id", "score")


@dataclass(frozen=True)
class Collection:
    """What is searched, for what, and what is known of the answers.

    Attributes:
        name: for people.
        queries: id -> text, in the order of the source; no text is empty.
        passages: id -> text, in the order of the source: title and text joined by one space, without
            white space around. A text may be empty (Cranfield has two).
        qrels: the judgements as they were given. They may name queries and passages that the
            collection does not hold; whoever looks up a text must expect that.
        identity: JSON values that say what this is: `release`, `version`, `digest` (of the manifest) for
            a release, and `files`, name -> SHA-256, for everything read from files.
        grades: for a release, its judgements by another label: `intended`, `judged`, `expected` (real
            numbers). What the judge abstained on or did not read is not in the last two. Otherwise {}.
    """

    name: str
    queries: dict[str, str]
    passages: Mapping[str, str]
    qrels: Qrels
    identity: dict[str, Any]
    grades: dict[str, Qrels]


def read_collection(
    config: CollectionConfig, *, releases: str | Path = "releases", name: str | None = None
) -> Collection:
    """Read a collection whole into memory.

    One id may stand twice in a file if its text is the same both times; it is then one. Ids may be whole
    numbers in JSONL and Parquet; they are read as text. Texts are taken as they are. Of several
    judgements of one pair the highest counts (`read_qrels`).

    Args:
        config: where it is.
        releases: folder or URL in which `config.release` is looked for when it is no path or URL.
        name: of the collection; default: of the release (`name@version`), folder or file.

    Raises:
        InputError: something is missing, empty, unreadable or not as it must be (file, row and field are
            named), or a release is not as it was cut.
    """
    if config.release is not None:
        return _release(config, releases, name)
    if config.path is not None:
        folder = Path(config.path)
        if not folder.is_dir():
            raise InputError("a BEIR folder was expected: corpus.jsonl, queries.jsonl, qrels/", file=folder)
        queries, corpus = (_in_folder(folder, f"{stem}.jsonl") for stem in ("queries", "corpus"))
        given = Path(config.qrels) if config.qrels is not None else _split(folder, config.split)
        name = name or folder.resolve().name
    else:
        assert config.queries is not None
        assert config.corpus is not None
        assert config.qrels is not None
        queries, corpus, given = Path(config.queries), Path(config.corpus), Path(config.qrels)
        name = name or queries.stem
    return Collection(
        name=name,
        queries=_texts(queries, titles=False),
        passages=_texts(corpus, titles=True),
        qrels=read_qrels(given),
        identity={"files": _identities(queries, corpus, given)},
        grades={},
    )


def read_qrels(path: str | Path) -> Qrels:
    """Graded judgements: TREC lines, a BEIR table or Parquet, all but Parquet also as .gz.

    - TREC: `query-id 0 passage-id grade`, parted by blanks or tabs; the second field is not looked at.
    - BEIR: tabs, and a first row that names the columns query-id, corpus-id and score.
    - Parquet: these columns; others are not read.

    Grades are finite numbers, negative ones included. Of several judgements of one pair the highest
    counts, whatever their order: MedQuAD's has 168 such pairs, and its known values are with this rule.

    Raises:
        InputError: the file cannot be read, holds no judgement, or a row is not as it must be.
    """
    path = Path(path)
    if not path.is_file():
        raise InputError("there is no such file; judgements were expected", file=path)
    qrels: Qrels = {}
    for query_id, passage_id, grade in _parquet(path) if path.suffix == ".parquet" else _lines(path):
        judged = qrels.setdefault(query_id, {})
        judged[passage_id] = max(grade, judged.get(passage_id, grade))
    if not qrels:
        raise InputError("holds no judgements", file=path)
    return qrels


# --- a release ------------------------------------------------------------------------------


def _release(config: CollectionConfig, releases: str | Path, name: str | None) -> Collection:
    # Releases are a kind of step of their own, and no other top-level module needs them.
    from gradeloom.tasks.release.catalog import find, read_manifest
    from gradeloom.tasks.release.tables import read_rows, table_files
    from gradeloom.tasks.release.verify import require_untouched

    assert config.release is not None
    folder = find(releases, config.release)
    manifest = read_manifest(folder)
    content = manifest.content
    if not all(table_files(folder, table) for table in ("lists", "queries", "corpus", "qrels")):
        raise InputError(f"a release of kind '{content.kind}' holds no graded lists", file=folder)
    require_untouched(folder)  # what is trained on it is said to come from this digest
    queries = {row["_id"]: row["text"] for _, row in read_rows(folder, "queries")}
    passages = {row["_id"]: f"{row['title']} {row['text']}".strip() for _, row in read_rows(folder, "corpus")}
    identity: dict[str, Any] = {
        "release": content.name, "version": content.version, "digest": manifest.digest,
    }  # fmt: skip
    qrels: Qrels = {}
    grades: dict[str, Qrels] = {}
    if config.qrels is not None:
        qrels = read_qrels(config.qrels)
        identity["files"] = _identities(Path(config.qrels))
    else:
        for _, row in read_rows(folder, "qrels"):
            qrels.setdefault(row["query-id"], {})[row["corpus-id"]] = float(row["score"])
        grades = {label: {} for label in LABELS}
        for _, row in read_rows(folder, "lists", ["query_id", "passage_ids", "abstained", *LABELS]):
            for label in LABELS:
                grades[label][row["query_id"]] = {
                    passage_id: float(grade)
                    for passage_id, grade, abstained in zip(
                        row["passage_ids"], row[label], row["abstained"], strict=True
                    )
                    if grade is not None and not (abstained and label != "intended")
                }
    return Collection(name or f"{content.name}@{content.version}", queries, passages, qrels, identity, grades)


# --- files ----------------------------------------------------------------------------------


def _in_folder(folder: Path, name: str) -> Path:
    for candidate in (folder / name, folder / f"{name}.gz"):
        if candidate.is_file():
            return candidate
    raise InputError(f"no {name} in this folder; a BEIR folder was expected", file=folder)


def _split(folder: Path, split: str) -> Path:
    place = folder / "qrels"
    for candidate in (place / f"{split}.tsv", place / f"{split}.tsv.gz"):
        if candidate.is_file():
            return candidate
    known = sorted(path.name.split(".tsv")[0] for path in place.glob("*.tsv*"))
    raise InputError(
        f"no split '{split}'; there are: {', '.join(known) or 'none'}", file=place, field="split"
    )


def _identities(*paths: Path) -> dict[str, str]:
    """File name -> SHA-256; files of one name are told apart by their folder."""
    names = [path.name for path in paths]
    found: dict[str, str] = {}
    for path in paths:
        name = path.name if names.count(path.name) == 1 else f"{path.parent.name}/{path.name}"
        if name in found:
            name = f"{name} ({len(found) + 1})"
        found[name] = sha256(path)
    return found


def _texts(path: Path, *, titles: bool) -> dict[str, str]:
    """Id -> text of a file of queries (no text empty), or of passages with their titles."""
    if not path.is_file():
        raise InputError(f"there is no such file; {_kind(titles)} were expected", file=path)
    texts: dict[str, str] = {}
    for number, row in rows(SourceConfig(path=str(path))):
        if isinstance(row, Fault):
            raise InputError(row.detail, file=path, row=number, field=row.field)
        field, text_id = _id(path, number, row)
        text = _text(path, number, row, "text")
        if titles and row.get("title") is not None:
            text = f"{_text(path, number, row, 'title')} {text}"
        text = text.strip()
        if not text and not titles:
            raise InputError("the query is empty", file=path, row=number, field="text")
        if texts.setdefault(text_id, text) != text:
            raise InputError(
                f"the id {text_id[:80]!r} stands in an earlier row too, with another text",
                file=path,
                row=number,
                field=field,
            )
    if not texts:
        raise InputError(f"holds no rows; {_kind(titles)} were expected", file=path)
    return texts


def _kind(titles: bool) -> str:
    return "passages" if titles else "queries"


def _id(path: Path, number: int, row: dict[str, Any]) -> tuple[str, str]:
    field = next((name for name in ID_FIELDS if row.get(name) is not None), None)
    if field is None:
        raise InputError(
            f"an id was expected in one of {', '.join(ID_FIELDS)}; the row has {few(row)}",
            file=path,
            row=number,
        )
    value = row[field]
    if isinstance(value, int) and not isinstance(value, bool):
        value = str(value)
    if not isinstance(value, str) or not value:
        raise InputError(
            f"text or a whole number was expected, found {value!r}"[:200], file=path, row=number, field=field
        )
    return field, value


def _text(path: Path, number: int, row: dict[str, Any], field: str) -> str:
    if field not in row:
        raise InputError(f"the field is missing; the row has {few(row)}", file=path, row=number, field=field)
    value = row[field]
    if not isinstance(value, str):
        found = "null" if value is None else type(value).__name__
        raise InputError(f"text was expected, found {found}", file=path, row=number, field=field)
    return value


# --- judgements -----------------------------------------------------------------------------

Judgement = tuple[str, str, float]


def _lines(path: Path) -> Iterator[Judgement]:
    columns: list[int] | None = None  # of a BEIR table
    for begun, (number, line) in enumerate(lines(path)):
        try:
            text = line.decode()
        except UnicodeDecodeError as error:
            raise InputError(
                f"byte 0x{line[error.start]:02x} at position {error.start + 1} is not UTF-8",
                file=path,
                row=number,
            ) from error
        if not begun and not {name.strip() for name in text.split("\t")}.isdisjoint(_QRELS_COLUMNS):
            columns = _header(path, number, text)
            continue
        cells = _beir_cells(text) if columns is not None else text.split()
        if columns is None and len(cells) == 4:
            query_id, passage_id, grade = cells[0], cells[2], cells[3]
        elif columns is not None and len(cells) > max(columns):
            query_id, passage_id, grade = (cells[column] for column in columns)
        else:
            expected = "TREC's `query-id 0 passage-id grade`, or a first row `query-id corpus-id score`,"
            if columns is not None:
                expected = f"a row of {max(columns) + 1} fields between tabs"
            raise InputError(f"{expected} was expected, found {len(cells)} fields", file=path, row=number)
        yield _judgement(path, number, query_id, passage_id, grade)


def _header(path: Path, number: int, text: str) -> list[int]:
    names = [name.strip() for name in text.split("\t")]
    for name in _QRELS_COLUMNS:
        if name not in names:
            raise InputError(
                f"the header has no such column; it has {few(names)}", file=path, row=number, field=name
            )
    return [names.index(name) for name in _QRELS_COLUMNS]


def _beir_cells(text: str) -> list[str]:
    """As BEIR's own loader reads them: an id that holds a quote is quoted."""
    return next(csv.reader([text], delimiter="\t")) if '"' in text else text.split("\t")


def _parquet(path: Path) -> Iterator[Judgement]:
    try:
        with pq.ParquetFile(path) as file:
            for name in _QRELS_COLUMNS:
                if name not in file.schema_arrow.names:
                    raise InputError(
                        f"there is no such column; there are {few(file.schema_arrow.names)}",
                        file=path,
                        field=name,
                    )
            number = 0
            for group in range(file.num_row_groups):
                for batch in file.iter_batches(row_groups=[group], columns=list(_QRELS_COLUMNS)):
                    found = (batch.column(name).to_pylist() for name in _QRELS_COLUMNS)
                    for query_id, passage_id, grade in zip(*found, strict=True):
                        number += 1
                        yield _judgement(path, number, query_id, passage_id, grade)
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        raise InputError(f"cannot be read as Parquet ({error})", file=path) from error


def _judgement(path: Path, number: int, query_id: Any, passage_id: Any, grade: Any) -> Judgement:
    for field, value in (("query-id", query_id), ("corpus-id", passage_id)):
        if value is None or value == "":
            raise InputError("an id was expected, found nothing", file=path, row=number, field=field)
    try:
        value = float(grade)
    except (TypeError, ValueError):
        value = math.nan
    if not math.isfinite(value):
        raise InputError(
            f"a number was expected as grade, found {str(grade)[:40]!r}", file=path, row=number, field="score"
        )
    return str(query_id), str(passage_id), value
