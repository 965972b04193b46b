"""The `gradeloom` command.

Only click and the error types are imported up here, so that `--help` answers at once; everything
else is imported by the command that needs it.

Results go to stdout, progress and messages to stderr. Exit codes: 0 done; 1 a defect of ours; 2 the
input is wrong; 3 finished without a release; 130 interrupted.
"""

from __future__ import annotations

import errno
import signal
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from gradeloom.flows.judge_cli import judge
from gradeloom.flows.options import config_options, json_option, quiet_option, root_option, say, wait_for
from gradeloom.flows.release_cli import release
from gradeloom.flows.retriever_cli import retriever
from gradeloom.schemas.errors import GradeloomError, InputError

F = TypeVar("F", bound=Callable[..., Any])

INTERRUPTED = 130
# What a place that the user named answers, whoever asks it.
_PLACE_ERRORS = {
    errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOSPC, errno.EDQUOT, errno.ENAMETOOLONG, errno.ENOTDIR,
    errno.ELOOP,
}  # fmt: skip
DEFECT = 1


def main() -> None:
    """Entry point: run the command, end with its exit code."""
    signal.signal(signal.SIGTERM, _interrupt)
    sys.exit(run(sys.argv[1:]))


def _interrupt(number: int, frame: object) -> None:
    raise KeyboardInterrupt


def run(arguments: list[str]) -> int:
    """Run the command; its exit code. Errors become one line on stderr."""
    try:
        code = cli.main(arguments, prog_name="gradeloom", standalone_mode=False)
    except click.ClickException as error:
        error.show()
        return error.exit_code
    except GradeloomError as error:
        say(f"gradeloom: error: {error}")
        return error.exit_code
    except (click.Abort, KeyboardInterrupt):
        say("gradeloom: interrupted; run the same command again to go on")
        return INTERRUPTED
    except Exception as error:
        if isinstance(error, OSError) and error.filename and error.errno in _PLACE_ERRORS:
            say(f"gradeloom: error: {str(error.filename)[:200]}: {error.strerror}")
            return InputError.exit_code
        say(traceback.format_exc().rstrip())
        say("gradeloom: this is a defect of gradeloom, please report it with the lines above")
        return DEFECT
    return code if isinstance(code, int) else 0


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="gradeloom", prog_name="gradeloom")
def cli() -> None:
    """Training data that does not exist yet, woven out of language models."""


# --- graded ---------------------------------------------------------------------------------


@cli.group()
def graded() -> None:
    """Graded-relevance lists: queries in, a release of graded passages out."""


@graded.command("run")
@config_options
@click.option("--limit", type=click.IntRange(min=1), help="Read only the first N queries.")
@quiet_option
@json_option
def graded_run(config_name: str, sets: tuple[str, ...], limit: int | None, quiet: bool, as_json: bool) -> int:
    """Make a release. Started again after anything, it goes on where it was."""
    from gradeloom.flows import show
    from gradeloom.flows.configure import load_config
    from gradeloom.flows.graded import graded_named, run_graded
    from gradeloom.flows.orchestrate import run_flow
    from gradeloom.flows.progress import Progress

    config = load_config(config_name, sets, limit)
    with Progress(quiet=quiet) as progress:
        ran = wait_for(run_flow(config, named=graded_named(config), progress=progress, compose=run_graded))
    if as_json:
        facts = show.fields(ran.result) | {
            "exit_code": ran.result.exit_code,
            "flow_run_url": ran.flow_run_url,
        }
        click.echo(show.as_json(facts))
    else:
        show.graded_result(ran.result, config.release.name, config.release.root, ran.flow_run_url)
    if ran.result.stopped is not None:
        say(f"gradeloom: no release: {ran.result.stopped}")
    return ran.result.exit_code


@graded.command("preview")
@config_options
@click.option("--limit", type=click.IntRange(min=1), default=3, show_default=True, help="Queries to try.")
@quiet_option
@json_option
def graded_preview(config_name: str, sets: tuple[str, ...], limit: int, quiet: bool, as_json: bool) -> None:
    """Try a few queries and show prompts, completions, verdicts and what the whole run would take."""
    from gradeloom.flows import show
    from gradeloom.flows.configure import load_config
    from gradeloom.flows.preview import preview_graded
    from gradeloom.flows.progress import Progress

    config = load_config(config_name, sets)
    with Progress(quiet=quiet) as progress:
        shown = wait_for(preview_graded(config, limit=limit, progress=progress))
    if as_json:
        click.echo(show.as_json(shown.as_json()))
    else:
        show.preview(shown)


cli.add_command(judge)
cli.add_command(release)
cli.add_command(retriever)


# --- runs -----------------------------------------------------------------------------------


@cli.group()
def runs() -> None:
    """Run directories: progress and paid-for completions, shard by shard."""


@runs.command("list")
@root_option("runs")
@json_option
def runs_list(root: str, as_json: bool) -> None:
    """Every run directory."""
    from gradeloom.flows import show
    from gradeloom.flows.runs import list_runs

    found = list_runs(root)
    if as_json:
        click.echo(show.as_json({"runs": found}))
    else:
        show.runs(found, root)


@runs.command("prune")
@click.argument("names", nargs=-1)
@click.option(
    "--older-than", type=click.FloatRange(min=0), metavar="DAYS", help="Only without a change since."
)
@click.option("--stale", is_flag=True, help="Only shards of settings that the run no longer has.")
@click.option("--yes", is_flag=True, help="Do not ask.")
@root_option("runs")
@json_option
def runs_prune(
    names: tuple[str, ...], older_than: float | None, stale: bool, yes: bool, root: str, as_json: bool
) -> None:
    """Remove run directories (releases stay). A run at work is refused."""
    from gradeloom.flows import show
    from gradeloom.flows.runs import prune, to_prune

    chosen = to_prune(root, names, older_than=older_than, stale=stale)
    going = sum(run.stale_bytes if stale else run.bytes for run in chosen)
    if chosen and not yes:
        what = "stale shards of" if stale else "run"
        _confirm(f"Remove {what} {', '.join(run.name for run in chosen)} ({show.size(going)})?")
    freed = sum(prune(run, stale=stale) for run in chosen)
    if as_json:
        click.echo(show.as_json({"pruned": [run.name for run in chosen], "bytes": freed}))
    else:
        show.facts({"pruned": ", ".join(run.name for run in chosen) or "nothing", "freed bytes": freed})


def _confirm(question: str) -> None:
    if not sys.stdin.isatty():
        raise InputError("nobody is there to ask; say --yes")
    if not click.confirm(question, err=True):
        raise click.Abort


# --- cache ----------------------------------------------------------------------------------


@cli.group()
def cache() -> None:
    """The request cache that runs share."""


def _cache_root(command: F) -> F:
    return click.option(
        "--root", default=None, help="Default: $GRADELOOM_HOME/cache, else .gradeloom/cache."
    )(command)


@cache.command("stats")
@_cache_root
@json_option
def cache_stats(root: str | None, as_json: bool) -> None:
    """How much it holds."""
    from gradeloom.flows import show
    from gradeloom.tasks.engine.models import home
    from gradeloom.tasks.engine.store import RequestCache

    folder = Path(root) if root else home() / "cache"
    if not folder.is_dir():
        raise InputError("no request cache here", file=folder)
    with RequestCache(folder) as store:
        found = {"path": folder, **show.fields(store.stats())}
    if as_json:
        click.echo(show.as_json(found))
    else:
        show.facts(found)


@cache.command("prune")
@click.option("--older-than", type=click.FloatRange(min=0), metavar="DAYS", required=True)
@_cache_root
@json_option
def cache_prune(older_than: float, root: str | None, as_json: bool) -> None:
    """Forget completions that were stored more than DAYS ago."""
    from gradeloom.flows import show
    from gradeloom.tasks.engine.models import home
    from gradeloom.tasks.engine.store import RequestCache

    folder = Path(root) if root else home() / "cache"
    if not folder.is_dir():
        raise InputError("no request cache here", file=folder)
    with RequestCache(folder) as store:
        removed = store.prune(older_than)
    if as_json:
        click.echo(show.as_json({"path": folder, "removed": removed}))
    else:
        show.facts({"path": folder, "removed completions": removed})


# --- ui and doctor ----------------------------------------------------------------------------


@cli.command()
@click.option("--port", type=click.IntRange(1, 65535), default=4200, show_default=True)
@click.option("--background", is_flag=True, help="Start it, wait until it answers, return.")
@click.option("--stop", "stopping", is_flag=True, help="Stop the one that runs.")
@json_option
def ui(port: int, background: bool, stopping: bool, as_json: bool) -> None:
    """The local Prefect server: runs that start while it is there are recorded in it."""
    from gradeloom.flows import server, show

    def answer(state: str, running: server.LocalServer | None) -> None:
        url = running.url if running else None
        if as_json:
            click.echo(show.as_json({"state": state, "url": url, "pid": running.pid if running else None}))
        else:
            click.echo(f"Prefect UI: {state}" + (f": {url}" if url else ""))

    running = server.running()
    if stopping:
        if running is not None:
            server.stop(running)
        answer("stopped" if running else "not running", None)
        return
    if running is not None:
        answer("already running", running)
        return
    say("starting the Prefect server …")
    running = server.start(port)
    if background:
        answer("started", running)
        return
    try:
        answer("running, Ctrl-C stops it", running)
        server.wait(running)
        raise GradeloomError(f"the Prefect server ended by itself; see {server.log_file()}")
    except KeyboardInterrupt:
        say("stopped")
    finally:
        server.stop(running)


@cli.command()
@json_option
def doctor(as_json: bool) -> int:
    """What is there (CPU/GPU, engine, model, Prefect, disk), and what to do about what is not."""
    from gradeloom.flows import show
    from gradeloom.flows.doctor import could_run, examine

    found = examine()
    ready = could_run(found)
    if as_json:
        click.echo(show.as_json({"ready": ready, "checks": found}))
    else:
        show.checks(found, ready=ready)
    return 0 if ready else InputError.exit_code


if __name__ == "__main__":
    main()
