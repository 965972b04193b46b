"""`gradeloom release`: look at, check and export what was released.

As in `cli.py`, everything but click is imported by the command that needs it.
"""

from __future__ import annotations

from pathlib import Path

import click

from gradeloom.flows.audit_cli import audit
from gradeloom.flows.options import json_option, root_option, wait_for
from gradeloom.flows.publish_cli import publish


@click.group()
def release() -> None:
    """Look at, check, export and publish releases. WHICH is NAME, NAME@VERSION, a folder or a URL."""


release.add_command(publish)
release.add_command(audit)


@release.command("list")
@root_option("releases")
@json_option
def release_list(root: str, as_json: bool) -> None:
    """Every release."""
    from gradeloom.flows import show
    from gradeloom.tasks.release.catalog import list_releases

    found = list_releases(root)
    if as_json:
        click.echo(show.as_json({"releases": found}))
    else:
        show.releases(found, root)


@release.command("show")
@click.argument("which")
@root_option("releases")
@json_option
def release_show(which: str, root: str, as_json: bool) -> None:
    """What one release is."""
    from gradeloom.flows import show
    from gradeloom.tasks.release import catalog

    facts = catalog.show(catalog.find(root, which))
    if as_json:
        click.echo(show.as_json(facts))
    else:
        show.release(facts)


@release.command("verify")
@click.argument("which")
@click.option("--cached", is_flag=True, help="Of a URL: check the local copy, do not read it all again.")
@root_option("releases")
@json_option
def release_verify(which: str, cached: bool, root: str, as_json: bool) -> None:
    """Check hashes, schemas, keys, references and accounting; exit 2 at the first thing that is wrong."""
    from gradeloom.flows import show
    from gradeloom.tasks.release.catalog import find, url_of
    from gradeloom.tasks.release.verify import verify

    url = None if cached else url_of(root, which)
    if url is None:
        folder: Path | str = find(root, which)
        checked = verify(Path(folder))
    else:
        from gradeloom.tasks.release.remote import verify_url

        folder, checked = url, verify_url(url)
    if as_json:
        click.echo(show.as_json({"path": folder, "verified": True, "checked": checked}))
        return
    page = show.Page()
    for line in checked:
        page.path("ok: ", line)
    page.path("verified: ", folder)


@release.command("export")
@click.argument("which")
@click.option("--format", "form", type=click.Choice(["beir"]), required=True, help="Who is to read it.")
@click.option("--to", "target", type=click.Path(path_type=Path), required=True, help="Folder to make.")
@click.option("--split", default="test", show_default=True, help="Name of the qrels: train, dev or test.")
@root_option("releases")
@json_option
def release_export(which: str, form: str, target: Path, split: str, root: str, as_json: bool) -> None:
    """Write a release in the form that another tool reads."""
    from gradeloom.flows import show
    from gradeloom.tasks.release.catalog import find
    from gradeloom.tasks.release.export import export_beir

    folder = find(root, which)
    written = export_beir(folder, target, split)
    if as_json:
        click.echo(show.as_json({"path": folder, "format": form, "to": written}))
    else:
        show.Page().path(f"exported ({form}): ", written)


@release.command("diff")
@click.argument("a")
@click.argument("b")
@root_option("releases")
@json_option
def release_diff(a: str, b: str, root: str, as_json: bool) -> None:
    """What B differs in from A: rows, grades, columns, settings, figures; and the version to follow A."""
    from gradeloom.flows import show, show_diff
    from gradeloom.tasks.release.catalog import find
    from gradeloom.tasks.release.diff import diff
    from gradeloom.tasks.release.versions import proposed_version, step

    found = diff(find(root, a), find(root, b))
    if as_json:
        proposal = {"step": step(found), "version": proposed_version(found.a.version, found)}
        click.echo(show.as_json({**show.fields(found), "proposed": proposal}))
    else:
        show_diff.release_diff(found)


@release.command("lineage")
@click.argument("which")
@click.argument("row")
@click.option("--runs", default=None, metavar="ROOT", help="Folder of runs; default: where the release says.")
@root_option("releases")
@json_option
def release_lineage(which: str, row: str, runs: str | None, root: str, as_json: bool) -> None:
    """Where ROW comes from, down to the prompts as sent. ROW is a query id (its list) or a passage id."""
    from gradeloom.flows import show, show_lineage
    from gradeloom.flows.lineage import lineage
    from gradeloom.tasks.release.catalog import find

    found = wait_for(lineage(find(root, which), row, runs=runs))
    if as_json:
        click.echo(show.as_json(found))
    else:
        show_lineage.lineage(found)
