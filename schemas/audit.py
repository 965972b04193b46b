"""What an audit of a release by people is: the key of its sample, and what came of it."""

from __future__ import annotations

from typing import Any

import orjson
from pydantic import BaseModel, ConfigDict, field_validator

from gradeloom.schemas.config import NAME, VERSION
from gradeloom.schemas.rows import digest


class AuditRecord(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class AuditGroup(AuditRecord):
    """Passages among which those to look at were drawn at random, each with the same probability.

    Attributes:
        grade: their released grade, rounded.
        disagreement: whether the judge disagrees with the intended grade, or abstained; None: both, as one
            of the two is too small to be drawn from alone, or nobody asked a judge.
        passages: how many the release holds.
        sampled: how many were drawn.
        probability: of being drawn, sampled / passages.
    """

    grade: int
    disagreement: bool | None
    passages: int
    sampled: int
    probability: float


class AuditItem(AuditRecord):
    """A passage to be looked at. `item` is how the sheets name it, `group` its place among the groups."""

    item: str
    query_id: str
    passage_id: str
    group: int


class AuditKey(AuditRecord):
    """What the raters do not get: where each passage of their sheets comes from.

    Attributes:
        name, version, digest: of the release; the digest is its manifest's.
        grades: that can be given, descending.
    """

    format: int = 1
    name: str
    version: str
    digest: str
    seed: int
    raters: int
    grades: list[int]
    groups: list[AuditGroup]
    items: list[AuditItem]

    @field_validator("name", "version")
    @classmethod
    def _no_path(cls, value: str) -> str:
        if not (NAME.fullmatch(value) or VERSION.fullmatch(value)):
            raise ValueError("expected a release's name and version")
        return value

    def sample(self) -> str:
        """What names this sample: 12 hex digits over all of the key."""
        return digest(orjson.dumps(self.model_dump(), option=orjson.OPT_SORT_KEYS), length=12)


class AuditLabel(AuditRecord):
    """What people say of a passage: a grade per rater, None where one gave none."""

    item: str
    query_id: str
    passage_id: str
    grades: list[int | None]


class AuditFigure(AuditRecord):
    """A prediction-powered estimate of a release; None where it is not defined.

    Attributes:
        grade: of the passages it is about, released and rounded; None: of all.
        passages: of the release that it is about.
        labelled: passages with at least one label.
        queries: that these belong to.
        value, se: the estimate and its standard error.
        low, high: two-sided 95 % interval.
        bound: lower end of the one-sided 95 % interval.
    """

    grade: int | None
    passages: int
    labelled: int
    queries: int
    value: float | None
    se: float | None
    low: float | None
    high: float | None
    bound: float | None


class AuditFigures(AuditRecord):
    """What the labels say.

    Attributes:
        labelled: passages that each rater gave a grade.
        raters: agreement of every two raters (`raters`: which, from 1), as `grade_confusion` has it.
        judge: people's grades (rows, every rater's label counted) against the judge's, over the sample,
            in which disagreements are over-represented; None without a judge.
        grade_precision: share of passages whose released grade a rater would give, per grade, then of all.
        absolute_error: mean distance between the released grade and a rater's.
        judge_agreement: share of passages whose judged grade a rater would give, where the judge gave one.
    """

    labelled: list[int]
    raters: list[dict[str, Any]]
    judge: dict[str, Any] | None
    grade_precision: list[AuditFigure]
    absolute_error: list[AuditFigure]
    judge_agreement: list[AuditFigure]


class Audit(AuditRecord):
    """A stored audit of one release. `sample` names its sample: a later import of it takes its place."""

    format: int = 1
    name: str
    version: str
    digest: str
    sample: str
    seed: int
    groups: list[AuditGroup]
    labels: list[AuditLabel]
    figures: AuditFigures
