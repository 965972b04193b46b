"""Where a row of a graded release comes from, as far as its run directory still knows.

Release row -> what every stage decided -> the judge's requests -> the requests that generated it -> source
row. The steps that asked then are run again, over an engine that has no model: it answers what the run's
ledger holds and remembers what it was asked. So messages are shown as they were sent only if prompts,
examples and steps are those of the release, which is checked; else what came back is all that is shown.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import Any

import orjson
from pydantic import ValidationError

from gradeloom.flows.preview import Exchange, Witness
from gradeloom.flows.recipe import STEPS
from gradeloom.flows.runs import DESCRIPTION
from gradeloom.schemas.config import NAME, GradedConfig
from gradeloom.schemas.errors import InputError
from gradeloom.schemas.manifest import Manifest
from gradeloom.schemas.rows import DecisionRow, JudgedRow, LabelRow, ListRow, QueryRow, Row
from gradeloom.tasks.engine.store import read_outcomes
from gradeloom.tasks.engine.types import Asked, Completion, Request
from gradeloom.tasks.generate.graded import GradedGenerator
from gradeloom.tasks.label.judge import Engine, Judge
from gradeloom.tasks.prompts import Prompt
from gradeloom.tasks.release.catalog import MANIFEST, read_manifest
from gradeloom.tasks.release.tables import Place, read_rows, row_at
from gradeloom.tasks.run import RunDirectory

_STAGES: dict[str, type[Row]] = {
    "source": QueryRow, "generate": ListRow, "filter": DecisionRow, "near_duplicates": DecisionRow,
    "judge": JudgedRow, "label": LabelRow,
}  # fmt: skip
_ASKING = {"generate": "generator", "judge": "judge"}
"""Stages that ask a model -> its role."""

_FINGERPRINT = re.compile(r"[0-9a-f]{16}")
_TOLD_ELSEWHERE = {*Row.model_fields, "query_id", "query", "passages"}


@dataclass(frozen=True)
class Decision:
    """What one stage said of the row.

    Attributes:
        at_grade: the passage that decided, by its intended grade.
        said: the rest of what the stage wrote down: attributes drawn, attempts, judgements, labels.
    """

    stage: str
    step: str | None
    fingerprint: str
    status: str
    reason: str | None
    detail: str | None
    at_grade: int | None
    said: dict[str, Any]


@dataclass(frozen=True)
class Lineage:
    """A row of a release and where it comes from.

    Attributes:
        which: the query or passage id that was asked for.
        table: `lists` or `rejects`; `row` is the row there.
        passage: the intended grade of the passage asked for; None for a whole list.
        run: the run directory; None when nothing of it could be used.
        decisions: stage by stage, as far as the row came; empty without the run.
        judging, generation: requests and completions, of one passage only those that it was part of.
        source: id, query and 0-based place of the source row; None without the run.
        models: role -> model and what it really was.
        missing: what cannot be shown, and why, a sentence each.
    """

    release: str
    digest: str
    path: str
    which: str
    table: str
    row: dict[str, Any]
    passage: int | None
    run: str | None
    decisions: list[Decision]
    judging: list[Exchange]
    generation: list[Exchange]
    source: dict[str, Any] | None
    models: dict[str, str]
    missing: list[str]


class _Missing(Exception):
    """Something cannot be shown; the message says what and why."""


async def lineage(folder: Path, which: str, *, runs: str | None = None) -> Lineage:
    """Trace a row of a graded release.

    Args:
        folder: of the release.
        which: a query id (its whole list) or a passage id, of `lists` or `rejects`.
        runs: the root of run directories; default: where the release says its run was.

    Raises:
        InputError: no such row; no graded release; or something of the run is there but cannot be read.
    """
    manifest = read_manifest(folder)
    content = manifest.content
    if content.kind != "graded":
        raise InputError(f"of kind '{content.kind}'; lineage is told of graded releases", file=folder)
    table, place, passage = _find(folder, which)
    row = row_at(place)
    run, story, missing = None, {}, []
    asked: dict[str, list[Exchange]] = {stage: [] for stage in _ASKING}
    try:
        run = _run_of(manifest, runs)
        story = _story(run, _fingerprints(manifest), table, row)
    except _Missing as what:
        missing.append(str(what))
    else:
        for stage in asked:
            if stage in story:
                asked[stage], why = await _exchanges(stage, folder, manifest, run, story)
                missing += why
    return Lineage(
        release=f"{content.name}@{content.version}",
        digest=manifest.digest,
        path=str(folder),
        which=which,
        table=table,
        row=row,
        passage=passage,
        run=str(run.path) if run and story else None,
        decisions=_decisions(manifest, story),
        judging=[e for e in asked["judge"] if _concerns(e, passage)],
        generation=[e for e in asked["generate"] if _concerns(e, passage)],
        source=_source(story),
        models={model.role: f"{model.model} ({model.kind}, {model.identity})" for model in content.models},
        missing=missing,
    )


def _find(folder: Path, which: str) -> tuple[str, Place, int | None]:
    """Table, place and, of a passage, the grade it was written for."""
    for table in ("lists", "rejects"):
        for place, row in read_rows(folder, table, ["query_id", "passage_ids", "intended"]):
            if row["query_id"] == which:
                return table, place, None
            if which in row["passage_ids"]:
                return table, place, row["intended"][row["passage_ids"].index(which)]
    raise InputError(f"'{which}' is neither a query nor a passage of its lists and rejects", file=folder)


def _concerns(exchange: Exchange, passage: int | None) -> bool:
    """A part is empty (all of the list), a grade, or a pair of grades."""
    return passage is None or not exchange.part or str(passage) in exchange.part.split(">")


def _decisions(manifest: Manifest, story: dict[str, Row]) -> list[Decision]:
    prints = _fingerprints(manifest) if story else {}
    return [
        Decision(
            stage, manifest.content.steps.get(stage), prints[stage], row.status, row.reason, row.detail,
            row.grade, row.model_dump(exclude=_TOLD_ELSEWHERE),
        )
        for stage, row in story.items()
    ]  # fmt: skip


def _source(story: dict[str, Row]) -> dict[str, Any] | None:
    row = story.get("source")
    return row.model_dump(include={"id", "ordinal", "query_id", "query"}) if row else None


# --- the run --------------------------------------------------------------------------------


def _run_of(manifest: Manifest, runs: str | None) -> RunDirectory:
    """The run directory, under `runs` or where the release says."""
    named = manifest.observed.get("run")
    if runs is not None:
        if not NAME.fullmatch(manifest.content.name):
            raise _Missing(f"the run: '{manifest.content.name}' names no run")
        path = Path(runs) / manifest.content.name
    elif isinstance(named, str):
        path = Path(named)
    else:
        raise _Missing("the run: the release does not say where it was; name the root of runs: --runs ROOT")
    if not path.is_dir():
        raise _Missing(
            f"the run: there is nothing at {path}; it was pruned, or lies elsewhere (--runs ROOT): "
            "decisions, requests and source row are not shown"
        )
    return RunDirectory(path)


def _fingerprints(manifest: Manifest) -> dict[str, str]:
    """Stage -> fingerprint, in the order of the stages."""
    stages = manifest.observed.get("stages")
    known = stages if isinstance(stages, dict) else {}
    prints = {name: known[name] for name in _STAGES if _FINGERPRINT.fullmatch(str(known.get(name)))}
    if "source" not in prints:
        raise _Missing(
            "the run: the release does not say which shards are its own; an earlier gradeloom cut it"
        )
    return prints


def _story(run: RunDirectory, prints: dict[str, str], table: str, row: dict[str, Any]) -> dict[str, Row]:
    """Stage -> what it wrote of the row. Of shards that were cut in several ways, the fullest counts."""
    of_source = table == "rejects" and row["stage"] == "source"
    source = run.stage("source", prints["source"], QueryRow)
    found: dict[str, Row] = {}
    for path in sorted(source.folder.glob("*.parquet")):
        for query in source.read(path) or []:
            same = query.query_id == row["query_id"] and query.query == row["query"]
            if same and (query.status != "kept") == of_source:
                story = {"source": query, **_later_stages(run, prints, path, query.id)}
                found = max(found, story, key=len)
    if not found:
        raise _Missing(
            f"the run: the row is in no shard of this release in {run.path} (`runs prune --stale` removes "
            "those of earlier settings): decisions, requests and source row are not shown"
        )
    return found


def _later_stages(run: RunDirectory, prints: dict[str, str], source: Path, row_id: str) -> dict[str, Row]:
    """The row in the shards that follow from one of the source: they have its number."""
    number = source.name.partition("-")[0]
    found: dict[str, Row] = {}
    for name in [name for name in prints if name != "source"]:
        stage = run.stage(name, prints[name], _STAGES[name])
        paths = sorted(stage.folder.glob(f"{number}-*.parquet"))
        rows = (row for path in paths for row in stage.read(path) or [])
        mine = next((row for row in rows if row.id == row_id), None)
        if mine is not None:
            found[name] = mine
    return found


# --- requests -------------------------------------------------------------------------------


class _Recorded:
    """An engine without a model: it answers what the ledger holds of one row."""

    def __init__(self, outcomes: list[tuple[Asked, Completion]], identity: str) -> None:
        self.identity = identity
        self._outcomes = {(asked.part, asked.attempt): completion for asked, completion in outcomes}

    async def complete(self, asked: Asked, request: Request) -> Completion:
        return self._outcomes.get((asked.part, asked.attempt), Completion("not_recorded"))


async def _exchanges(
    stage: str, folder: Path, manifest: Manifest, run: RunDirectory, story: dict[str, Row]
) -> tuple[list[Exchange], list[str]]:
    """The requests of a stage with what came back, and what is missing of them."""
    source = story["source"]
    assert isinstance(source, QueryRow)
    asked = Asked(stage, _fingerprints(manifest)[stage], source.id, source_id=source.query_id)
    outcomes, missing = [], []
    if run.ledger.is_file():
        outcomes = read_outcomes(run.ledger, asked)
    else:
        missing.append(f"completions of stage {stage}: the run's ledger is not there")
    role = _ASKING[stage]
    identity = next((model.identity for model in manifest.content.models if model.role == role), "")
    witness = Witness(_Recorded(outcomes, identity))
    try:
        await _step(stage, folder, manifest, run, story)(witness)
    except _Missing as what:
        return [Exchange.of(asked, None, completion) for asked, completion in outcomes], [*missing, str(what)]
    return witness.exchanges, missing


def _step(
    stage: str, folder: Path, manifest: Manifest, run: RunDirectory, story: dict[str, Row]
) -> Callable[[Engine], Awaitable[Row]]:
    """What asked then, ready to ask the same again."""
    if manifest.content.steps.get(stage) != STEPS[stage]:
        raise _Missing(f"messages of stage {stage}: the step has changed since; they cannot be shown as sent")
    config = _settings(folder, manifest, run)
    fingerprint = _fingerprints(manifest)[stage]
    try:
        if stage == "generate":
            source = story["source"]
            assert isinstance(source, QueryRow)
            generator = GradedGenerator.create(config, fingerprint)
            _require_same(stage, manifest, [generator.prompt])
            _require_same_examples(manifest, generator)
            return lambda engine: generator(engine, source)
        generated = story["generate"]
        assert isinstance(generated, ListRow)
        assert config.judge is not None
        judge = Judge.create(config.judge, config.levels, seed=config.run.seed, fingerprint=fingerprint)
        _require_same(stage, manifest, [p for p in (judge.prompt, judge.pair_prompt) if p is not None])
        return lambda engine: judge(engine, generated)
    except InputError as error:
        raise _Missing(f"messages of stage {stage}: {error}") from error


def _require_same(stage: str, manifest: Manifest, prompts: list[Prompt]) -> None:
    for prompt in prompts:
        then = manifest.content.prompts.get(prompt.name)
        if then != prompt.digest:
            raise _Missing(
                f"messages of stage {stage}: the prompt '{prompt.name}' has changed since "
                f"({then or 'none'} in the release, {prompt.digest} here); they cannot be shown as sent"
            )


def _require_same_examples(manifest: Manifest, generator: GradedGenerator) -> None:
    then = _examples(manifest).get("digest")
    if then != generator.examples_digest:
        raise _Missing(
            "messages of stage generate: the examples have changed since; they cannot be shown as sent"
        )


def _examples(manifest: Manifest) -> dict[str, Any]:
    examples = manifest.observed.get("examples")
    return examples if isinstance(examples, dict) else {}


def _settings(folder: Path, manifest: Manifest, run: RunDirectory) -> GradedConfig:
    """The settings that decide what is asked, out of the manifest.

    It does not say where a prompt of one's own or the examples lie: of the former, the run's description
    knows; of the latter, the observed part.
    """
    config = manifest.content.config
    try:
        generation = {**config["generation"], "examples": _examples(manifest).get("path")}
        judge = dict(config["judge"]) if config["judge"] else None
        for section, settings in (("generation", generation), ("judge", judge)):
            for name in ("prompt", "pairwise_prompt"):
                if settings is not None and settings.get(name) is not None:
                    settings[name] = _prompt_place(run, section, name, settings[name])
        if judge is not None:
            judge["engine"] = None
        return GradedConfig.model_validate(
            {
                "source": {"path": "not needed"},
                "levels": config["levels"],
                "generation": generation,
                "judge": judge,
                "run": {"seed": config["run"]["seed"]},
                "release": {"name": manifest.content.name},
            }
        )
    except (KeyError, TypeError, AttributeError, ValidationError) as error:
        raise InputError(
            "is not the configuration of a graded run", file=folder / MANIFEST, field="content.config"
        ) from error


def _prompt_place(run: RunDirectory, section: str, name: str, called: str) -> str:
    """Where the prompt lies that a manifest knows by the last part of its path."""
    try:
        place = orjson.loads((run.path / DESCRIPTION).read_bytes())["config"][section][name]
    except (OSError, orjson.JSONDecodeError, KeyError, TypeError):
        place = None
    return place if isinstance(place, str) and PurePath(place).name == called else PurePath(called).name
