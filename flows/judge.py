"""Calibrating a judge: its grades of pairs that people have graded, by a file or by asking it.

    people's grades -> judge (file, or asked pair by pair) -> agreement, ranking of systems, mapping

Every answer is in the run's ledger and in the request cache: killed and started again, a calibration asks
only for what is not there.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import orjson

from gradeloom.flows.concurrency import in_parallel
from gradeloom.flows.orchestrate import Named, Orchestration, facts_artifact
from gradeloom.flows.progress import Progress
from gradeloom.flows.recipe import engine_view, model_identity
from gradeloom.schemas import calibration as stored
from gradeloom.schemas.calibration import (
    Calibration,
    FileIdentity,
    IsotonicMapping,
    JudgeRunConfig,
    MappedAgreement,
    ModelJudge,
)
from gradeloom.schemas.config import ReplayEngine, content_view
from gradeloom.schemas.errors import InputError, RunIncomplete
from gradeloom.schemas.rows import JudgedRow, ListRow, Passage, digest
from gradeloom.tasks.collection import Collection, Run
from gradeloom.tasks.engine.engine import Engine
from gradeloom.tasks.engine.store import Ledger, RequestCache
from gradeloom.tasks.engine.types import UNREACHABLE
from gradeloom.tasks.evaluate.calibration import (
    Human,
    JudgeLabels,
    Pair,
    agreement,
    file_identity,
    pair_counts,
    rounded,
    system_ranking,
)
from gradeloom.tasks.evaluate.isotonic import apply_isotonic, read_isotonic, require_unseen
from gradeloom.tasks.evaluate.trec import read_run
from gradeloom.tasks.label.judge import Judge
from gradeloom.tasks.run import RunDirectory

NO_TEXT = "no_text"
"""Why a pair is not asked about: the queries or the corpus do not hold it."""


# --- figures --------------------------------------------------------------------------------


def calibrate(
    human: Human,
    labels: JudgeLabels,
    judge: stored.Judge,
    *,
    domain: str | None = None,
    binary_at: int = 2,
    runs: Sequence[tuple[FileIdentity, Run]] = (),
    gain_offset: float = 0,
    isotonic: tuple[FileIdentity, IsotonicMapping] | None = None,
) -> Calibration:
    """All figures of a judge against people.

    Args:
        human: people's grades.
        labels: the judge's.
        judge: who that is.
        domain: of the collection, for people and for the release's card.
        binary_at: grades from here are relevant, for the binary kappa.
        runs: systems to be ranked under both.
        gain_offset: taken off every grade to get its gain.
        isotonic: a stored mapping and its file; the agreement of the mapped grades stands beside.

    Raises:
        InputError: people and judge share no pair, a grade or setting is not as it must be, or the mapping
            was fitted on what it should be evaluated on, or for another judge.
    """
    return Calibration(
        domain=domain,
        human=human.identity,
        judge=judge,
        pairs=pair_counts(human.grades, labels),
        agreement=agreement(human.grades, labels, binary_at=binary_at),
        isotonic=None if isotonic is None else _mapped(*isotonic, human, labels, judge, binary_at),
        ranking=system_ranking(runs, human.grades, labels, gain_offset=gain_offset) if runs else None,
    )


def _mapped(
    file: FileIdentity,
    mapping: IsotonicMapping,
    human: Human,
    labels: JudgeLabels,
    judge: stored.Judge,
    binary_at: int,
) -> MappedAgreement:
    if not labels.expected:
        raise InputError("this judge gives no expected grades that could be mapped", field="--isotonic")
    fitted_for = mapping.judge
    if (
        isinstance(judge, ModelJudge)
        and isinstance(fitted_for, ModelJudge)
        and judge.fingerprint != fitted_for.fingerprint
    ):
        raise InputError(
            f"was fitted for another judge or other settings: '{fitted_for.name}', {fitted_for.model.model}",
            file=file.name,
        )
    expected = apply_isotonic(mapping, labels.expected, human=human)
    mapped = JudgeLabels(
        rounded(expected), expected, labels.abstained, labels.unanswered, labels.scale
    )  # fmt: skip
    figures = agreement(human.grades, mapped, binary_at=binary_at)
    return MappedAgreement(mapping=file, agreement=figures)


def read_mapping(path: str, human: Human) -> tuple[FileIdentity, IsotonicMapping]:
    """A stored isotonic mapping, refused before a judge is asked if it was fitted on these grades.

    Raises:
        InputError: it cannot be read, or was fitted on `human` or on some of its pairs.
    """
    mapping = read_isotonic(path)
    require_unseen(mapping, ((q, p) for q, grades in human.grades.items() for p in grades), human)
    return file_identity(path), mapping


def read_runs(places: Sequence[str]) -> list[tuple[FileIdentity, Run]]:
    """TREC run files, or all such files (`.trec`, `.run`, `.txt`) of a folder.

    Raises:
        InputError: a file cannot be read, a folder holds none, or two files have one name.
    """
    files: list[Path] = []
    for place in map(Path, places):
        found = [place]
        if place.is_dir():
            found = sorted(p for p in place.iterdir() if p.suffix in (".trec", ".run", ".txt"))
        if not found:
            raise InputError("no run files (.trec, .run, .txt) in this folder", file=place)
        files += found
    twice = [name for name, times in Counter(file.name for file in files).items() if times > 1]
    if twice:
        raise InputError(f"two runs are called {twice[0]!r}; give each a name of its own", field="--run")
    return [(file_identity(file), read_run(file)) for file in files]


# --- asking a judge -------------------------------------------------------------------------


@dataclass(frozen=True)
class JudgeResult:
    """What a judge that was run said.

    Attributes:
        labels: its grades, abstentions, and pairs without an answer.
        judge: who it is.
        usage: requests and tokens of this process.
    """

    labels: JudgeLabels
    judge: ModelJudge
    usage: dict[str, Any]

    @property
    def stopped(self) -> str | None:
        return None

    @property
    def ended(self) -> str:
        return f"judged: {self._counts()['graded']:,} pairs"

    def _counts(self) -> dict[str, int]:
        return {
            "graded": sum(map(len, self.labels.grades.values())),
            "abstained": len(self.labels.abstained),
            **Counter(self.labels.unanswered.values()),
        }

    async def report(self, tasks: Orchestration) -> None:
        await facts_artifact(tasks, "judge-report", {**self._counts(), **self.usage}, "What the judge said.")


def judge_named(config: JudgeRunConfig) -> Named:
    """What Prefect shows of a judge's run."""
    return Named("judge", "A judge's grades of pairs that people have graded.", config.name)


async def run_judge(
    config: JudgeRunConfig,
    *,
    collection: Collection,
    human: Human,
    files: tuple[FileIdentity, FileIdentity],
    progress: Progress,
    tasks: Orchestration,
) -> JudgeResult:
    """Ask a judge for the grade of every pair that people have graded.

    A row is one pair, `Passage.grade` the grade of people: it names the recording of a replayed judge and is
    not in the prompt.

    Args:
        config: the judge.
        collection: the texts; a pair without them is `no_text`.
        human: people's grades.
        files: what queries and passages were read from.
        progress: is shown the pairs as they are judged.
        tasks: Prefect, or its absence.

    Raises:
        InputError: the engine, a prompt or a folder is not as it must be.
        RunIncomplete: the judge could not be reached; the same command goes on.
    """
    engine_config = config.judge.engine
    assert engine_config is not None
    started = time.time()
    rows, without = _rows(collection, human)
    if isinstance(engine_config, ReplayEngine):
        _require_distinct(rows, engine_config)
    async with AsyncExitStack() as stack:
        run = stack.enter_context(RunDirectory(Path(config.root) / config.name).locked())
        ledger = stack.enter_context(Ledger(run.ledger))
        cache = stack.enter_context(RequestCache(Path(config.cache.root))) if config.cache.enabled else None
        engine = Engine(
            engine_config, folder=run.path / "judge", ledger=ledger, cache=cache, say=progress.say
        )
        stack.push_async_callback(engine.stop)
        judge, identity = _judge(config, engine, files)
        engine.check_labels(judge.labels)
        run.describe(
            {"name": config.name, "config": content_view(config), "stages": {"judge": identity.fingerprint}}
        )
        progress.stage("judge", len(rows), unit="pairs")
        readings: dict[Pair, JudgedRow] = {}
        for start in range(0, len(rows), config.shard_pairs):
            shard = rows[start : start + config.shard_pairs]
            judged = await tasks.shard(
                "judge",
                start // config.shard_pairs,
                lambda shard=shard: _read(judge, engine, shard, progress),  # type: ignore[misc]
            )
            readings |= dict(zip((pair for pair, _ in shard), judged, strict=True))
        usage = {
            "requests_sent": engine.usage.sent,
            "requests_cached": engine.usage.from_cache + engine.usage.from_ledger,
            "prompt_tokens_sent": engine.usage.prompt_tokens,
            "completion_tokens_sent": engine.usage.completion_tokens,
            "seconds": round(time.time() - started, 3),
        }
    return JudgeResult(_labels(readings, without, judge.grades), identity, usage)


def _rows(collection: Collection, human: Human) -> tuple[list[tuple[Pair, ListRow]], dict[Pair, str]]:
    """A row per pair, pairs of one query side by side; and the pairs whose texts are not there."""
    rows: list[tuple[Pair, ListRow]] = []
    without: dict[Pair, str] = {}
    for query_id, grades in human.grades.items():
        for passage_id, grade in grades.items():
            pair = (query_id, passage_id)
            query, text = collection.queries.get(query_id), collection.passages.get(passage_id)
            if query is None or text is None:
                without[pair] = NO_TEXT
                continue
            row = ListRow(
                id=digest(query_id, passage_id, query, text), ordinal=len(rows), query_id=query_id,
                query=query, passages=[Passage(grade=grade, text=text)],
            )  # fmt: skip
            rows.append((pair, row))
    if not rows:
        raise InputError(
            "no judged pair has its query and passage in these files; do they use the ids of the qrels?"
        )
    return rows, without


def _require_distinct(rows: Sequence[tuple[Pair, ListRow]], engine: ReplayEngine) -> None:
    """A recording names a passage by its query and grade; two of one name would get one answer."""
    names = Counter((row.query_id, row.passages[0].grade) for _, row in rows)
    for (query_id, grade), times in names.items():
        if times > 1:
            raise InputError(
                f"a recording tells passages apart by query and grade, but people gave {times} passages of "
                f"query {query_id!r} the grade {grade}",
                file=engine.path,
            )


def _judge(
    config: JudgeRunConfig, engine: Engine, files: tuple[FileIdentity, FileIdentity]
) -> tuple[Judge, ModelJudge]:
    judge = Judge.create(config.judge, config.levels, seed=config.seed, fingerprint="")
    settings = content_view(config.judge)
    for place in ("engine", "prompt", "pairwise", "pairwise_prompt"):
        del settings[place]
    settings |= {
        "seed": config.seed,
        "levels": [content_view(level) for level in config.levels],
        "engine": engine_view(config.judge.engine),
    }
    prompt = {judge.prompt.name: judge.prompt.digest}
    recipe = [settings, judge.prompt.digest, engine.identity]
    identity = ModelJudge(
        name=config.name,
        model=model_identity("judge", config.judge.engine, engine.identity),
        prompt=prompt,
        settings=settings,
        fingerprint=digest("calibrate", orjson.dumps(recipe, option=orjson.OPT_SORT_KEYS)),
        queries=files[0],
        corpus=files[1],
    )
    return replace(judge, fingerprint=identity.fingerprint), identity


async def _read(
    judge: Judge, engine: Engine, rows: Sequence[tuple[Pair, ListRow]], progress: Progress
) -> list[JudgedRow]:
    async def one(row: ListRow) -> JudgedRow:
        reading = await judge(engine, row)
        silent = any(judgement.abstained for judgement in reading.judgements)
        progress.advance("judge", 1, abstained=silent, unanswered=reading.status != "kept")
        return reading

    readings = await in_parallel(one(row) for _, row in rows)
    if any(reading.reason == UNREACHABLE for reading in readings):
        raise RunIncomplete("the judge could not be reached; the same command goes on from here")
    return readings


def _labels(readings: dict[Pair, JudgedRow], without: dict[Pair, str], scale: tuple[int, ...]) -> JudgeLabels:
    labels = JudgeLabels({}, {}, scale=scale)
    abstained, unanswered = set(), dict(without)
    for pair, reading in readings.items():
        query_id, passage_id = pair
        if reading.reason is not None:
            unanswered[pair] = reading.reason
            continue
        (judgement,) = reading.judgements
        if judgement.abstained or judgement.judged is None or judgement.expected is None:
            abstained.add(pair)
            continue
        labels.grades.setdefault(query_id, {})[passage_id] = judgement.judged
        labels.expected.setdefault(query_id, {})[passage_id] = judgement.expected
    return JudgeLabels(labels.grades, labels.expected, frozenset(abstained), unanswered, scale)
