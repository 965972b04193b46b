"""Where a row of a release comes from, as people read it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from gradeloom.flows.show import Page, exchange

if TYPE_CHECKING:
    from collections.abc import Sequence

    from gradeloom.flows.lineage import Decision, Lineage
    from gradeloom.flows.preview import Exchange


def lineage(found: Lineage) -> None:
    """`release lineage`: from the release row back to the source row."""
    page = Page()
    page.path("", f"{found.release}, digest {found.digest[:12]}, {found.path}")
    if found.run is not None:
        page.path("run: ", found.run)
    _release_row(page, found)
    if found.decisions:
        page.line()
        page.line("=== decisions", style="bold")
        for decision in found.decisions:
            _decision(page, decision)
    shown: set[str] = set()
    _exchanges(page, "asked of the judge", found.models.get("judge"), found.judging, shown)
    _exchanges(page, "asked of the generator", found.models.get("generator"), found.generation, shown)
    if found.source is not None:
        page.line()
        page.line("=== source row", style="bold")
        page.line(f"row {found.source['ordinal'] + 1:,} of the source, id {found.source['id']}", indent=2)
        page.line(f"query {found.source['query_id']}: {found.source['query']}", indent=2)
    if found.missing:
        page.line()
        page.line("=== not shown", style="bold")
        for what in found.missing:
            page.line(what, indent=2)


def _release_row(page: Page, found: Lineage) -> None:
    row = found.row
    page.line()
    page.line(f"=== {found.table}: {row['query_id']}: {row['query']}", style="bold")
    if found.table == "rejects":
        page.line(_verdict(row["stage"], row["status"], row["reason"], row["detail"], row["at_grade"]))
    for place, intended in enumerate(row["intended"]):
        if found.passage in (None, intended):
            page.line(f"passage {row['passage_ids'][place]}: {_grades(row, place)}", indent=2, style="cyan")
            page.line(row["passages"][place], indent=4)


def _grades(row: dict[str, Any], place: int) -> str:
    released = f", released with {row['grade'][place]:g}" if "grade" in row else ""
    judged, mass = row["judged"][place], row["mass"][place]
    read = (
        ""
        if judged is None
        else f", judged {judged} (expected {row['expected'][place]:.2f}, mass {mass:.2f})"
    )
    abstained = ", the judge abstained" if row["abstained"][place] else ""
    return f"written for grade {row['intended'][place]}{read}{abstained}{released}"


def _decision(page: Page, decision: Decision) -> None:
    verdict = _verdict(decision.stage, decision.status, decision.reason, decision.detail, decision.at_grade)
    page.line(f"{verdict} [step {decision.step}, {decision.fingerprint}]", indent=2)
    plain = {k: v for k, v in decision.said.items() if v not in (None, []) and not _nested(v)}
    if plain:
        page.line(", ".join(f"{name.replace('_', ' ')} {value}" for name, value in plain.items()), indent=4)


def _nested(value: Any) -> bool:
    return isinstance(value, list) and isinstance(value[0], dict)


def _verdict(stage: str, status: str, reason: str | None, detail: str | None, grade: int | None) -> str:
    why = f", {reason}" if reason else ""
    where = f" at the passage of grade {grade}" if grade is not None else ""
    return f"{stage}: {status}{why}{where}" + (f" ({detail})" if detail else "")


def _exchanges(
    page: Page, title: str, model: str | None, exchanges: Sequence[Exchange], shown: set[str]
) -> None:
    if not exchanges:
        return
    page.line()
    page.line(f"=== {title}, {model}", style="bold")
    for sent in exchanges:
        exchange(page, sent, shown)
