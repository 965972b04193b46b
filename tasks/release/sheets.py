"""Sheets for people who label a sample: written blind, as CSV and as a page for a browser, and read back."""

from __future__ import annotations

import csv
import io
import random
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path

from gradeloom.schemas.audit import AuditKey, AuditLabel
from gradeloom.schemas.errors import InputError
from gradeloom.tasks.release.audit import KEY, ReleasedPassage, Sample, as_bytes
from gradeloom.tasks.release.export import whole_folder

COLUMNS = ("item", "query", "passage", "grade")

_FORMULA = ("=", "+", "-", "@", "\t", "\r", "\n")
"""What a spreadsheet takes for the beginning of a formula (OWASP, CSV injection)."""


def write_sheets(sample: Sample, target: Path) -> list[Path]:
    """Write the key and, for every rater, `rater-N.csv` and `rater-N.html`, in an order of the rater's own.

    Neither sheet says anything of grades, the judge, or who gets the same passage.

    Args:
        sample: what is to be looked at.
        target: the folder to make; an empty one is taken, too.

    Returns:
        The raters' files, in the target.

    Raises:
        InputError: the target holds something, or cannot be written. Then nothing is left.
    """
    names = []
    with whole_folder(target) as draft:
        (draft / KEY).write_bytes(as_bytes(sample.key))
        for rater in range(1, sample.key.raters + 1):
            rows = _shuffled(sample, rater)
            sheets = {
                f"rater-{rater}.csv": _csv(rows).encode("utf-8-sig"),  # with it, Excel reads UTF-8
                f"rater-{rater}.html": _html(sample, rater, rows).encode(),
            }
            for name, data in sheets.items():
                (draft / name).write_bytes(data)
                names.append(name)
    return [target / name for name in names]


def sheets_in(folder: Path, key: AuditKey) -> list[Path]:
    """The CSV sheets of a folder that `write_sheets` made, one a rater.

    Raises:
        InputError: one is missing.
    """
    found = [folder / f"rater-{rater}.csv" for rater in range(1, key.raters + 1)]
    for path in found:
        if not path.is_file():
            raise InputError("the sheet of a rater is missing; or name the sheets that there are", file=path)
    return found


def read_sheets(key: AuditKey, sheets: Sequence[Path]) -> list[AuditLabel]:
    """The grades that people gave, in the order of the key's items.

    A sheet is CSV in UTF-8 as spreadsheets and the page write it: comma, semicolon or tab between cells,
    byte-order mark or not, line breaks in quotes. Only the columns `item` and `grade` are read. An empty
    grade, or a row that is not there, is a passage that was not labelled.

    Args:
        key: of the sample.
        sheets: one per rater.

    Raises:
        InputError: a sheet cannot be read, or a row is not as it must be (file, row as a spreadsheet
            counts it, and field are named), or there is no grade in any sheet.
    """
    given = [_grades(key, path) for path in sheets]
    if not any(given):
        raise InputError(
            f"no row has a grade; expected {_either(key.grades)} in the column 'grade'",
            file=sheets[0] if len(sheets) == 1 else sheets[0].parent,
        )
    return [
        AuditLabel(
            item=item.item,
            query_id=item.query_id,
            passage_id=item.passage_id,
            grades=[own.get(item.item) for own in given],
        )
        for item in key.items
    ]


# --- writing --------------------------------------------------------------------------------

Rows = list[tuple[str, ReleasedPassage]]


def _shuffled(sample: Sample, rater: int) -> Rows:
    rows = [(item.item, p) for item, p in zip(sample.key.items, sample.passages, strict=True)]
    random.Random(f"{sample.key.sample()} {rater}").shuffle(rows)
    return rows


def _csv(rows: Rows) -> str:
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\r\n")
    writer.writerow(COLUMNS)
    for item, passage in rows:
        writer.writerow((item, _plain(passage.query), _plain(passage.text), ""))
    return out.getvalue()


def _plain(text: str) -> str:
    """Text that no spreadsheet takes for a formula: with an apostrophe in front where it might."""
    return f"'{text}" if text.startswith(_FORMULA) or text.lstrip().startswith(_FORMULA) else text


def _html(sample: Sample, rater: int, rows: Rows) -> str:
    from jinja2 import StrictUndefined
    from jinja2.sandbox import SandboxedEnvironment

    environment = SandboxedEnvironment(
        undefined=StrictUndefined, autoescape=True, trim_blocks=True, lstrip_blocks=True
    )
    source = files("gradeloom.data").joinpath("cards/audit.html.j2").read_text(encoding="utf-8")
    return environment.from_string(source).render(
        rater=rater,
        data={
            "sample": sample.key.sample(),
            "rater": rater,
            "levels": [
                {"grade": level["grade"], "name": level["name"], "definition": level["definition"]}
                for level in sample.levels
            ],
            "items": [
                {"item": item, "query": passage.query, "passage": passage.text} for item, passage in rows
            ],
        },
    )


# --- reading --------------------------------------------------------------------------------


def _grades(key: AuditKey, path: Path) -> dict[str, int]:
    """Item -> grade of one sheet."""
    records = _records(path)
    columns = _header(path, records)
    known = {item.item for item in key.items}
    rows: dict[str, int] = {}
    grades: dict[str, int] = {}
    for row, cells in enumerate(records[1:], start=2):
        if not any(cell.strip() for cell in cells):
            continue
        if len(cells) <= max(columns.values()):
            raise InputError(f"{len(cells)} cells, expected those of the header", file=path, row=row)
        item, grade = (cells[columns[name]].strip() for name in ("item", "grade"))
        if item not in known:
            raise InputError(
                f"{item[:40]!r} is no item of this sample; is the sheet of another one?",
                file=path, row=row, field="item",
            )  # fmt: skip
        if item in rows:
            raise InputError(f"{item!r} stands in row {rows[item]}, too", file=path, row=row, field="item")
        rows[item] = row
        if grade:
            grades[item] = _grade(key, path, row, grade)
    return grades


def _grade(key: AuditKey, path: Path, row: int, cell: str) -> int:
    for grade in key.grades:
        if cell == str(grade):
            return grade
    raise InputError(
        f"expected {_either(key.grades)} or nothing, found {cell[:40]!r}", file=path, row=row, field="grade"
    )


def _records(path: Path) -> list[list[str]]:
    try:
        text = path.read_bytes().decode("utf-8-sig")
    except OSError as error:
        raise InputError(f"cannot be read: {error.strerror}", file=path) from error
    except UnicodeDecodeError as error:
        raise InputError("is not UTF-8; save it as 'CSV UTF-8'", file=path) from error
    lines = text.splitlines()
    delimiter = max(",;\t", key=(lines[0] if lines else "").count)
    try:
        return list(csv.reader(io.StringIO(text, newline=""), delimiter=delimiter))
    except csv.Error as error:
        raise InputError(f"cannot be read as CSV: {error}", file=path) from error


def _header(path: Path, records: list[list[str]]) -> dict[str, int]:
    names = [name.strip().lower() for name in records[0]] if records else []
    for name in ("item", "grade"):
        if names.count(name) != 1:
            raise InputError(
                "expected one column of this name in the first row; is this a sheet of `audit sample`?",
                file=path, row=1, field=name,
            )  # fmt: skip
    return {name: names.index(name) for name in ("item", "grade")}


def _either(grades: Sequence[int]) -> str:
    shown = [str(grade) for grade in sorted(grades)]
    return f"{', '.join(shown[:-1])} or {shown[-1]}"
