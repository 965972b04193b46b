"""Training a retriever on graded lists, on sentence-transformers' trainer.

    <folder>/
      lock                   held while a process trains here
      training.json          what decides the trained weights; another training is refused
      checkpoints/           checkpoint-N, whole; partial/ is being written; gone when the training has ended
      curve.json, curve.png  loss and dev measures, when the training has ended
      model/                 the trained model; put in place last: where it is, the training has ended

Started again, a training goes on from its last checkpoint: same step, same data order, same random state.
"""

from __future__ import annotations

import hashlib
import math
import os
import shutil
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import orjson
import torch
from accelerate.utils import broadcast_object_list  # type: ignore[import-untyped]
from sentence_transformers import SentenceTransformer
from sentence_transformers.base.evaluation import SentenceEvaluator
from transformers import set_seed

from gradeloom.schemas.config import content_view
from gradeloom.schemas.errors import InputError
from gradeloom.schemas.retriever import RetrieverConfig, TrainingConfig
from gradeloom.tasks.encoder import Encoder
from gradeloom.tasks.run import RunDirectory, write_bytes_whole
from gradeloom.tasks.train.adapt import merge_adapters, prepare_model
from gradeloom.tasks.train.batches import DistinctQueries, ListCollator, text_limits
from gradeloom.tasks.train.card import write_card
from gradeloom.tasks.train.curve import curve_of, read_curve, write_curve
from gradeloom.tasks.train.graded_qrels import TrainingLists
from gradeloom.tasks.train.losses import GradedListLoss
from gradeloom.tasks.train.trainer import (
    PARTIAL,
    ListTrainer,
    Progress,
    put_in_place,
    training_arguments,
    whole_checkpoints,
)

VERSION = 1
"""Raise it when the same settings and data would train other weights."""

MODEL, CHECKPOINTS, RECIPE = "model", "checkpoints", "training.json"
PARTS = 10  # of a run: one evaluation and one checkpoint each
LOGGED = 500  # points of the loss curve, about


@dataclass(frozen=True)
class Trained:
    """A training that has ended.

    Attributes:
        folder: of the trained model, as sentence-transformers saves it, with its card.
        steps: of the optimiser.
        curve: one row per evaluation: `step`, `loss` (mean since the row before; None at step 0) and the
            dev measures by name. The same is in `curve.json` beside the model.
    """

    folder: Path
    steps: int
    curve: list[dict[str, Any]]


def train_retriever(
    encoder: Encoder,
    data: TrainingLists,
    config: RetrieverConfig,
    *,
    folder: Path,
    evaluator: SentenceEvaluator | None = None,
    facts: Mapping[str, Any] | None = None,
    progress: Progress | None = None,
) -> Trained:
    """Train in a folder, going on from whatever whole checkpoint is there; a finished training is read back.

    The same call runs in one process (CPU or one GPU) and in each of several that `accelerate launch` or
    `python -m torch.distributed.run` started; then only the first writes, and all return. With
    `config.training.gather` (the default) W processes of B queries compute the loss and the data order of
    one process of W*B queries, except that an epoch's last step is left out where it is not full on all, and
    that dropout draws otherwise. Without dropout the weights are equal up to rounding, save for those whose
    gradient is rounding alone (the bias of BERT's attention keys), which Adam moves by whole steps.

    Args:
        encoder: the start; its weights are changed.
        data: the lists.
        config: loss, training and encoder settings are used, and the name on the card.
        folder: for this training alone.
        evaluator: run at step 0, every `eval_steps` and at the end; see its `primary_metric`.
        facts: for the card: `data` (source -> identity), `accounting` (source -> counts).
        progress: hears (step, steps, last mean loss) after every step.

    Raises:
        InputError: the folder holds another training or another process works there; a setting does not
            fit model, data or device; the loss is no longer finite.
    """
    recipe = _recipe(encoder, data, config)
    if not _finished(folder):
        first = os.environ.get("RANK", "0") == "0"
        with RunDirectory(folder).locked() if first else nullcontext():
            _claim(folder, recipe, first)
            if not _finished(folder):  # by whoever held the lock before
                _train(encoder, data, config, folder, evaluator, _told(recipe, data, facts), progress)
    _compare(folder, recipe)
    curve = read_curve(folder)
    return Trained(folder / MODEL, curve.steps, curve.rows)


def _finished(folder: Path) -> bool:
    return (folder / MODEL).is_dir()


# --- what is trained, and whether it is the same ------------------------------------------------


def _recipe(encoder: Encoder, data: TrainingLists, config: RetrieverConfig) -> dict[str, Any]:
    """Everything that decides the trained weights."""
    return {
        "version": VERSION,
        "start": weights_digest(encoder.model),
        "data": data.digest,
        "encoder": {
            "query_tokens": encoder.config.query_tokens,
            "passage_tokens": encoder.config.passage_tokens,
            "query_prompt": encoder.query_prompt,
            "passage_prompt": encoder.passage_prompt,
        },
        "loss": [content_view(term) for term in config.loss],
        "training": content_view(config.training),
        "processes": _processes(),
    }


def _told(recipe: dict[str, Any], data: TrainingLists, facts: Mapping[str, Any] | None) -> dict[str, Any]:
    """What the card is told, beside the settings."""
    return {
        **(facts or {}),
        "start": recipe["start"],
        "processes": recipe["processes"],
        "lists": len(data.lists),
        "width": data.width,
        "data_digest": data.digest,
    }


def _processes() -> int:
    """Processes that a launcher has started, before any of them has met the others."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def weights_digest(model: SentenceTransformer) -> str:
    """32 hex digits over names, types, shapes and values of a model's weights."""
    h = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        h.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        h.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return h.hexdigest()[:32]


def _claim(folder: Path, recipe: dict[str, Any], first: bool) -> None:
    """Make the folder this training's own.

    Raises:
        InputError: it holds another one.
    """
    if (folder / RECIPE).exists():
        _compare(folder, recipe)
    elif first:
        told = orjson.dumps(recipe, option=orjson.OPT_INDENT_2)
        write_bytes_whole(folder / RECIPE, told)


def _compare(folder: Path, recipe: dict[str, Any]) -> None:
    """Check that the training in a folder is this one.

    Raises:
        InputError: it is another one; the message says what differs.
    """
    file = folder / RECIPE
    try:
        there = _flat(orjson.loads(file.read_bytes()))
    except (OSError, ValueError) as error:
        raise InputError("cannot be read; delete the folder to train again", file=file) from error
    here = _flat(orjson.loads(orjson.dumps(recipe)))
    if _finished(folder):  # may be read by one process, whatever number it took
        here["processes"] = there.get("processes")
    different = [
        f"{name} ({_short(there.get(name))} there, {_short(here.get(name))} here)"
        for name in {**here, **there}
        if here.get(name) != there.get(name)
    ]
    if different:
        raise InputError(
            f"holds another training; what differs: {', '.join(different)}. Train into another folder, or "
            "delete this one",
            file=folder,
        )


def _flat(value: Any, name: str = "") -> dict[str, Any]:
    """Nested settings as dotted names."""
    parts: Mapping[str, Any]
    if isinstance(value, dict):
        parts = value
    elif isinstance(value, list) and any(isinstance(part, dict) for part in value):
        parts = {str(n): part for n, part in enumerate(value)}
    else:
        return {name: value}
    flat: dict[str, Any] = {}
    for key, part in parts.items():
        flat |= _flat(part, f"{name}.{key}" if name else key)
    return flat


def _short(value: Any) -> str:
    text = "none" if value is None else str(value)
    return text if len(text) <= 24 else f"{text[:8]}…"


# --- training -----------------------------------------------------------------------------------


def _train(
    encoder: Encoder,
    data: TrainingLists,
    config: RetrieverConfig,
    folder: Path,
    evaluator: SentenceEvaluator | None,
    about: Mapping[str, Any],
    progress: Progress | None,
) -> None:
    """Train from the last whole checkpoint to the end; the first process writes curve and model."""
    settings = config.training
    steps = total_steps(len(data.lists), settings, _processes())
    every = settings.eval_steps or math.ceil(steps / PARTS)
    trainer = _trainer(encoder, data, config, folder / CHECKPOINTS, steps, every, evaluator, progress)
    found: tuple[int, str] | None = None
    if trainer.is_world_process_zero():
        shutil.rmtree(trainer.partial, ignore_errors=True)  # half-written by a killed process
        there = whole_checkpoints(trainer.checkpoints)
        found = (there[-1][0], str(there[-1][1])) if there else None
    # One process looks, so that all go on from the same.
    step, checkpoint = broadcast_object_list([found])[0] or (0, None)
    if checkpoint is None or step < steps:
        trainer.args.eval_on_start = evaluator is not None and checkpoint is None
        with text_limits(encoder):
            trainer.train(resume_from_checkpoint=checkpoint)
    else:  # killed between the last step and the end; transformers would take one more
        trainer.load(Path(checkpoint))
    if trainer.is_world_process_zero():
        measure = getattr(evaluator, "primary_metric", None)
        curve = curve_of(trainer.state.log_history, steps=steps, every=every, measure=measure)
        write_curve(folder, curve)
        encoder.model.eval()
        merge_adapters(encoder.model)
        made = trainer.partial / MODEL
        encoder.model.save_pretrained(str(made), create_model_card=False)
        write_card(made, encoder, config, curve, about)
        put_in_place(made, folder / MODEL)
        shutil.rmtree(trainer.checkpoints)
    trainer.accelerator.wait_for_everyone()


def _trainer(
    encoder: Encoder,
    data: TrainingLists,
    config: RetrieverConfig,
    checkpoints: Path,
    steps: int,
    every: int,
    evaluator: SentenceEvaluator | None,
    progress: Progress | None,
) -> ListTrainer:
    settings, device = config.training, encoder.model.device
    if _processes() == 1 and device.type == "cuda" and device.index not in (None, 0):
        raise InputError(
            f"training takes the first GPU that it sees, not {device}; choose by CUDA_VISIBLE_DEVICES",
            field="encoder.device",
        )
    args = training_arguments(
        output_dir=str(checkpoints / PARTIAL),
        use_cpu=device.type == "cpu",
        dataloader_pin_memory=device.type == "cuda",
        per_device_train_batch_size=settings.batch_size,
        max_steps=steps,
        learning_rate=settings.learning_rate,
        warmup_steps=math.ceil(settings.warmup * steps),
        weight_decay=settings.weight_decay,
        bf16=settings.precision == "bf16",
        fp16=settings.precision == "fp16",
        seed=settings.seed,
        batch_sampler=partial(DistinctQueries, devices=_processes()),
        dataloader_drop_last=_processes() > 1,
        # `prepare_model` freezes what has no gradient, so that nobody need look for it in every step.
        ddp_find_unused_parameters=False,
        logging_steps=max(1, steps // LOGGED),
        eval_strategy="no" if evaluator is None else "steps",
        eval_steps=every,
        save_strategy="steps",
        save_steps=settings.save_steps or math.ceil(steps / PARTS),
    )
    set_seed(settings.seed)  # before adapters get weights
    prepare_model(encoder.model, settings)
    return ListTrainer(
        keep=settings.keep_checkpoints,
        progress=progress,
        model=encoder.model,
        args=args,
        train_dataset=data.dataset(),
        evaluator=evaluator,
        data_collator=ListCollator(encoder, data.width),
        loss=GradedListLoss(encoder.model, config.loss, chunk=settings.chunk, gather=settings.gather),
    )


def total_steps(lists: int, training: TrainingConfig, processes: int = 1) -> int:
    """Optimiser steps of a training: `max_steps`, else `epochs` times the batches of one.

    An epoch's last batch may be smaller; with several processes it is left out.

    Raises:
        InputError: fewer lists than the processes need for one step.
    """
    queries = training.batch_size * processes
    if lists < 1 or (processes > 1 and lists < queries):
        raise InputError(
            f"{lists} lists to train on; expected at least {queries if processes > 1 else 1}: one per query "
            "of a step",
            field="data",
        )
    per_epoch = lists // queries if processes > 1 else math.ceil(lists / queries)
    return training.max_steps or math.ceil(training.epochs * per_epoch)
