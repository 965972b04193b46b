"""What of a model is trained: frozen layers and low-rank adapters."""

from __future__ import annotations

from typing import Any

from sentence_transformers import SentenceTransformer
from torch import nn

from gradeloom.schemas.errors import InputError, first_line
from gradeloom.schemas.retriever import LoraConfig, TrainingConfig


def prepare_model(model: SentenceTransformer, training: TrainingConfig) -> None:
    """Put adapters in, freeze what is not trained.

    Adapters that the model came with become part of its weights.

    Raises:
        InputError: the model has no such layers or modules, or nothing is left to train.
    """
    merge_adapters(model)
    transformer = model.transformers_model
    if training.lora is not None:
        _add_adapters(transformer, training.lora)
    if training.freeze_layers:
        _freeze(transformer, training.freeze_layers)
    pooler = getattr(transformer, "pooler", None)
    if isinstance(pooler, nn.Module):
        pooler.requires_grad_(False)  # BERT's own head; sentence embeddings do not pass through it
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise InputError("nothing of this model is left to train", field="encoder.model")


def merge_adapters(model: SentenceTransformer) -> None:
    """Make low-rank adapters part of the weights: the model is then like any other, and all of it can learn.

    So a trained model is whole in its folder, wherever what it started from may be.
    """
    from peft.tuners.tuners_utils import BaseTunerLayer

    transformer: Any = model.transformers_model
    if transformer is None:
        return
    adapted = [
        (name, module) for name, module in transformer.named_modules() if isinstance(module, BaseTunerLayer)
    ]
    for name, module in adapted:
        module.merge()
        parent, _, own = name.rpartition(".")
        setattr(transformer.get_submodule(parent), own, module.get_base_layer())
    if adapted:
        transformer.requires_grad_(True)
    if getattr(transformer, "_hf_peft_config_loaded", False):
        # What transformers remembers of loading adapters: it would save them alone, and under their names.
        transformer._hf_peft_config_loaded = False
        for remembered in ("peft_config", "_weight_conversions"):
            transformer.__dict__.pop(remembered, None)


def _add_adapters(transformer: Any, lora: LoraConfig) -> None:
    from peft import LoraConfig as PeftLora
    from peft import inject_adapter_in_model

    if transformer is None:
        raise InputError("this model is no transformer; expected no `lora`", field="training.lora")
    adapter = PeftLora(
        r=lora.rank,
        lora_alpha=lora.alpha,
        lora_dropout=lora.dropout,
        target_modules=list(lora.target_modules) if lora.target_modules is not None else "all-linear",
    )
    try:
        inject_adapter_in_model(adapter, transformer)
    except ValueError as error:
        raise InputError(
            f"takes no such adapters: {first_line(error)}", field="training.lora.target_modules"
        ) from error
    for name, parameter in transformer.named_parameters():
        parameter.requires_grad_("lora_" in name)


def _freeze(transformer: Any, count: int) -> None:
    layers = _layers(transformer)
    if count >= len(layers):
        raise InputError(
            f"the model has {len(layers)} layers; expected fewer than that, so that some are trained",
            field="training.freeze_layers",
        )
    lowest: Any = getattr(transformer, "embeddings", None) or transformer.get_input_embeddings()
    for module in (lowest, *layers[:count]):
        module.requires_grad_(False)


def _layers(transformer: Any) -> list[nn.Module]:
    """The stack of transformer layers, the lowest first."""
    depth = getattr(getattr(transformer, "config", None), "num_hidden_layers", None)
    for module in transformer.modules() if transformer is not None else ():
        if isinstance(module, nn.ModuleList) and len(module) == depth:
            return list(module)
    raise InputError(
        "this model's layers cannot be told apart; expected freeze_layers: 0", field="training.freeze_layers"
    )
