"""What is known of evaluation sets, so that no training row repeats them."""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from io import BufferedReader
from pathlib import Path

import numpy as np
import orjson
from numpy.typing import NDArray

from gradeloom.schemas.config import DecontaminateFilter
from gradeloom.schemas.errors import InputError
from gradeloom.schemas.rows import digest
from gradeloom.tasks.filter.text import Hashes, ngram_hashes, normalised, words

_QUERIES = ("queries", "topics")
_PASSAGES = ("corpus", "passages", "docs", "documents", "products")
_JSON_SUFFIXES = (".jsonl", ".jsonl.gz")
_TABLE_SUFFIXES = (".tsv", ".tsv.gz", ".txt", ".txt.gz")
_TEXT_FIELDS = ("title", "text", "query", "question", "passage", "contents")


@dataclass(frozen=True, slots=True)
class Overlap:
    """A run of words that stands in a passage and in the evaluation set `name`."""

    name: str
    ngram: str


@dataclass(frozen=True, slots=True)
class EvaluationSet:
    """One evaluation set: its queries, normalised, and the hashes of its passages' n-grams, sorted."""

    name: str
    queries: frozenset[str]
    ngrams: Hashes


class Contamination:
    """Evaluation sets in memory, asked whether a query or a passage overlaps with one.

    A passage overlaps when it shares a run of `ngram` folded words with a passage of the set; a
    passage of fewer words never does. N-grams are kept as sorted 64-bit hashes: 8 MB per million
    distinct ones (a passage of 60 words has 48), about three times that while loading. A hit is not
    checked against the text: 10^7 n-grams asked of 10^6 loaded ones meet by accident with a chance
    below 10^-4.
    """

    def __init__(self, sets: list[EvaluationSet], ngram: int) -> None:
        self._sets = sorted(sets, key=lambda evaluation: evaluation.name)
        self._ngram = ngram

    @classmethod
    def load(cls, config: DecontaminateFilter) -> Contamination:
        """Read the evaluation sets of a config.

        A set is a folder with `queries*` and `corpus*` (or `passages*`, `docs*`, ...) files, of which
        one may be missing, or one file, whose every text then counts as a query and as a passage.
        Files are JSON lines (every one of `title`, `text`, `query`, ... is a text) or tab separated
        (every column is: some files hold `id, text`, others `question, answer`), plain or gzipped.
        JSON lines may also be example lists (`query`, `passages` by grade): a model copies examples.

        Raises:
            InputError: a set is not there, holds nothing to compare with, or cannot be read.
        """
        return cls(
            [_load(name, Path(place), config.ngram) for name, place in config.sets.items()], config.ngram
        )

    @property
    def digest(self) -> str:
        """Of everything a decision depends on; the same whatever files the sets were read from."""
        parts: list[str | bytes] = [str(self._ngram)]
        for evaluation in self._sets:
            queries = digest(*sorted(evaluation.queries))
            parts += [evaluation.name, queries, evaluation.ngrams.astype("<u8").tobytes()]
        return digest(*parts)

    def query(self, text: str) -> str | None:
        """The name of the first set, by name, that holds this query; None if none does."""
        folded = normalised(text)
        return next((s.name for s in self._sets if folded in s.queries), None)

    def passage(self, text: str) -> Overlap | None:
        """The first run of words shared with the first set, by name, that shares one."""
        tokens = words(text)
        asked = ngram_hashes(tokens, self._ngram)
        for evaluation in self._sets:
            hits = _contained(asked, evaluation.ngrams)
            if hits.any():
                start = int(hits.argmax())
                return Overlap(evaluation.name, " ".join(tokens[start : start + self._ngram]))
        return None


def _contained(asked: Hashes, known: Hashes) -> NDArray[np.bool_]:
    if not known.size:
        return np.zeros(asked.shape, np.bool_)
    places = np.searchsorted(known, asked)
    return np.equal(known[np.minimum(places, known.size - 1)], asked)


def _load(name: str, place: Path, ngram: int) -> EvaluationSet:
    if place.is_dir():
        query_files, passage_files = _stems(place, _QUERIES), _stems(place, _PASSAGES)
        if not query_files and not passage_files:
            raise InputError(
                f"evaluation set '{name}': a folder with queries.jsonl and corpus.jsonl[.gz] expected",
                file=place,
            )
    elif place.is_file():
        query_files = passage_files = [place]
    else:
        raise InputError(f"evaluation set '{name}': no such file or folder", file=place)
    queries = {normalised(text) for file in query_files for text in _texts(file)}
    hashes = [ngram_hashes(words(text), ngram) for file in passage_files for text in _texts(file)]
    ngrams = np.unique(np.concatenate(hashes)) if hashes else np.empty(0, np.uint64)
    queries.discard("")
    if not queries and not ngrams.size:
        raise InputError(f"evaluation set '{name}': no query or passage in it", file=place)
    return EvaluationSet(name, frozenset(queries), ngrams)


def _stems(folder: Path, stems: tuple[str, ...]) -> list[Path]:
    return sorted(
        file
        for file in folder.iterdir()
        if file.name.startswith(stems) and file.name.endswith(_JSON_SUFFIXES + _TABLE_SUFFIXES)
    )


def _texts(file: Path) -> Iterator[str]:
    """Every text of a file; raises InputError with the row where one cannot be read."""
    if not file.name.endswith(_JSON_SUFFIXES + _TABLE_SUFFIXES):
        raise InputError("a .jsonl, .tsv or .txt file expected, plain or .gz", file=file)
    json = file.name.endswith(_JSON_SUFFIXES)
    row = 0
    try:
        with _open(file) as lines:
            for row, line in enumerate(lines, start=1):
                if row == 1:
                    line = line.removeprefix(b"\xef\xbb\xbf")
                if line.strip():
                    yield from _of_json(line, file, row) if json else line.decode().strip("\r\n").split("\t")
    except UnicodeDecodeError as error:
        raise InputError("not UTF-8", file=file, row=row) from error
    except (OSError, EOFError, zlib.error) as error:
        raise InputError(f"cannot read: {error}", file=file, row=row + 1) from error


def _open(file: Path) -> gzip.GzipFile | BufferedReader:
    return gzip.open(file, "rb") if file.suffix == ".gz" else file.open("rb")


def _of_json(line: bytes, file: Path, row: int) -> Iterator[str]:
    try:
        record = orjson.loads(line)
    except orjson.JSONDecodeError as error:
        raise InputError(f"not JSON: {error}", file=file, row=row) from error
    fields = record if isinstance(record, dict) else {}
    texts = [fields[name] for name in _TEXT_FIELDS if isinstance(fields.get(name), str)]
    if isinstance(fields.get("passages"), dict):  # a list of graded passages, e.g. an example of a prompt
        texts += [text for text in fields["passages"].values() if isinstance(text, str)]
    if not texts:
        raise InputError("an object with a text expected", file=file, row=row, field="text")
    yield from texts
