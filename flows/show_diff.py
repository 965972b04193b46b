"""What two releases differ in, as people read it."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from gradeloom.flows.show import Page
from gradeloom.tasks.release.versions import proposed_version, step

if TYPE_CHECKING:
    from collections.abc import Sequence

    from gradeloom.schemas.manifest import StageAccount
    from gradeloom.tasks.release.diff import Change, Example, GradeMoves, ReleaseDiff, TableDiff

_SHOWN = 100  # characters of a value
_STEPS = {
    "major": "a column was removed or changed",
    "minor": "other rows",
    "patch": "the same rows, told or made in another way",
    "none": "the same content",
}


def release_diff(found: ReleaseDiff) -> None:
    """`release diff`: A's values stand before B's."""
    page = Page()
    for side, name in ((found.a, "A"), (found.b, "B")):
        page.path(f"{name}: ", f"{side.name}@{side.version}, digest {side.digest[:12]}, {side.path}")
    by, version = step(found), proposed_version(found.a.version, found)
    follows = f"the version to follow {found.a.version}: {version}" if version else "no new version is needed"
    page.line(f"{by}: {_STEPS[by]}; {follows}")
    page.line()
    _tables(page, found.tables)
    if found.grade_moves is not None and found.grade_moves.pairs:
        _grade_moves(page, found.grade_moves)
    page.line()
    for title in ("config", "prompts", "models", "steps"):
        _changes(page, title, getattr(found, title))
    if found.documents:
        page.line(f"documents that say something else: {', '.join(found.documents)}")
    _quality(page, found)
    _accounting(page, found)
    _examples(page, found.tables)


def _tables(page: Page, tables: Sequence[TableDiff]) -> None:
    page.table(
        ("table", "rows A", "rows B", "added", "removed", "changed", "changed in"),
        [
            (t.table, t.a, t.b, t.added, t.removed, t.changed, "another order" if t.reordered else
             ", ".join(f"{column} ({rows:,})" for column, rows in t.changed_columns.items()))
            for t in tables
        ],
    )  # fmt: skip
    for table in tables:
        for column in table.columns:
            _change(page, column, f"column {table.table}.")


def _grade_moves(page: Page, moves: GradeMoves) -> None:
    page.line()
    both = f"{moves.pairs:,} pairs of query and passage that both have"
    page.line(f"grades of the {both}: {moves.moved:,} moved")
    page.table(
        ("", *(f"B: {grade}" for grade in moves.grades)),
        [(f"A: {grade}", *row) for grade, row in zip(moves.grades, moves.matrix, strict=True)],
    )


def _changes(page: Page, title: str, changes: Sequence[Change]) -> None:
    page.line(f"{title}:" if changes else f"{title}: the same")
    for change in changes:
        _change(page, change, "  ")


def _change(page: Page, change: Change, before: str) -> None:
    words = {
        "added": f"only in B: {_value(change.new)}",
        "removed": f"only in A: {_value(change.old)}",
        "changed": f"{_value(change.old)} -> {_value(change.new)}",
    }
    page.path(before, f"{change.path}: {words[change.what]}")


def _quality(page: Page, found: ReleaseDiff) -> None:
    """Single figures; a matrix is in the JSON."""
    page.line()
    figures = [f for f in found.quality if not any(isinstance(side, list | dict) for side in (f.a, f.b))]
    page.table(
        ("quality", "A", "B", "B - A"),
        [
            (f.name.replace("_", " "), *(_figure(value) for value in (f.a, f.b)),
             f"{f.difference:+g}" if f.difference else "")
            for f in figures
        ],
    )  # fmt: skip


def _figure(value: Any) -> str:
    return "" if value is None else _value(value)


def _accounting(page: Page, found: ReleaseDiff) -> None:
    page.line()
    page.table(
        ("stage", "rows A", "rows B", "kept A", "kept B", "dropped A", "dropped B", "reasons A -> B"),
        [
            (s.stage, *(_count(side, part) for part in ("rows", "kept", "dropped") for side in (s.a, s.b)),
             _reasons(s.a, s.b))
            for s in found.accounting
        ],
    )  # fmt: skip


def _count(account: StageAccount | None, part: str) -> int | str:
    if account is None:
        return ""
    return account.rows - account.kept if part == "dropped" else int(getattr(account, part))


def _reasons(a: StageAccount | None, b: StageAccount | None) -> str:
    old, new = (account.reasons if account else {} for account in (a, b))
    both = sorted(old.keys() | new.keys())
    return ", ".join(f"{reason} {old.get(reason, 0):,} -> {new.get(reason, 0):,}" for reason in both)


def _examples(page: Page, tables: Sequence[TableDiff]) -> None:
    """A line a row; whole rows are in the JSON."""
    if not any(table.examples for table in tables):
        return
    page.line()
    page.line("for example:")
    for table in tables:
        for example in table.examples:
            key = ", ".join(str(part) for part in example.key)
            page.path("  ", f"{table.table}: {example.what} {_value(key)}: {_row(example)}")


def _row(example: Example) -> str:
    """What changed in a row, or the row's plain values but for its key."""
    old, new = example.old, example.new
    if old is not None and new is not None:
        return ", ".join(f"{name} {_value(old[name])} -> {_value(new[name])}" for name in old)
    plain = [v for v in (old or new or {}).values() if v not in (None, "") and not isinstance(v, list)]
    return _value(", ".join(str(value) for value in plain if value not in example.key))


def _value(value: Any) -> str:
    """A value on one line, cut where it is long."""
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
    line = " ".join(text.split())
    return line if len(line) <= _SHOWN else f"{line[:_SHOWN]}…"
