"""The retriever flow: graded data in, a trained retriever and what it is worth out.

    data -> evaluate (before, BM25) -> train -> evaluate (after) -> source bias -> card

    <root>/<name>/
      lock
      run.json           what was asked for
      training/          model/, the learning curve, and checkpoints until the model is there
      evaluation/        table, values per query, plot, runs
      bias-*.json        source bias before and after
    <root>/.cells/       one retriever on one set: run and values, named by what decides them; shared

Every part that is there is not done again: a killed training goes on from its checkpoint, and the
same command after the end does nothing but show it again.
"""

from __future__ import annotations

import asyncio
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import orjson

from gradeloom.flows.concurrency import Thread
from gradeloom.flows.evaluate import (
    BM25,
    Cells,
    Ranker,
    Report,
    about,
    bm25_ranker,
    check_measures,
    encoder_ranker,
    excluded,
    read_set,
    report_evaluation,
    reporter,
    set_identity,
)
from gradeloom.flows.orchestrate import Named, Orchestration, facts_artifact
from gradeloom.flows.progress import Progress
from gradeloom.schemas.config import NAME, VERSION, content_view
from gradeloom.schemas.errors import GradeloomError, InputError
from gradeloom.schemas.retriever import EncoderConfig, EvaluationSet, RetrieverConfig, TrainingSource
from gradeloom.schemas.rows import digest
from gradeloom.tasks.run import RunDirectory, write_bytes_whole

if TYPE_CHECKING:
    from gradeloom.tasks.collection import Collection
    from gradeloom.tasks.encoder import Encoder
    from gradeloom.tasks.evaluate.retrieval import Evaluation, Row
    from gradeloom.tasks.train.graded_qrels import TrainingLists
    from gradeloom.tasks.train.retriever import Trained

RECIPE = "2"
"""Raise it when the same settings and data would train another model."""

CURVE = "curve.png"

BEFORE, AFTER = "before", "after"
"""The rows of the evaluation, beside BM25."""


@dataclass(frozen=True)
class RetrieverResult:
    """How a training ended.

    Attributes:
        folder: `<root>/<name>`.
        model: the trained model, a sentence-transformers folder.
        steps: optimiser steps.
        accounting: per source of data, what came in and what each transform dropped.
        curve: the measures on `dev` during training, a row per evaluation.
        evaluation: on `sets`, before and after; None without sets.
        bias: source bias before, after, and its change; None without twins.
    """

    folder: Path
    model: Path
    steps: int
    accounting: dict[str, dict[str, int]]
    curve: list[dict[str, Any]]
    evaluation: Evaluation | None
    bias: dict[str, Any] | None
    seconds: float

    @property
    def stopped(self) -> str | None:
        return None

    @property
    def ended(self) -> str:
        return f"trained: {self.model}"

    def as_json(self) -> dict[str, Any]:
        """Plain values for `--json`."""
        return {
            "folder": self.folder, "model": self.model, "steps": self.steps, "data": self.accounting,
            "curve": self.curve, "evaluation": self.evaluation.as_json() if self.evaluation else None,
            "source_bias": self.bias, "seconds": self.seconds,
        }  # fmt: skip

    async def report(self, tasks: Orchestration) -> None:
        """Publish the results, the learning curve, and where the model lies."""
        if self.evaluation is not None:
            await report_evaluation(tasks, self.evaluation, self.folder / "evaluation")
        data = [{"source": name, **counts} for name, counts in self.accounting.items()]
        await tasks.table("retriever-data", data, "What was trained on.")
        for name, plot in self.plots():
            await tasks.image(f"retriever-{name}", plot, "Measures on the dev set during training.")
        facts: dict[str, Any] = {"model": self.model.resolve(), "steps": self.steps}
        await facts_artifact(tasks, "retriever-report", facts, "How the training ended.")
        await tasks.link("retriever-model", self.model.resolve().as_uri(), str(self.model), "The model.")

    def plots(self) -> list[tuple[str, Path]]:
        """What there is to look at, by name."""
        found = {"plot": self.folder / "evaluation" / "plot.png", "curve": self.folder / "training" / CURVE}
        return [(name, path) for name, path in found.items() if path.exists()]


def retriever_named(config: RetrieverConfig) -> Named:
    """What Prefect shows of a training."""
    return Named("retriever", "Graded data in, a trained retriever and what it is worth out.", config.name)


def with_release(config: RetrieverConfig, release: str) -> RetrieverConfig:
    """A configuration that trains on another release: what an automation on a new release asks for.

    The source that names a release of the same name gives way to it, or the only source that names a
    release at all. The retriever's name gets the release's version, for its folder holds one training.

    Args:
        config: with at least one release among its data.
        release: `name@version`.

    Raises:
        InputError: not of that form, or it is not clear which source gives way.
    """
    name, _, version = release.partition("@")
    if not NAME.fullmatch(name) or not VERSION.fullmatch(version):
        raise InputError(f"expected NAME@VERSION, got '{release}'", field="release")
    named = [i for i, source in enumerate(config.data) if source.release is not None]
    same = [i for i in named if str(config.data[i].release).partition("@")[0] == name]
    chosen = same or named
    if len(chosen) != 1:
        raise InputError(
            f"expected one source of data that is a release of '{name}', or one release at all; found "
            f"{len(chosen)}",
            field="data",
        )
    data = list(config.data)
    data[chosen[0]] = data[chosen[0]].model_copy(update={"release": release})
    called = f"{config.name}-{version}" if same else f"{config.name}-{name}-{version}"
    if not NAME.fullmatch(called):
        raise InputError(f"'{called}' is too long for a name; give the retriever a shorter one", field="name")
    return config.model_copy(update={"data": tuple(data), "name": called})


# --- the flow -------------------------------------------------------------------------------


async def run_retriever(
    config: RetrieverConfig, *, progress: Progress, tasks: Orchestration, processes: int = 1
) -> RetrieverResult:
    """Train a retriever and evaluate it before and after, going on from whatever is there.

    Args:
        config: what to train, on what, and how to measure it.
        progress: hears of everything that takes time.
        tasks: searches and the training are shards of it.
        processes: of the training, one per device.

    Raises:
        InputError: a model, a collection or a setting is not as it must be, or the folder holds a
            retriever that was trained with other settings or data.
    """
    started = time.time()
    check_measures(config.measures, [BEFORE, AFTER, *([BM25] if config.measures.bm25 else [])])
    _twins_set(config)
    folder = Path(config.root) / config.name
    with RunDirectory(folder).locked() as run:
        data = await Thread().run(lambda: read_material(config))
        run.describe(await Thread().run(lambda: _description(config, data, tasks, run.path)))
        load = cache(lambda: load_encoder(config.encoder))
        cells = Cells(folder.parent, config.sets, config.measures, config.releases, progress, tasks)
        start = encoder_ranker(BEFORE, config.encoder, load=load)
        before = await cells.rows([start, *([bm25_ranker()] if config.measures.bm25 else [])])
        trained = await train(
            config, data, folder / "training", progress=progress, tasks=tasks, load=load,
            processes=processes,
        )  # fmt: skip
        model = model_config(config.encoder, trained.folder)
        end = encoder_ranker(AFTER, model)
        after = await cells.rows([end])
        bias = await _source_bias(config, model, folder, progress, tasks)
        found = None
        if config.sets:
            rows = sorted([*before, *after], key=lambda row: (BEFORE, AFTER, BM25).index(row.retriever))
            found = await Thread().run(lambda: _evaluation(config, rows, [start, end], folder))
        result = RetrieverResult(
            folder, trained.folder, trained.steps, data.lists.accounting, trained.curve, found,
            bias, round(time.time() - started, 3),
        )  # fmt: skip
        await Thread().run(lambda: _finish_card(result))
    return result


def _description(
    config: RetrieverConfig, data: Material, tasks: Orchestration, folder: Path
) -> dict[str, object]:
    """What `run.json` holds; its `recipe` is everything that decides the trained model.

    Raises:
        InputError: the folder holds a training by another recipe.
    """
    from gradeloom.tasks.encoder import encoder_identity

    encoder = content_view(config.encoder) | {"model": encoder_identity(config.encoder), "revision": None}
    loss = [content_view(term) for term in config.loss]
    dev = None
    if config.dev is not None and data.dev is not None:  # the learning curve is of it
        dev = set_identity(config.dev, data.dev, excluded(config.dev))
    parts = [RECIPE, encoder, data.lists.digest, loss, content_view(config.training), dev]
    recipe = digest(orjson.dumps(parts, option=orjson.OPT_SORT_KEYS))
    file = folder / "run.json"
    there = (folder / "training").exists() and file.exists()
    if there and orjson.loads(file.read_bytes()).get("recipe") != recipe:
        raise InputError(
            "holds a training with other settings, data, dev set or start; name this one differently "
            "(--set name=…), or delete that one",
            file=folder,
        )
    return {
        "name": config.name,
        "recipe": recipe,
        "config": content_view(config),
        "data": data.sources,
        "flow_run": tasks.flow_run_url or tasks.flow_run,
    }


def _evaluation(
    config: RetrieverConfig, rows: Sequence[Row], rankers: Sequence[Ranker], folder: Path
) -> Evaluation:
    """The evaluation of the rows, written."""
    from gradeloom.tasks.evaluate.retrieval import evaluation

    measures = config.measures
    found = evaluation(
        rows, baseline=measures.baseline, permutations=measures.permutations, seed=measures.seed,
        about=about(config.sets, rankers),
    )  # fmt: skip
    found.write(folder / "evaluation")
    return found


# --- source bias ----------------------------------------------------------------------------


def _twins_set(config: RetrieverConfig) -> EvaluationSet | None:
    """The set that the twins belong to; None without twins.

    Raises:
        InputError: no set has that name.
    """
    if config.twins is None:
        return None
    sets = {one.name: one for one in (*config.sets, *([config.dev] if config.dev is not None else []))}
    name = config.twins_set or next(iter(sets), "")
    if name not in sets:
        raise InputError(
            f"there is no set '{name}'; expected one of: {', '.join(sets) or 'none'}", field="twins_set"
        )
    return sets[name]


async def _source_bias(
    config: RetrieverConfig, model: EncoderConfig, folder: Path, progress: Progress, tasks: Orchestration
) -> dict[str, Any] | None:
    """Source bias before and after, both by models that are loaded for it: training has changed the first."""
    from gradeloom.tasks.encoder import encoder_identity

    one = _twins_set(config)
    if one is None or config.twins is None:
        return None
    try:
        twins = Path(config.twins).read_bytes()
    except OSError as error:
        raise InputError(f"cannot be read: {error.strerror}", file=config.twins, field="twins") from error
    collection = await Thread().run(lambda: read_set(one, config.releases))
    seen = [
        RECIPE, encoder_identity(config.encoder), encoder_identity(model),
        set_identity(one, collection, None), config.measures.seed,
    ]  # fmt: skip
    key = digest(orjson.dumps(seen, option=orjson.OPT_SORT_KEYS), twins)
    path = folder / f"bias-{key}.json"
    if not path.exists():
        progress.say(f"source bias before and after, on {one.name}")
        thread = Thread()
        await tasks.shard(
            "source bias", 0, lambda: thread.run(lambda: _measure_bias(config, one, collection, model, path))
        )
    found: dict[str, Any] = orjson.loads(path.read_bytes())
    return found


def _measure_bias(
    config: RetrieverConfig, one: EvaluationSet, collection: Collection, model: EncoderConfig, path: Path
) -> None:
    from gradeloom.tasks.evaluate.bias import bias_change, read_twins, source_bias

    twins = read_twins(str(config.twins))
    seed = config.measures.seed
    measured = partial(
        source_bias, collection=collection, twins=twins, gain_offset=one.gain_offset, seed=seed
    )
    before, after = measured(load_encoder(config.encoder)), measured(load_encoder(model))
    change = bias_change(before, after, seed=seed)
    found = {BEFORE: asdict(before), AFTER: asdict(after), "change": asdict(change)}
    write_bytes_whole(path, orjson.dumps(found, option=orjson.OPT_INDENT_2))


# --- training -------------------------------------------------------------------------------


@dataclass(frozen=True)
class Material:
    """What is trained on: the lists, where they are from, and the dev set."""

    lists: TrainingLists
    sources: dict[str, Any]
    dev: Collection | None


def read_material(config: RetrieverConfig) -> Material:
    """Read and mix the data, and the dev set.

    Raises:
        InputError: a collection is not as it must be, or nothing is left to train on.
    """
    from gradeloom.tasks.collection import read_collection

    parts = [(one, read_collection(one, releases=config.releases, name=one.name)) for one in config.data]
    return mixed(config, parts)


def mixed(config: RetrieverConfig, parts: Sequence[tuple[TrainingSource, Collection]]) -> Material:
    """The same from collections that are read already."""
    from gradeloom.tasks.train.graded_qrels import mix

    lists = mix(parts, passages=config.training.passages, seed=config.training.seed)
    sources = {source.name: collection.identity for source, collection in parts}
    dev = read_set(config.dev, config.releases, "dev") if config.dev is not None else None
    return Material(lists, sources, dev)


async def train(
    config: RetrieverConfig, data: Material, folder: Path, *, progress: Progress, tasks: Orchestration,
    load: Callable[[], Encoder], processes: int = 1,
) -> Trained:  # fmt: skip
    """Train in a folder of its own, going on from a checkpoint there.

    Args:
        config: start, loss and training.
        data: what to train on.
        folder: where to.
        progress: hears of steps.
        tasks: the training is a shard of the stage `train`.
        load: gives the start, which is changed by the training.
        processes: more than one start processes that read config and data again by themselves.
    """
    thread = Thread()
    report = reporter(progress, thread, "train", "steps")

    async def work() -> Trained:
        if processes > 1:
            await _in_processes(config, folder, processes)
        return await thread.run(lambda: train_here(config, data, folder, load(), report))

    return await tasks.shard("train", 0, work)


def train_here(
    config: RetrieverConfig, data: Material, folder: Path, encoder: Encoder, report: Report | None
) -> Trained:
    """Train in this process, which may be one of several."""
    from gradeloom.tasks.train.retriever import train_retriever

    facts = {"data": data.sources, "accounting": data.lists.accounting, "config": content_view(config)}
    return train_retriever(
        encoder, data.lists, config, folder=folder, evaluator=_dev_evaluator(config, data.dev), facts=facts,
        progress=None if report is None else lambda step, steps, _: report(step, steps),
    )  # fmt: skip


def _dev_evaluator(config: RetrieverConfig, dev: Collection | None) -> Any:
    if dev is None or config.dev is None:
        return None
    from gradeloom.tasks.evaluate.graded_evaluator import GradedRetrievalEvaluator

    return GradedRetrievalEvaluator(
        dev.queries, dev.passages, dev.qrels, name=config.dev.name, measures=config.measures.measures,
        binary_at=config.dev.binary_at, gain_offset=config.dev.gain_offset, pool=config.dev.pool,
        exclude=excluded(config.dev), depth=config.measures.depth, config=config.encoder, write_csv=False,
    )  # fmt: skip


def model_config(start: EncoderConfig, folder: Path) -> EncoderConfig:
    """A trained model, its text going in as it did in training."""
    return start.model_copy(update={"model": str(folder), "revision": None})


def load_encoder(config: EncoderConfig) -> Encoder:
    """The encoder; nothing heavy is imported before."""
    from gradeloom.tasks import encoder

    return encoder.load_encoder(config)


async def _in_processes(config: RetrieverConfig, folder: Path, processes: int) -> None:
    """Train in processes of their own, one per device, started by torch's launcher.

    Only the training: what is evaluated before and after is evaluated here, so that no process waits
    for another longer than its collectives bear.

    Raises:
        GradeloomError: a process failed; it has said why.
    """
    job = folder / "job.json"
    write_bytes_whole(job, config.model_dump_json(indent=2).encode())
    # What is deprecated in the libraries is no news for whoever trains.
    quiet = {"PYTHONWARNINGS": "ignore::FutureWarning"}
    threads = {"OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // processes))}
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}",
        "-m", "gradeloom.flows.rank", str(job), str(folder),
        env=threads | quiet | dict(os.environ),
    )  # fmt: skip
    try:
        code = await process.wait()
    except asyncio.CancelledError:
        process.terminate()
        await process.wait()
        raise
    if code:
        raise GradeloomError(f"a training process failed (exit code {code}); see above")


def _finish_card(result: RetrieverResult) -> None:
    """Put the results into the model's card."""
    from gradeloom.tasks.train.card import add_results_to_card

    if result.evaluation is not None:
        add_results_to_card(result.model, result.evaluation.table().markdown())
