"""Small releases made by hand, for the tests beside this file."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from gradeloom.schemas.config import TREC_LEVELS, ReleaseConfig, content_view
from gradeloom.schemas.manifest import ModelIdentity
from gradeloom.schemas.rows import (
    DecisionRow,
    JudgedRow,
    Judgement,
    LabelRow,
    ListRow,
    Passage,
    QueryRow,
    Row,
)
from gradeloom.tasks.release.write import Facts, Released, Story, cut_release
from gradeloom.tasks.run import Accounting

GRADES = (3, 2, 1, 0)


def kept(
    n: int,
    *,
    query: str | None = None,
    texts: Sequence[str] | None = None,
    labels: Sequence[float] = GRADES,
    judged: bool = True,
    query_id: str | None = None,
) -> Story:
    """Row n: four passages, read by a judge that agrees except on the highest."""
    source = QueryRow(
        id=f"row{n}", ordinal=n, query_id=query_id or f"q{n}", query=query or f"what is thing {n}?"
    )
    texts = texts or [f"passage of level {grade} about thing {n}" for grade in GRADES]
    generated = ListRow(
        id=source.id, ordinal=n, query_id=source.query_id, query=source.query, length="short",
        audience="a student", style="a forum reply", attempts=1,
        passages=[Passage(grade=g, text=t) for g, t in zip(GRADES, texts, strict=True)],
    )  # fmt: skip
    readings = [
        Judgement(
            grade=g, judged=min(g, 2), expected=min(g, 2) + 0.25, entropy=0.5, mass=0.75, abstained=False
        )
        for g in GRADES
    ]
    label = LabelRow(id=source.id, ordinal=n, labels=list(labels))
    row = JudgedRow(id=source.id, ordinal=n, judgements=readings) if judged else None
    return Story(source, generated, row, label, "label", label)


def dropped(
    n: int,
    stage: str,
    reason: str,
    *,
    status: str = "rejected",
    query: str | None = None,
    grade: int | None = None,
) -> Story:
    """Row n, which `stage` did not let through."""
    story = kept(n)
    decision: Row = DecisionRow.model_validate(
        {"id": f"row{n}", "ordinal": n, "status": status, "reason": reason, "detail": "why", "grade": grade}
    )
    if stage == "generate":
        empty = ListRow(
            **decision.model_dump(), query_id=story.query.query_id, query=story.query.query, passages=[]
        )
        return Story(story.query, empty, None, None, stage, empty)
    return Story(story.query, story.generated, None, None, stage, decision)


def some() -> list[Story]:
    """Six rows: three kept, one failed, one rejected, one unused."""
    return [
        kept(0),
        dropped(1, "generate", "unparsable", status="failed"),
        kept(2),
        dropped(3, "filter", "too_short", grade=2),
        kept(4),
        dropped(5, "target", "target_reached", status="unused"),
    ]


STAGES = ("source", "generate", "filter", "label", "target")


def facts(stories: Iterable[Story], **changes: Any) -> Facts:
    """The facts of these stories: every stage saw what the one before kept."""
    accounting = Accounting()
    for story in stories:
        for stage in STAGES:
            decided = stage == story.stage and story.decision.status != "kept"
            accounting.add(stage, [story.decision if decided else DecisionRow(id=story.query.id, ordinal=0)])
            if decided:
                break
    known: dict[str, Any] = {
        "kind": "graded",
        "recipe": "0123456789abcdef",
        "config": {"levels": [content_view(level) for level in TREC_LEVELS]},
        "prompts": {"graded_together": "feedfacefeedface"},
        "models": [
            ModelIdentity(role="generator", kind="vllm", model="org/writer-135M", identity="cafe"),
            ModelIdentity(role="judge", kind="openai", model="org/judge-70B", identity="babe"),
        ],
        "steps": {"generate": "1", "judge": "1"},
        "accounting": accounting.stages(),
        "grades": GRADES,
        "policy": "intended",
        "judge_independent": True,
        "levels": TREC_LEVELS,
    }
    return Facts(**(known | changes))


def cut(
    root: Path, stories: Sequence[Story] | None = None, *, version: str = "0.1.0", **changes: Any
) -> Released:
    """Cut a release called `made` under a root."""
    stories = some() if stories is None else stories
    return cut_release(
        ReleaseConfig(name="made", version=version, root=str(root), licence="cc-by-4.0"),
        iter(stories),
        facts(stories, **changes),
        quality=lambda folder: {"lists": len(list((folder / "lists").iterdir()))},
        observed=lambda: {"run": str(root)},
    )
