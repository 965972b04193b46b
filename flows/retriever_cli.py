"""`gradeloom retriever`: train, evaluate, mine, probe.

As in `cli.py`, everything but click is imported by the command that needs it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import click

from gradeloom.flows.options import config_options, hush_libraries, json_option, quiet_option, wait_for

if TYPE_CHECKING:
    from gradeloom.flows.orchestrate import Composition, Named, Ran, Result
    from gradeloom.schemas.config import Settings

F = TypeVar("F", bound=Callable[..., Any])
C = TypeVar("C", bound="Settings")
R = TypeVar("R", bound="Result")


def _options(packaged: str, example: str, *, required: bool = True) -> Callable[[F], F]:
    return partial(config_options, packaged=packaged, example=example, required=required)


def _run(config: C, named: Named, compose: Composition[C, R], quiet: bool) -> Ran[R]:
    from gradeloom.flows.orchestrate import run_flow
    from gradeloom.flows.progress import Progress

    with Progress(quiet=quiet) as progress:
        return wait_for(run_flow(config, named=named, progress=progress, compose=compose))


def _echo(facts: dict[str, Any], flow_run_url: str | None) -> None:
    from gradeloom.flows import show

    click.echo(show.as_json(facts | {"flow_run_url": flow_run_url}))


@click.group()
def retriever() -> None:
    """Retrievers: train on graded data, evaluate against human grades, mine negatives."""
    hush_libraries()


@retriever.command("train")
@_options("retriever-demo", "--set training.epochs=3, --set data.0.release=NAME@VERSION")
@click.option("--processes", type=click.IntRange(min=1), default=1, show_default=True, metavar="N",
              help="Training processes, one per device (GPU).")  # fmt: skip
@quiet_option
@json_option
def train(config_name: str, sets: tuple[str, ...], processes: int, quiet: bool, as_json: bool) -> int:
    """Train a retriever, evaluated before and after. Started again after anything, it goes on."""
    from gradeloom.flows import show_retriever
    from gradeloom.flows.configure import read_config
    from gradeloom.flows.retriever import retriever_named, run_retriever
    from gradeloom.schemas.retriever import RetrieverConfig

    config = read_config(RetrieverConfig, config_name, sets)
    compose = partial(run_retriever, processes=processes)
    ran = _run(config, retriever_named(config), compose, quiet)
    if as_json:
        _echo(ran.result.as_json(), ran.flow_run_url)
    else:
        show_retriever.trained(ran.result, ran.flow_run_url)
    return 0


@retriever.command("evaluate")
@_options("retriever-evaluate", "--set measures.depth=100", required=False)
@click.option("--retriever", "retrievers", multiple=True, metavar="NAME=MODEL",
              help="One more retriever: `bundled`, a folder, or a hub name. May be given again.")  # fmt: skip
@quiet_option
@json_option
def evaluate(
    config_name: str | None, sets: tuple[str, ...], retrievers: tuple[str, ...], quiet: bool, as_json: bool
) -> int:
    """Compare retrievers and BM25 on test collections."""
    from gradeloom.flows import show_retriever
    from gradeloom.flows.configure import read_config
    from gradeloom.flows.evaluate import evaluate_named, run_evaluate, with_retrievers
    from gradeloom.schemas.retriever import EvaluateConfig

    config = with_retrievers(read_config(EvaluateConfig, config_name, sets), retrievers)
    ran = _run(config, evaluate_named(config), run_evaluate, quiet)
    if as_json:
        _echo(ran.result.as_json(), ran.flow_run_url)
    else:
        show_retriever.evaluated(ran.result)
    return 0


@retriever.command("mine")
@_options("retriever-mine", "--set count=4, --set out=FILE.parquet")
@quiet_option
@json_option
def mine(config_name: str, sets: tuple[str, ...], quiet: bool, as_json: bool) -> int:
    """Find hard negatives for a collection's queries; write them as a file of judgements."""
    from gradeloom.flows import show, show_retriever
    from gradeloom.flows.configure import read_config
    from gradeloom.flows.mine import mine_named, run_mine
    from gradeloom.schemas.retriever import MineConfig

    config = read_config(MineConfig, config_name, sets)
    ran = _run(config, mine_named(config), run_mine, quiet)
    if as_json:
        _echo(show.fields(ran.result), ran.flow_run_url)
    else:
        show_retriever.mined(ran.result)
    return ran.result.exit_code


@retriever.command("probe")
@_options("retriever-recorded", "--set training.max_steps=50")
@click.option("--release", "which", required=True, metavar="WHICH", help="NAME, NAME@VERSION or a folder.")
@click.option("--parent", metavar="WHICH", help="What to compare with; default: the release's parent.")
@quiet_option
@json_option
def probe(
    config_name: str, sets: tuple[str, ...], which: str, parent: str | None, quiet: bool, as_json: bool
) -> int:
    """Would more queries help? Small trainings on a quarter, half, all of a release, and on its parent."""
    from gradeloom.flows import show_retriever
    from gradeloom.flows.configure import read_config
    from gradeloom.flows.probe import probe_named, run_probe
    from gradeloom.schemas.retriever import RetrieverConfig

    config = read_config(RetrieverConfig, config_name, sets)
    compose = partial(run_probe, release=which, parent=parent)
    ran = _run(config, probe_named(config, which), compose, quiet)
    if as_json:
        _echo(ran.result.as_json(), ran.flow_run_url)
    else:
        show_retriever.probed(ran.result)
    return 0
