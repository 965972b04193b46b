"""`gradeloom release audit`. As in `cli.py`, everything but click is imported by the command."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from gradeloom.flows.options import json_option, root_option

if TYPE_CHECKING:
    from gradeloom.schemas.audit import AuditFigures, AuditKey, AuditLabel


@click.group("audit")
def audit() -> None:
    """Have people look at a sample of a release, and see what that says of all of it."""


@audit.command("sample")
@click.argument("which")
@click.option("--n", default=200, show_default=True, type=click.IntRange(min=2), help="Passages.")
@click.option("--raters", default=2, show_default=True, type=click.IntRange(1, 9),
              help="People; each looks at all of them.")  # fmt: skip
@click.option("--seed", default=0, show_default=True, help="Decides which passages, and their order.")
@click.option("--to", "target", type=click.Path(path_type=Path), required=True, help="Folder to make.")
@root_option("releases")
@json_option
def sample(which: str, n: int, raters: int, seed: int, target: Path, root: str, as_json: bool) -> None:
    """Draw passages for people to grade blind: per rater a CSV sheet and a page for the browser."""
    from gradeloom.flows import show, show_audit
    from gradeloom.tasks.release.audit import draw_sample
    from gradeloom.tasks.release.catalog import find
    from gradeloom.tasks.release.sheets import write_sheets

    drawn = draw_sample(find(root, which), n=n, raters=raters, seed=seed)
    sheets = write_sheets(drawn, target)
    if as_json:
        said = {"sample": drawn.key.sample(), "to": target, "sheets": sheets}
        click.echo(show.as_json(said | drawn.key.model_dump(exclude={"items"})))
    else:
        show_audit.sampled(drawn.key, target, sheets, root)


@audit.command("import")
@click.argument("folder", type=click.Path(path_type=Path))
@click.argument("sheets", nargs=-1, type=click.Path(path_type=Path))
@root_option("releases")
@json_option
def import_(folder: Path, sheets: tuple[Path, ...], root: str, as_json: bool) -> None:
    """Read what raters filled in, and keep the audit beside the release.

    FOLDER is that of `audit sample`, with its key; SHEETS are CSV files, one a rater (default: the
    rater-N.csv of the folder).
    """
    from gradeloom.flows import show, show_audit
    from gradeloom.tasks.release.audit import audited_release, read_key, store_audit
    from gradeloom.tasks.release.sheets import read_sheets, sheets_in

    key = read_key(folder)
    release = audited_release(root, key)
    labels = read_sheets(key, sheets or sheets_in(folder, key))
    audit, path = store_audit(root, key, labels, _figures(release, key, labels))
    if as_json:
        click.echo(show.as_json({"path": path, **audit.model_dump(exclude={"labels"})}))
    else:
        show_audit.audited(audit, path, root)


def _figures(release: Path, key: AuditKey, labels: list[AuditLabel]) -> AuditFigures:
    from gradeloom.tasks.evaluate.audited import Reading, audit_figures
    from gradeloom.tasks.release.audit import group_of, released_passages

    readings = (
        Reading(
            passage.query_id,
            passage.passage_id,
            group_of(key, passage),
            passage.released,
            passage.grade,
            None if passage.abstained else passage.judged,
            passage.expected,
        )
        for passage in released_passages(release)
    )
    return audit_figures(readings, labels, key.grades, len(labels[0].grades))
