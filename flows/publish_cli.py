"""`gradeloom release publish`. As in `cli.py`, everything but click is imported by the command."""

from __future__ import annotations

import click

from gradeloom.flows.options import hush_libraries, json_option, quiet_option, root_option


@click.command("publish")
@click.argument("which")
@click.option("--to", required=True, metavar="URL",
              help="A root of releases (s3://…, gs://…, a folder), or hf://datasets/OWNER/NAME.")  # fmt: skip
@click.option("--single-writer", is_flag=True,
              help="Nobody else publishes: for stores that cannot write only what is not there.")  # fmt: skip
@click.option("--dry-run", is_flag=True, help="Look, say what would be sent, and change nothing.")
@root_option("releases")
@quiet_option
@json_option
def publish(
    which: str, to: str, single_writer: bool, dry_run: bool, root: str, quiet: bool, as_json: bool
) -> None:
    """Publish a release to an object store or the Hugging Face Hub, whole or not at all.

    Killed, it goes on when started again. Credentials come from the environment.
    """
    from gradeloom.flows import show, show_publish
    from gradeloom.flows.progress import Progress, following
    from gradeloom.tasks.release import hub
    from gradeloom.tasks.release import publish as stores
    from gradeloom.tasks.release.catalog import find

    hush_libraries()
    bundle = stores.read_bundle(find(root, which))
    with Progress(quiet=quiet) as progress:
        report = following(progress, "publish", "bytes")
        if to.startswith("hf://"):
            done = hub.publish(bundle, to, dry_run=dry_run, report=report)
        else:
            done = stores.publish(bundle, to, single_writer=single_writer, dry_run=dry_run, report=report)
    if as_json:
        click.echo(show.as_json(done))
    else:
        show_publish.published(done)
