"""The rows that flow through a graded run, and the Arrow schemas derived from them.

One row is one query and its list of passages; it keeps its `id` and `ordinal` through every stage.
A stage writes, for every id it was given, exactly one row with a `status`; later stages add only
what they know, and rows are joined by `id`.
"""

from __future__ import annotations

import hashlib
import types
from functools import cache
from typing import Any, Literal, Union, get_args, get_origin

import pyarrow as pa
from pydantic import BaseModel, ConfigDict

Status = Literal["kept", "rejected", "failed", "unused"]
STATUSES: tuple[Status, ...] = get_args(Status)


def digest(*parts: str | bytes, length: int = 16) -> str:
    """The first `length` hex digits of SHA-256 over the parts, each preceded by its length."""
    h = hashlib.sha256()
    for part in parts:
        data = part.encode() if isinstance(part, str) else part
        h.update(len(data).to_bytes(8, "big"))
        h.update(data)
    return h.hexdigest()[:length]


class Record(BaseModel):
    """Base of everything that is written to Parquet."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class Row(Record):
    """What every stage says of every row.

    `reason` is a code (`too_long`), `detail` says more for people, `grade` names the passage that
    decided, by its intended grade.
    """

    id: str
    ordinal: int
    status: Status = "kept"
    reason: str | None = None
    detail: str | None = None
    grade: int | None = None


class QueryRow(Row):
    """Stage `source`: one query. `query_id` is the source's own id, or a digest of the text."""

    query_id: str
    query: str


class Passage(Record):
    grade: int
    text: str


class ListRow(Row):
    """Stage `generate`: the passages of one query, from the highest intended grade to the lowest."""

    query_id: str
    query: str
    passages: list[Passage] = []
    level_order: list[int] = []
    length: str | None = None
    min_words: int | None = None
    max_words: int | None = None
    audience: str | None = None
    style: str | None = None
    attempts: int = 0
    truncated: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    raw: str | None = None


class DecisionRow(Row):
    """Stages `filter`, `near_duplicates` and `target`: a decision and nothing else."""


class Judgement(Record):
    """The judge's reading of one passage (METHODS 1a).

    Attributes:
        grade: the intended grade, which names the passage.
        judged: the arg-max grade; None when nothing could be read.
        expected: sum over g of g * p(g), p normalised over the grade tokens.
        entropy: of the normalised p, in nats.
        mass: m, the probability of the grade tokens seen, before normalising; None if none was seen.
        probabilities: raw p per grade, ascending; None where the token was not among those returned.
        abstained: mass is None or below the threshold.
        method: `logprobs`, `samples` or `recorded`.
    """

    grade: int
    judged: int | None = None
    expected: float | None = None
    entropy: float | None = None
    mass: float | None = None
    probabilities: list[float | None] = []
    abstained: bool = True
    method: str = "logprobs"


class PairVerdict(Record):
    """Which of two passages the judge prefers, asked in both orders; `winner` None is a tie."""

    first: int
    second: int
    winner: int | None = None


class JudgedRow(Row):
    """Stage `judge`: one judgement per passage, in the order of the list's passages."""

    judgements: list[Judgement] = []
    pairs: list[PairVerdict] = []
    prompt_tokens: int = 0
    completion_tokens: int = 0


class LabelRow(Row):
    """Stage `label`: the final grade of each passage, in the order of the list's passages."""

    labels: list[float] = []


@cache
def arrow_schema(model: type[BaseModel]) -> pa.Schema:
    """The explicit Arrow schema of a record type: field order as declared, nullability as typed."""
    return pa.schema(_fields(model))


def _fields(model: type[BaseModel]) -> list[pa.Field[Any]]:
    return [_field(name, info.annotation) for name, info in model.model_fields.items()]


def _field(name: str, annotation: Any) -> pa.Field[Any]:
    nullable = False
    if get_origin(annotation) in (Union, types.UnionType):
        inner = [a for a in get_args(annotation) if a is not type(None)]
        if len(inner) != 1:
            raise TypeError(f"{name}: only `X | None` unions have an Arrow type")
        annotation, nullable = inner[0], True
    return pa.field(name, _arrow_type(annotation), nullable=nullable)


_SCALARS: dict[Any, pa.DataType] = {str: pa.string(), int: pa.int64(), float: pa.float64(), bool: pa.bool_()}


def _arrow_type(annotation: Any) -> pa.DataType:
    if get_origin(annotation) is Literal:
        return pa.string()
    if get_origin(annotation) is list:
        return pa.list_(_field("element", get_args(annotation)[0]))
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return pa.struct(_fields(annotation))
    return _SCALARS[annotation]
