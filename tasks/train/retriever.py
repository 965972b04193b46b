"""Training a retriever on graded lists, with sentence-transformers' trainer.

<folder>/training.json   what is trained: another training is refused here
<folder>/checkpoints/    checkpoint-N, whole or not there
<folder>/curve.json, curve.png
<folder>/model/          the trained model, last of all
"""

from __future__ import annotations

import math
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import orjson
import torch
from sentence_transformers.base.evaluation import SentenceEvaluator
from torch import nn

from gradeloom.schemas.config import content_view
from gradeloom.schemas.errors import InputError
from gradeloom.schemas.retriever import LoraConfig, RetrieverConfig
from gradeloom.tasks.encoder import Encoder, encoder_identity
from gradeloom.tasks.run import write_whole
from gradeloom.tasks.train.batches import DistinctQueries, ListCollator, text_limits
from gradeloom.tasks.train.card import write_card
from gradeloom.tasks.train.curve import Curve, curve_of, read_curve, write_curve
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

MODEL, CHECKPOINTS, TRAINING = "model", "checkpoints", "training.json"
TIMES = 10
"""Checkpoints and evaluations of a training, where the configuration does not say."""


@dataclass(frozen=True)
class Trained:
    """A finished training.

    Attributes:
        folder: the model, a sentence-transformers folder.
        steps: optimiser steps.
        curve: a row per evaluation: `step`, `loss`, and the dev measures.
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
    """Train in a folder, going on from its last checkpoint; a finished training is only read.

    A training that goes on draws the same lists in the same order as one that was never stopped. Under
    torch.distributed every process calls this with the same arguments; the first one writes. The caller
    keeps other processes out of the folder.

    Args:
        encoder: the start; its model is changed.
        data: the lists.
        config: `loss` and `training`; `name` and `encoder` for the card.
        folder: of this training.
        evaluator: measures the dev set, before the first step and every `eval_steps`.
        facts: for the card: `data` (identity of every source) and `accounting`.
        progress: hears (step, steps, loss).

    Raises:
        InputError: the folder holds another training, the loss is no number any more, or the model or
            device cannot do what the configuration asks for.
    """
    settings, model = config.training, folder / MODEL
    _same_training(folder, _description(encoder, data, config))
    if (model / "modules.json").exists():
        curve = read_curve(folder)
        return Trained(model, curve.steps, curve.rows)
    transformer: Any = encoder.model[0].model if hasattr(encoder.model[0], "model") else encoder.model
    _prepare(transformer, settings.freeze_layers, settings.lora)
    devices = torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1
    devices = max(devices, _launched())
    steps = _steps(len(data.lists), config, devices)
    every = settings.eval_steps or max(1, steps // TIMES)
    cpu = encoder.model.device.type == "cpu"
    args = training_arguments(
        output_dir=str(folder / CHECKPOINTS / PARTIAL),
        per_device_train_batch_size=settings.batch_size,
        num_train_epochs=settings.epochs,
        max_steps=steps,
        learning_rate=settings.learning_rate,
        warmup_steps=math.ceil(settings.warmup * steps),
        weight_decay=settings.weight_decay,
        bf16=settings.precision == "bf16",
        fp16=settings.precision == "fp16",
        use_cpu=cpu,
        seed=settings.seed,
        save_strategy="steps",
        save_steps=settings.save_steps or max(1, steps // TIMES),
        eval_strategy="no" if evaluator is None else "steps",
        eval_steps=every,
        eval_on_start=evaluator is not None,
        logging_steps=max(1, steps // 100),
        batch_sampler=partial(DistinctQueries, devices=devices),
        ddp_find_unused_parameters=False,
    )
    with text_limits(encoder):
        trainer = ListTrainer(
            keep=settings.keep_checkpoints,
            progress=progress,
            model=encoder.model,
            args=args,
            train_dataset=data.dataset(),
            loss=GradedListLoss(encoder.model, config.loss, chunk=settings.chunk, gather=settings.gather),
            data_collator=ListCollator(encoder, data.width),
            evaluator=evaluator,
        )
        checkpoints = whole_checkpoints(folder / CHECKPOINTS)
        trainer.train(resume_from_checkpoint=str(checkpoints[-1][1]) if checkpoints else None)
    measure = None if evaluator is None else evaluator.primary_metric
    curve = curve_of(trainer.state.log_history, steps=steps, every=every, measure=measure)
    if trainer.is_world_process_zero():
        if settings.lora is not None:
            _merge_adapters(transformer)
        _finish(encoder, config, folder, curve, facts or {})
    trainer.accelerator.wait_for_everyone()
    return Trained(model, steps, curve.rows)


def _launched() -> int:
    """Processes that a launcher has started, before any of them has met the others."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def _steps(lists: int, config: RetrieverConfig, devices: int) -> int:
    settings = config.training
    per_epoch = math.ceil(lists / (settings.batch_size * devices))
    return settings.max_steps or math.ceil(per_epoch * settings.epochs)


# --- the same training ----------------------------------------------------------------------


def _description(encoder: Encoder, data: TrainingLists, config: RetrieverConfig) -> dict[str, Any]:
    """Everything that decides the trained model."""
    start = content_view(config.encoder) | {"model": encoder_identity(config.encoder), "revision": None}
    return {
        "encoder": start,
        "data": data.digest,
        "loss": [content_view(term) for term in config.loss],
        "training": content_view(config.training),
    }


def _same_training(folder: Path, description: dict[str, Any]) -> None:
    """Refuses a folder that holds another training, and marks one that holds none.

    Raises:
        InputError: it does; the message says what differs.
    """
    path = folder / TRAINING
    told = orjson.dumps(description, option=orjson.OPT_INDENT_2 | orjson.OPT_SORT_KEYS)
    if path.exists():
        try:
            before = orjson.loads(path.read_bytes())
        except orjson.JSONDecodeError as error:
            raise InputError("is damaged; delete the folder", file=path) from error
        differing = [name for name, value in orjson.loads(told).items() if before.get(name) != value]
        if differing:
            raise InputError(
                f"holds a training with other settings ({', '.join(differing)}); take another folder, or "
                "delete this one",
                file=folder,
            )
        return
    folder.mkdir(parents=True, exist_ok=True)
    write_whole(path, lambda temporary: _write_bytes(temporary, told))


def _write_bytes(path: Path, data: bytes) -> None:
    path.write_bytes(data)


# --- the model ------------------------------------------------------------------------------


def _prepare(transformer: Any, freeze: int, lora: LoraConfig | None) -> None:
    """Fixes what is not trained and adds adapters.

    Raises:
        InputError: the model has no such layers or modules.
    """
    pooler = getattr(transformer, "pooler", None)
    if isinstance(pooler, nn.Module):
        pooler.requires_grad_(False)  # BERT's own head; sentence embeddings do not pass through it
    if freeze:
        layers = _layers(transformer)
        if freeze > len(layers):
            raise InputError(
                f"the model has {len(layers)} layers, {freeze} cannot be left as they are",
                field="training.freeze_layers",
            )
        lowest: Any = getattr(transformer, "embeddings", None) or transformer.get_input_embeddings()
        for module in (lowest, *layers[:freeze]):
            module.requires_grad_(False)
    if lora is not None:
        from peft import LoraConfig as PeftLora
        from peft import inject_adapter_in_model

        adapter = PeftLora(
            r=lora.rank,
            lora_alpha=lora.alpha,
            lora_dropout=lora.dropout,
            target_modules=list(lora.target_modules) if lora.target_modules else "all-linear",
        )
        try:
            inject_adapter_in_model(adapter, transformer)
        except ValueError as error:
            raise InputError(str(error).splitlines()[0], field="training.lora.target_modules") from error
        for name, parameter in transformer.named_parameters():
            parameter.requires_grad_("lora_" in name and not name.startswith("pooler"))


def _layers(transformer: Any) -> list[nn.Module]:
    count = getattr(getattr(transformer, "config", None), "num_hidden_layers", None)
    for module in transformer.modules():
        if isinstance(module, nn.ModuleList) and len(module) == count:
            return list(module)
    raise InputError(
        "this model's layers cannot be told apart, so none can be left as they are",
        field="training.freeze_layers",
    )


def _merge_adapters(transformer: Any) -> None:
    """The adapters' part goes into the weights: the model is then like any other."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    for name, module in list(transformer.named_modules()):
        if isinstance(module, BaseTunerLayer):
            module.merge()
            parent, _, own = name.rpartition(".")
            setattr(transformer.get_submodule(parent), own, module.get_base_layer())


def _finish(
    encoder: Encoder, config: RetrieverConfig, folder: Path, curve: Curve, facts: Mapping[str, Any]
) -> None:
    """Writes curve, model and card; the checkpoints are needed no more."""
    write_curve(folder, curve)
    made = folder / CHECKPOINTS / PARTIAL / MODEL
    if made.exists():
        shutil.rmtree(made)
    encoder.model.eval()
    encoder.model.save_pretrained(str(made), create_model_card=False)
    write_card(made, config, facts, curve)
    put_in_place(made, folder / MODEL)
    shutil.rmtree(folder / CHECKPOINTS)
