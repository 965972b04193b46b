"""What `gradeloom release audit` did, as people read it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gradeloom.flows.show import Page

if TYPE_CHECKING:
    from gradeloom.schemas.audit import Audit, AuditFigure, AuditKey

_WHO = {True: "disagrees", False: "agrees", None: "either"}

_ESTIMATES = (
    ("grade_precision", "share of passages whose grade is right"),
    ("absolute_error", "mean absolute error of the grades"),
    ("judge_agreement", "share of passages whose judged grade is right"),
)


def sampled(key: AuditKey, target: Path, sheets: Sequence[Path], root: str) -> None:
    """The end of `audit sample`, and how to go on."""
    page = Page()
    page.path("sample: ", target)
    page.line(f"release: {key.name}@{key.version}, {len(key.items):,} passages, raters: {key.raters}")
    page.line()
    page.table(
        ("grade", "judge", "passages", "to look at", "probability"),
        [(g.grade, _WHO[g.disagreement], g.passages, g.sampled, f"{g.probability:.3f}") for g in key.groups],
    )
    page.line()
    page.line("next: a rater gets one file, the page for a browser or the CSV, and sends back a CSV:")
    for path in sheets:
        page.path("  ", path)
    page.line("key.json is not for raters. When the CSVs are back in the folder:")
    page.path("  ", f"gradeloom release audit import {target}" + _root(root))


def audited(audit: Audit, path: Path, root: str) -> None:
    """The end of `audit import`."""
    figures = audit.figures
    page = Page()
    page.path("audit: ", path)
    page.line(f"release: {audit.name}@{audit.version}, digest {audit.digest}")
    for rater, labelled in enumerate(figures.labelled, start=1):
        page.line(f"rater {rater}: {labelled:,} of {len(audit.labels):,} passages labelled")
    for pair in figures.raters:
        one, other = pair["raters"]
        page.line()
        page.line(f"raters {one} and {other}: {_kappa(pair)}")
        _matrix(page, pair, f"rater {one}", f"rater {other} says", abstained=False)
    if figures.judge is not None:
        page.line()
        page.line(f"people and judge: {_kappa(figures.judge)}")
        page.line("(in the sample, which has more of what the judge disagrees with than the release)")
        _matrix(page, figures.judge, "people", "judge says", abstained=True)
    for name, title in _ESTIMATES:
        if getattr(figures, name):
            page.line()
            page.line(f"{title}, estimated for the whole release:")
            _estimates(page, getattr(figures, name), bound=name != "absolute_error")
    page.line()
    page.path("next: ", f"gradeloom release show {audit.name}@{audit.version}" + _root(root))


def _kappa(confusion: dict[str, Any]) -> str:
    """The agreement of two readings in one line."""
    if not confusion["passages"]:
        return "no passage that both graded"
    figures = [
        f"{name.replace('_', ' ')} {_number(confusion[name])}"
        for name in ("exact", "kappa", "quadratic_kappa")
    ]
    return f"{confusion['passages']:,} grades, {', '.join(figures)}"


def _matrix(page: Page, confusion: dict[str, Any], rows: str, columns: str, *, abstained: bool) -> None:
    grades = confusion["grades"]
    says = [f"{columns} {grade}" for grade in grades]
    lines = []
    for i, grade in enumerate(grades):
        silent = [confusion["abstained"][i]] if abstained else []
        share = _number(confusion["agreement"][str(grade)])
        lines.append((f"   grade {grade}", *confusion["matrix"][i], *silent, share))
    page.table((f"   {rows}", *says, *(["abstains"] if abstained else []), "agreement"), lines)


def _estimates(page: Page, figures: Sequence[AuditFigure], *, bound: bool) -> None:
    """A row a grade; `bound`: with the one-sided lower bound, which is what a gate looks at."""
    page.table(
        ("   grade", "passages", "labelled", "queries", "estimate", "95 % interval",
         *(["lower bound"] if bound else [])),
        [
            (
                f"   {'all' if figure.grade is None else figure.grade}",
                figure.passages,
                figure.labelled,
                figure.queries,
                _number(figure.value),
                f"{_number(figure.low)} to {_number(figure.high)}",
                *([_number(figure.bound)] if bound else []),
            )
            for figure in figures
        ],
    )  # fmt: skip
    if any(figure.se is None for figure in figures):
        page.line("unknown: a group that was sampled has labels of fewer than two queries", indent=3)


def _number(value: float | None) -> str:
    return "unknown" if value is None else f"{value:.3f}"


def _root(root: str) -> str:
    return "" if root == "releases" else f" --root {root}"
