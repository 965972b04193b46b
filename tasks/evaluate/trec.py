"""TREC run files, and the order of a ranking.

A line is `query Q0 passage rank score tag`. As in trec_eval, scores alone order a ranking, and of equal
scores the greater passage id comes first; the rank column only repeats that.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from gradeloom.schemas.errors import InputError
from gradeloom.tasks.run import write_bytes_whole

if TYPE_CHECKING:
    from gradeloom.tasks.collection import Run

COLUMNS = "query Q0 passage rank score tag"


def ranked(scores: Mapping[str, float]) -> list[str]:
    """Passage ids, best first: by score, of equal ones the greater id first (as trec_eval has it)."""
    return [passage for _, passage in sorted(((score, p) for p, score in scores.items()), reverse=True)]


def write_run(path: str | Path, run: Run, tag: str) -> None:
    """Write a run, whole or not at all; scores in as many digits as give the same number again.

    Raises:
        InputError: an id or the tag is empty or holds white space, a score is no finite number, or the file
            cannot be written.
    """
    write_bytes_whole(Path(path), "".join(_lines(run, tag)).encode())


def read_run(path: str | Path) -> Run:
    """Read a run; each query's passages come best first.

    Raises:
        InputError: no such file; a line of other than six columns; a score that is no finite number; a
            passage twice in one ranking.
    """
    run: Run = {}
    try:
        with Path(path).open(encoding="utf-8") as file:
            for row, line in enumerate(file, start=1):
                columns = line.split()
                if not columns:
                    continue
                if len(columns) != 6:
                    raise InputError(f"expected `{COLUMNS}`, got {len(columns)} columns", file=path, row=row)
                query, _, passage, _, score, _ = columns
                ranking = run.setdefault(query, {})
                if passage in ranking:
                    raise InputError(
                        f"passage {passage!r} stands twice in the ranking of query {query!r}",
                        file=path,
                        row=row,
                    )
                ranking[passage] = _number(score, path, row)
    except OSError as error:
        raise InputError(f"cannot be read: {error.strerror or error}", file=path) from error
    except UnicodeDecodeError as error:
        raise InputError("is not UTF-8 text; expected a TREC run file", file=path) from error
    return {query: {passage: scores[passage] for passage in ranked(scores)} for query, scores in run.items()}


def _lines(run: Run, tag: str) -> Iterator[str]:
    _one_word(tag, "tag")
    for query, scores in run.items():
        _one_word(query, "query id")
        for rank, passage in enumerate(ranked(scores), start=1):
            score = float(scores[passage])
            _one_word(passage, "passage id")
            if not math.isfinite(score):
                raise InputError(
                    f"query {query!r}, passage {passage!r}: the score is {score}, not a finite number"
                )
            yield f"{query} Q0 {passage} {rank} {score!r} {tag}\n"


def _one_word(text: str, what: str) -> None:
    if len(text.split()) != 1 or text.split()[0] != text:
        raise InputError(f"{what} {text!r} cannot stand in a TREC run file: it is empty or holds white space")


def _number(text: str, path: str | Path, row: int) -> float:
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not math.isfinite(number):
        raise InputError(f"the score is {text!r}, not a finite number", file=path, row=row)
    return number
