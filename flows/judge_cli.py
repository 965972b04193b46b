"""`gradeloom judge calibrate`. As in `cli.py`, everything but click is imported by the command."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from gradeloom.flows.options import config_options, json_option, quiet_option, wait_for
from gradeloom.schemas.errors import InputError

if TYPE_CHECKING:
    from gradeloom.flows.judge import JudgeResult
    from gradeloom.flows.orchestrate import Ran
    from gradeloom.schemas.calibration import JudgeRunConfig
    from gradeloom.tasks.evaluate.calibration import Human


def _input(context: click.Context, option: click.Parameter, value: str | None) -> str | None:
    """A file to read; `samples:NAME` is one of gradeloom's own."""
    from gradeloom.flows.configure import bundled_sample

    sample = bundled_sample(value) if value is not None else None
    return value if sample is None else str(sample)


@click.group()
def judge() -> None:
    """The judge: how well its grades agree with people's."""


@judge.command("calibrate")
@click.option("--qrels", required=True, metavar="FILE", callback=_input,
              help="Grades of people: TREC, BEIR or Parquet.")  # fmt: skip
@click.option("--labels", metavar="FILE", callback=_input,
              help="The judge's labels, in any of these forms; below 0 is an abstention.")  # fmt: skip
@click.option(
    "--judge", "named", metavar="NAME", help="With --labels: whose they are; default: the file's name."
)
@click.option("--queries", metavar="FILE", callback=_input, help="With --config: texts of the queries.")
@click.option("--corpus", metavar="FILE", callback=_input, help="With --config: texts of the passages.")
@partial(config_options, packaged="judge-demo", example="--set judge.min_mass=0.3", required=False)
@click.option("--domain", metavar="NAME", help="What the queries are about, for the release's card.")
@click.option("--limit", type=click.IntRange(min=1), metavar="N", help="Only the first N queries of --qrels.")
@click.option("--binary-at", type=int, default=2, show_default=True, metavar="GRADE",
              help="Relevant from this grade on, for the binary kappa.")  # fmt: skip
@click.option("--run", "runs", multiple=True, metavar="FILE|FOLDER",
              help="TREC runs to rank by nDCG@10 under both. May be given again.")  # fmt: skip
@click.option("--gain-offset", type=float, default=0, show_default=True, metavar="GRADE",
              help="Taken off every grade to get its gain; 1 for grades 1-4.")  # fmt: skip
@click.option("--isotonic", metavar="FILE", help="Also map expected grades as fitted on another set.")
@click.option("--fit-isotonic", metavar="FILE", help="Fit such a mapping on these labels and write it.")
@click.option("--out", metavar="FILE", help="Write the figures as JSON.")
@click.option("--plot", metavar="FILE", help="Write a picture (PNG).")
@quiet_option
@json_option
def calibrate(
    qrels: str, labels: str | None, named: str | None, queries: str | None, corpus: str | None,
    config_name: str | None, sets: tuple[str, ...], domain: str | None, limit: int | None, binary_at: int,
    runs: tuple[str, ...], gain_offset: float, isotonic: str | None, fit_isotonic: str | None,
    out: str | None, plot: str | None, quiet: bool, as_json: bool,
) -> None:  # fmt: skip
    """Compare a judge's grades with people's, by a file of its labels or by asking it.

    Asking it can be stopped at any time; the same command goes on where it was.
    """
    from gradeloom.flows import show, show_judge
    from gradeloom.flows.configure import read_config
    from gradeloom.flows.judge import calibrate as figures
    from gradeloom.flows.judge import read_mapping, read_runs
    from gradeloom.schemas.calibration import JudgeRunConfig, LabelFileJudge
    from gradeloom.tasks.collection import read_qrels
    from gradeloom.tasks.evaluate.calibration import file_identity, human_labels, read_labels
    from gradeloom.tasks.evaluate.isotonic import fit_isotonic as fitted
    from gradeloom.tasks.run import write_bytes_whole, write_whole

    _require_one_judge(labels, queries, corpus, config_name, sets)
    if named is not None and labels is None:
        raise InputError("names the judge of a file of labels; a judge that is asked has its `name`",
                         field="--judge")  # fmt: skip
    _require_places((qrels, labels, queries, corpus, config_name, isotonic), (out, plot, fit_isotonic))
    systems = read_runs(runs)
    human = human_labels(qrels, read_qrels(qrels), limit=limit)
    mapped = None if isotonic is None else read_mapping(isotonic, human)
    ran = None
    if labels is not None:
        said = read_labels(labels, human)
        who: Any = LabelFileJudge(name=named or _stem(labels), labels=file_identity(labels))
    else:
        assert queries is not None
        assert corpus is not None
        ran = _ask(read_config(JudgeRunConfig, config_name, sets), human, qrels, queries, corpus, quiet)
        said, who = ran.result.labels, ran.result.judge
    calibration = figures(
        human, said, who, domain=domain, binary_at=binary_at, runs=systems, gain_offset=gain_offset,
        isotonic=mapped,
    )  # fmt: skip
    if fit_isotonic is not None:
        mapping = fitted(human, said, judge=who, domain=domain)
        write_bytes_whole(Path(fit_isotonic), f"{mapping.model_dump_json(indent=2)}\n".encode())
    if out is not None:
        write_bytes_whole(Path(out), f"{calibration.model_dump_json(indent=2)}\n".encode())
    if plot is not None:
        from gradeloom.tasks.evaluate.plot_calibration import plot_calibration

        write_whole(Path(plot), lambda temporary: plot_calibration(calibration, temporary))
    usage = ran.result.usage if ran is not None else None
    if as_json:
        url = ran.flow_run_url if ran is not None else None
        click.echo(show.as_json(calibration.model_dump(mode="json") | {"usage": usage, "flow_run_url": url}))
    else:
        written = {"figures": out, "picture": plot, "mapping": fit_isotonic}
        show_judge.calibrated(calibration, usage, {what: file for what, file in written.items() if file})


def _require_one_judge(
    labels: str | None, queries: str | None, corpus: str | None, config: str | None, sets: tuple[str, ...]
) -> None:
    asked = {"--queries": queries, "--corpus": corpus, "--config": config}
    missing = [name for name, value in asked.items() if value is None]
    if labels is not None and (len(missing) < len(asked) or sets):
        raise InputError("give --labels, or a judge to ask (--queries, --corpus, --config); not both")
    if labels is None and missing:
        raise InputError(f"give --labels, or a judge to ask: {', '.join(asked)} ({missing[0]} is missing)")


def _require_places(inputs: Iterable[str | None], outputs: Iterable[str | None]) -> None:
    """Nothing that is written may lie where something else does."""
    taken = {Path(path).resolve() for path in inputs if path is not None}
    for path in outputs:
        if path is None:
            continue
        if Path(path).resolve() in taken:
            raise InputError("is named twice; what is written needs a file of its own", file=path)
        taken.add(Path(path).resolve())


def _stem(path: str) -> str:
    return Path(Path(path).name.removesuffix(".gz")).stem


def _ask(
    config: JudgeRunConfig, human: Human, qrels: str, queries: str, corpus: str, quiet: bool
) -> Ran[JudgeResult]:
    from gradeloom.flows.judge import judge_named, run_judge
    from gradeloom.flows.orchestrate import run_flow
    from gradeloom.flows.progress import Progress
    from gradeloom.schemas.retriever import CollectionConfig
    from gradeloom.tasks.collection import read_collection
    from gradeloom.tasks.evaluate.calibration import file_identity

    collection = read_collection(CollectionConfig(queries=queries, corpus=corpus, qrels=qrels))
    compose = partial(
        run_judge, collection=collection, human=human, files=(file_identity(queries), file_identity(corpus))
    )
    with Progress(quiet=quiet) as progress:
        return wait_for(run_flow(config, named=judge_named(config), progress=progress, compose=compose))
