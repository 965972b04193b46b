"""A few rows through the whole graded flow, looked at closely, before anything long is started."""

from __future__ import annotations

import tempfile
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from gradeloom.flows.graded import GradedRun
from gradeloom.flows.orchestrate import Orchestration
from gradeloom.flows.progress import Progress
from gradeloom.flows.shard import Shard, reading
from gradeloom.schemas.config import GradedConfig
from gradeloom.tasks.engine.types import Asked, Completion, Request, Sampling
from gradeloom.tasks.label import judge
from gradeloom.tasks.run import RunDirectory
from gradeloom.tasks.sources import read_queries


@dataclass(frozen=True)
class Exchange:
    """One request as sent and its completion, raw.

    Attributes:
        messages: empty where it is not known how they were sent; then `sampling` is None.
        logprobs: of the first token, (token, log-probability), most likely first; None if not asked for.
    """

    stage: str
    row: str
    part: str
    attempt: int
    messages: tuple[dict[str, str], ...]
    sampling: Sampling | None
    outcome: str
    text: str
    prompt_tokens: int
    completion_tokens: int
    logprobs: tuple[tuple[str, float], ...] | None

    @classmethod
    def of(cls, asked: Asked, request: Request | None, completion: Completion) -> Exchange:
        return cls(
            asked.stage, asked.row, asked.part, asked.attempt, request.messages if request else (),
            request.sampling if request else None, completion.outcome, completion.text,
            completion.prompt_tokens, completion.completion_tokens, completion.logprobs,
        )  # fmt: skip


@dataclass(frozen=True)
class PreviewRow:
    """What became of one query: `stage` decided `status`; `reason` is None when it was accepted."""

    query_id: str
    query: str
    exchanges: list[Exchange]
    passages: list[dict[str, Any]]
    stage: str
    status: str
    reason: str | None
    detail: str | None


@dataclass(frozen=True)
class Preview:
    """Rows, and what the whole run may be expected to take at their pace.

    Attributes:
        queries: rows of the whole source (or its limit).
        tokens: expected for all of them, from what the previewed rows cost.
        hours: expected at the pace of the preview, which leaves most of a large engine idle.
        accept_rate: of the previewed rows.
    """

    rows: list[PreviewRow]
    queries: int
    tokens: int
    hours: float
    accept_rate: float

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


class Witness:
    """An engine that remembers what passed through it."""

    def __init__(self, engine: judge.Engine) -> None:
        self._engine = engine
        self.exchanges: list[Exchange] = []

    async def complete(self, asked: Asked, request: Request) -> Completion:
        completion = await self._engine.complete(asked, request)
        self.exchanges.append(Exchange.of(asked, request, completion))
        return completion

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)


async def preview_graded(config: GradedConfig, *, limit: int, progress: Progress) -> Preview:
    """Send the first `limit` queries through all stages in a throw-away run directory.

    Completions enter the request cache, so a run that follows does not pay for them again.
    """
    queries = sum(1 for _ in read_queries(config.source, limit=config.run.limit))
    with tempfile.TemporaryDirectory(prefix="gradeloom-preview-") as folder:
        run_settings = config.run.model_copy(
            update={"root": folder, "limit": limit, "target": None, "budget_tokens": None, "canary": None}
        )
        small = config.model_copy(update={"run": run_settings})
        async with AsyncExitStack() as stack:
            run = stack.enter_context(RunDirectory(Path(folder) / "preview").locked())
            graded = await GradedRun.open(small, run, stack, progress, Orchestration())
            witnesses = witness(graded)
            await graded.work()
            shards = [graded.load(ordinal) for ordinal in range(len(graded.plan))]
            exchanges = [exchange for one in witnesses for exchange in one.exchanges]
            rows = [row for shard in shards for row in preview_rows(shard, exchanges)]
            usage = graded.usage()
    share = queries / max(len(rows), 1)
    return Preview(
        rows=rows,
        queries=queries,
        tokens=round(usage["tokens"] * share),
        hours=round(usage["busy_seconds"] * share / 3600, 2),
        accept_rate=sum(row.status == "kept" for row in rows) / max(len(rows), 1),
    )


def witness(graded: GradedRun) -> list[Witness]:
    """Put a witness before each engine of a run."""
    generator = Witness(graded.engine)
    shared = graded.judge_engine is graded.engine
    graded.engine = generator  # type: ignore[assignment]
    if graded.judge_engine is None:
        return [generator]
    reader = generator if shared else Witness(graded.judge_engine)
    graded.judge_engine = reader  # type: ignore[assignment]
    return [generator] if shared else [generator, reader]


def preview_rows(shard: Shard, exchanges: list[Exchange]) -> list[PreviewRow]:
    rows = []
    for story in shard.stories():
        judged = {j.grade: j for j in story.judged.judgements} if story.judged else {}
        passages = [
            {"grade": p.grade, "text": p.text, **reading(judged.get(p.grade))}
            for p in (story.generated.passages if story.generated else [])
        ]
        rows.append(
            PreviewRow(
                query_id=story.query.query_id,
                query=story.query.query,
                exchanges=[e for e in exchanges if e.row == story.query.id],
                passages=passages,
                stage=story.stage,
                status=story.decision.status,
                reason=story.decision.reason,
                detail=story.decision.detail,
            )
        )
    return rows
