"""What is asked of a language model and what comes back.

Plain slotted dataclasses, not pydantic: hundreds of thousands pass through a run.
"""

from __future__ import annotations

from dataclasses import astuple, dataclass
from typing import Any, Literal

import orjson

from gradeloom.schemas.rows import digest

Message = dict[str, str]
"""`{"role": "system" | "user" | "assistant", "content": text}`"""


@dataclass(frozen=True, slots=True)
class Sampling:
    """How a completion is drawn. `top_logprobs` > 0 asks for so many log-probabilities of the first token."""

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    seed: int | None = None
    top_logprobs: int = 0
    frequency_penalty: float = 0.0


@dataclass(frozen=True, slots=True)
class Request:
    """One chat completion. `schema` is a JSON schema that the answer must follow."""

    messages: tuple[Message, ...]
    sampling: Sampling
    schema: dict[str, Any] | None = None

    def digest(self, identity: str) -> str:
        """The request cache's key: model identity, rendered messages, sampling, schema, seed."""
        body = [identity, self.messages, astuple(self.sampling), self.schema]
        return digest(orjson.dumps(body), length=32)


@dataclass(frozen=True, slots=True)
class Asked:
    """Who asks: the ledger's key. An attempt of a row is never asked twice.

    Attributes:
        stage: the stage's name, e.g. `generate`.
        fingerprint: the stage's fingerprint.
        row: the row's id.
        part: which request of the row, e.g. a grade; empty when there is one.
        attempt: 0, 1, … : another attempt has another seed.
        source_id: the source's own id of the row, by which `replay` finds its recording.
    """

    stage: str
    fingerprint: str
    row: str
    part: str = ""
    attempt: int = 0
    source_id: str = ""


UNREACHABLE = "engine_unreachable"
"""The reason of a row whose request met nothing but transport faults. It says nothing about the row, so
whoever goes on with a run asks again."""

Outcome = Literal["stop", "length", "prompt_too_long", "refused", "not_recorded", "unreachable"]


@dataclass(frozen=True, slots=True)
class Completion:
    """A model outcome.

    Attributes:
        outcome: `stop`, `length` (cut off), `prompt_too_long` (not sent), `refused` (the server said
            no to this very request), `not_recorded` (replay), or `unreachable` (every sending failed
            while other requests were answered; not written to the ledger).
        text: the completion; the server's words when refused.
        logprobs: of the first token, (token, log-probability), most likely first; None if not given.
        cached: answered from the ledger or the request cache: nothing was spent now.
    """

    outcome: Outcome
    text: str = ""
    prompt_tokens: int = 0
    completion_tokens: int = 0
    logprobs: tuple[tuple[str, float], ...] | None = None
    cached: bool = False


class TransportFault(Exception):
    """Timeout, reset, 429, 5xx, unreadable body: no outcome; the same attempt is sent again."""
