"""What the commands share: their common options, and how they speak. Imports nothing but click."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

import click

T = TypeVar("T")
F = TypeVar("F", bound=Callable[..., Any])

_SETS = "Change a setting: {example}. VALUE is YAML. May be given again."
_GRADED = "--set run.shard_rows=100, --set filters.1.max_words=60"


def say(text: str) -> None:
    """A line for people, on stderr."""
    from gradeloom.flows.progress import harmless

    click.echo(harmless(text), err=True)


def hush_libraries() -> None:
    """Have Hugging Face's libraries draw no bars of their own: progress is the command's to show."""
    for name in ("HF_HUB_DISABLE_PROGRESS_BARS", "HF_DATASETS_DISABLE_PROGRESS_BARS"):
        os.environ.setdefault(name, "1")  # for those that are yet to be imported
    if "transformers" in sys.modules:
        from transformers.utils.logging import disable_progress_bar

        disable_progress_bar()  # type: ignore[no-untyped-call]
    if "datasets" in sys.modules:
        from datasets import disable_progress_bars

        disable_progress_bars()


def wait_for(work: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine; cancelled from outside (SIGTERM) is interrupted."""
    import asyncio

    try:
        return asyncio.run(work)
    except asyncio.CancelledError:
        raise KeyboardInterrupt from None


def json_option(command: F) -> F:
    """`--json`, as `as_json`."""
    return click.option("--json", "as_json", is_flag=True, help="One JSON object on stdout, nothing else.")(
        command
    )


def root_option(default: str) -> Callable[[F], F]:
    """`--root`: the folder of releases, or of runs."""
    return click.option("--root", default=default, show_default=True, help=f"Folder of {default}.")


def quiet_option(command: F) -> F:
    """`--quiet`."""
    return click.option("--quiet", is_flag=True, help="No progress on stderr.")(command)


def config_options(
    command: F, *, packaged: str = "graded-demo", example: str = _GRADED, required: bool = True
) -> F:
    """`--config` as `config_name`, `--set` as `sets`.

    Args:
        command: gets the options.
        packaged: a configuration that comes with gradeloom, for the help.
        example: changes, for the help.
        required: whether a configuration must be named.
    """
    for option in (
        click.option("--set", "sets", multiple=True, metavar="KEY=VALUE", help=_SETS.format(example=example)),
        click.option("--config", "config_name", required=required, metavar="FILE|NAME",
                     help=f"A YAML file, or a configuration that comes with gradeloom ({packaged})."),
    ):  # fmt: skip
        command = option(command)
    return command
