"""The manifest of a release: `content`, deterministic and digested, and `observed`, which is not."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import orjson
from pydantic import BaseModel, ConfigDict, TypeAdapter

from gradeloom.schemas.rows import digest


class ReleasedFile(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    path: str
    sha256: str
    rows: int | None = None
    bytes: int


class StageAccount(BaseModel):
    """Where every row that entered a stage went. `rows` equals the sum of the four."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    stage: str
    rows: int
    kept: int = 0
    rejected: int = 0
    failed: int = 0
    unused: int = 0
    reasons: dict[str, int] = {}

    def assert_adds_up(self) -> None:
        """Raise `AssertionError` when a row is missing or counted twice."""
        parts = self.kept + self.rejected + self.failed + self.unused
        assert self.rows == parts, f"stage {self.stage}: {self.rows} rows in, {parts} accounted for"
        without_reason = sum(self.reasons.values())
        assert without_reason == parts - self.kept, f"stage {self.stage}: reasons do not add up"


def rows_worked_on(accounting: Sequence[StageAccount]) -> int:
    """Rows that came to a decision: all that entered the first stage but for the unused."""
    return accounting[0].rows - sum(account.unused for account in accounting) if accounting else 0


def accept_rate(accounting: Sequence[StageAccount]) -> float | None:
    """Rows that the last stage kept, as a share of the rows worked on; None when there were none."""
    worked = rows_worked_on(accounting)
    return accounting[-1].kept / worked if worked else None


class ModelIdentity(BaseModel):
    """A model by role (`generator`, `judge`), as configured, and what it really was."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    role: str
    kind: str
    model: str
    identity: str


class Content(BaseModel):
    """What makes two releases the same: equal digests of this part."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    format: int = 1
    kind: str
    name: str
    version: str
    parent: str | None = None
    recipe: str
    config: dict[str, Any]
    prompts: dict[str, str]
    models: list[ModelIdentity]
    steps: dict[str, str]
    files: list[ReleasedFile]
    accounting: list[StageAccount]
    quality: dict[str, Any]

    def digest(self) -> str:
        """SHA-256 (64 hex digits) over the canonical JSON of this part."""
        return digest(orjson.dumps(self.model_dump(), option=orjson.OPT_SORT_KEYS), length=64)


class Manifest(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    digest: str
    content: Content
    observed: dict[str, Any]

    def files(self) -> list[ReleasedFile]:
        """Every file of the release but the manifest: those of `content`, then those of `observed`.

        Raises:
            pydantic.ValidationError: `observed` lists something else than files.
        """
        return [*self.content.files, *_FILES.validate_python(self.observed.get("files", []))]


_FILES = TypeAdapter(list[ReleasedFile])
