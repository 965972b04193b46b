"""A release in the forms that other tools read."""

from __future__ import annotations

import csv
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import orjson

from gradeloom.schemas.errors import InputError
from gradeloom.tasks.release.tables import read_rows, sync_file
from gradeloom.tasks.release.verify import require_untouched
from gradeloom.tasks.run import sync_folder


def export_beir(folder: Path, target: Path, split: str = "test") -> Path:
    """Write `corpus.jsonl`, `queries.jsonl` and `qrels/<split>.tsv` as `beir`'s GenericDataLoader reads them.

    Args:
        folder: a release.
        target: the folder to make; an empty one is taken, too.
        split: name of the qrels file: `test`, `train` or `dev`.

    Returns:
        The target.

    Raises:
        InputError: no release or a changed one, an unknown split, a target with something in it, an id
            that a TSV file cannot hold, or a place that cannot be written. Then nothing is left.
    """
    if split not in ("test", "train", "dev"):
        raise InputError(f"unknown split '{split}'; BEIR knows train, dev and test")
    require_untouched(folder)
    with whole_folder(target) as draft:
        for table in ("corpus", "queries"):
            with (draft / f"{table}.jsonl").open("wb") as lines:
                for _, row in read_rows(folder, table):
                    lines.write(orjson.dumps(row, option=orjson.OPT_APPEND_NEWLINE))
        (draft / "qrels").mkdir()
        _write_qrels(folder, draft / "qrels" / f"{split}.tsv")
    return target


def _write_qrels(folder: Path, path: Path) -> None:
    with path.open("w", encoding="utf-8", newline="") as f:
        # beir reads with the csv module's quoting, so an id that holds a quote is written with it.
        out = csv.writer(f, delimiter="\t", lineterminator="\n")
        out.writerow(["query-id", "corpus-id", "score"])
        for place, row in read_rows(folder, "qrels"):
            _refuse_separators(place.file, place.row, row)
            out.writerow([row["query-id"], row["corpus-id"], row["score"]])


def _refuse_separators(file: Path, number: int, row: dict[str, Any]) -> None:
    for field in ("query-id", "corpus-id"):
        if any(separator in row[field] for separator in "\t\n\r"):
            raise InputError(
                f"{row[field]!r} holds a tab or line break, which a TSV file cannot hold",
                file=file,
                row=number,
                field=field,
            )


@contextmanager
def whole_folder(target: Path) -> Iterator[Path]:
    """A folder to fill that becomes `target` when all went well, and vanishes otherwise."""
    draft = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    try:
        if target.exists() and (not target.is_dir() or any(target.iterdir())):
            raise InputError("exists already; expected a new or empty folder", file=target)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(draft, ignore_errors=True)
        draft.mkdir()
        yield draft
        for path in draft.rglob("*"):
            sync_folder(path) if path.is_dir() else sync_file(path)
        draft.rename(target)
        sync_folder(target.parent)
    except OSError as error:
        raise InputError(f"cannot be written: {error.strerror or error}", file=target) from error
    finally:
        shutil.rmtree(draft, ignore_errors=True)
