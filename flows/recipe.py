"""What makes two runs the same: stage fingerprints out of settings, sources, prompts and models.

Each stage's fingerprint covers the settings that change its rows, the step's version and the
fingerprint of the stage before it; never roots, endpoints, concurrency or timeouts.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import PurePath
from typing import Any

import orjson

from gradeloom.schemas.config import GradedConfig, NearDuplicatesFilter, content_view
from gradeloom.schemas.errors import InputError
from gradeloom.schemas.manifest import ModelIdentity
from gradeloom.schemas.rows import digest
from gradeloom.tasks.engine.models import called, tokenizer_digest
from gradeloom.tasks.filter.decontaminate import Contamination
from gradeloom.tasks.generate.graded import GradedGenerator
from gradeloom.tasks.label.policy import Policy, default_policy
from gradeloom.tasks.prompts import Prompt
from gradeloom.tasks.source_forms import source_digest

STEPS = {"source": "1", "generate": "1", "filter": "1", "near_duplicates": "1", "judge": "1", "label": "1"}
"""Versions of the steps. Raise one when its code gives other rows for the same input."""


@dataclass(frozen=True)
class Recipe:
    """Everything that decides what a graded release holds.

    Attributes:
        fingerprints: stage name -> fingerprint (16 hex digits).
        digest: of the whole run: the last fingerprint, limit, target, budget, release name and version.
        config: the settings that change rows, for the manifest: of what lies somewhere, its name.
        prompts: prompt name -> digest of its text.
        models: generator and judge, as they really were.
        policy: the label policy after defaults.
        judge_independent: None without a judge.
    """

    fingerprints: dict[str, str]
    digest: str
    config: dict[str, Any]
    prompts: dict[str, str]
    models: list[ModelIdentity]
    policy: Policy
    judge_independent: bool | None


def graded_recipe(
    config: GradedConfig,
    *,
    generator: str,
    judge: str | None,
    contamination: Contamination | None,
) -> Recipe:
    """The recipe of a run whose engines have the identities `generator` and `judge`.

    Raises:
        InputError: a prompt, the examples, the source or a tokenizer cannot be read, or two prompts
            have one name.
    """
    writer = GradedGenerator.create(config, "")
    judge_prompts = _judge_prompts(config)
    models = [model_identity("generator", config.engine, generator)]
    levels = [content_view(level) for level in config.levels]
    generation = content_view(config.generation)
    del generation["prompt"]  # its digest counts, not where it lies

    fingerprints = {
        "source": _fingerprint("source", "", content_view(config.source), source_digest(config.source))
    }
    fingerprints["generate"] = _fingerprint(
        "generate", fingerprints["source"], levels, generation, config.run.seed, writer.prompt.digest,
        writer.examples_digest, engine_view(config.engine), generator,
    )  # fmt: skip
    cross = [f for f in config.filters if isinstance(f, NearDuplicatesFilter)]
    fingerprints["filter"] = _fingerprint(
        "filter", fingerprints["generate"], [content_view(f) for f in config.filters if f not in cross],
        contamination.digest if contamination else None,
    )  # fmt: skip
    last = fingerprints["filter"]
    if cross:
        last = fingerprints["near_duplicates"] = _fingerprint("near_duplicates", last, content_view(cross[0]))

    independent = None
    if config.judge is not None and judge is not None:
        settings = content_view(config.judge)
        engine = config.judge.engine or config.engine
        models.append(model_identity("judge", engine, judge))
        independent = _independent(*models)
        for place in ("engine", "prompt", "pairwise_prompt"):
            del settings[place]
        last = fingerprints["judge"] = _fingerprint(
            "judge", last, levels, settings, config.run.seed, [prompt.digest for prompt in judge_prompts],
            engine_view(engine), judge,
        )  # fmt: skip
    policy = config.label.policy or default_policy(bool(independent))
    last = fingerprints["label"] = _fingerprint("label", last, policy)
    run, release = config.run, config.release
    # A budget is spent shard by shard: then alone where shards end decides what is released.
    shards = [run.shard_rows, run.canary.rows if run.canary else None] if run.budget_tokens else None
    whole = _fingerprint("", last, run.limit, run.target, run.budget_tokens, shards, content_view(release))
    prompts = _by_name([writer.prompt, *judge_prompts])
    return Recipe(fingerprints, whole, _released(config), prompts, models, policy, independent)


def steps(recipe: Recipe) -> dict[str, str]:
    """Step versions of the stages this run has."""
    return {stage: STEPS[stage] for stage in recipe.fingerprints}


def _fingerprint(stage: str, before: str, *settings: Any) -> str:
    return digest(stage, STEPS.get(stage, ""), before, orjson.dumps(settings, option=orjson.OPT_SORT_KEYS))


def _judge_prompts(config: GradedConfig) -> list[Prompt]:
    """The judge's prompt, and the pairwise one if pairs are asked for."""
    if config.judge is None:
        return []
    names = [config.judge.prompt] + [config.judge.pairwise_prompt] * config.judge.pairwise
    return [Prompt.load(name) for name in names]


def _by_name(prompts: list[Prompt]) -> dict[str, str]:
    found: dict[str, str] = {}
    for prompt in prompts:
        if found.setdefault(prompt.name, prompt.digest) != prompt.digest:
            raise InputError(
                f"another prompt of this run is called '{prompt.name}' too; give each a name of its own",
                file=prompt.file,
                field="name",
            )
    return found


def engine_view(engine: Any) -> dict[str, Any]:
    """An engine's settings without the model's name: its identity says what it is.

    A tokenizer that is not the model's own decides which prompts are too long: its content counts.
    """
    view = content_view(engine)
    for name in ("model", "revision", "tokenizer"):
        view.pop(name, None)
    if engine.tokenizer is not None:
        view["tokenizer"] = tokenizer_digest(engine.tokenizer)
    return view


def model_identity(role: str, engine: Any, identity: str) -> ModelIdentity:
    """A model as a release or a calibration names it: by name, never by where it lies."""
    name = called(getattr(engine, "model", engine.kind))
    return ModelIdentity(role=role, kind=engine.kind, model=name, identity=identity)


def _independent(generator: ModelIdentity, judge: ModelIdentity) -> bool:
    """Is the judge another model? One name is one model, however it is served and whatever its revision."""
    if generator.identity.partition(" ")[0] == judge.identity.partition(" ")[0]:
        return False
    named = {"vllm", "openai"} >= {generator.kind, judge.kind}
    return not (named and generator.model == judge.model)


def _released(config: GradedConfig) -> dict[str, Any]:
    """The settings as a manifest holds them: the same wherever models, prompts and tokenizers lie."""
    view = content_view(config)
    engines = [view["engine"], (view["judge"] or {}).get("engine") or {}]
    for holder, key in [(e, k) for e in engines for k in ("model", "tokenizer")] + [
        (view["source"], "dataset")
    ]:
        if holder.get(key) is not None:
            holder[key] = called(holder[key])
    for holder, key in (
        (view["generation"], "prompt"),
        (view["judge"], "prompt"),
        (view["judge"], "pairwise_prompt"),
    ):
        if holder and holder[key] is not None:
            holder[key] = PurePath(holder[key]).name
    return view
