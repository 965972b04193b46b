"""Stage `generate` of the graded flow: for one query, a passage at every level of relevance.

What a row is asked follows from the settings, the seed and the row's id alone; no other row, and
nothing of when or where it runs, has a part in it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import orjson

from gradeloom.schemas.config import GenerationConfig, GradedConfig, LengthBucket, Level
from gradeloom.schemas.rows import ListRow, Passage, QueryRow, Status, digest
from gradeloom.tasks.engine.types import UNREACHABLE, Asked, Completion, Message, Request, Sampling
from gradeloom.tasks.generate.examples import Example, load_examples
from gradeloom.tasks.generate.parse import Fault, read_completion
from gradeloom.tasks.prompts import Prompt

RAW_CHARACTERS = 4000
"""How much of a failed row's last completion is kept."""

_AT_ONCE: dict[str, tuple[Status, str]] = {
    "prompt_too_long": ("rejected", "prompt_too_long"),
    "not_recorded": ("failed", "not_recorded"),
    "unreachable": ("failed", UNREACHABLE),
}
"""Outcomes that another seed cannot change."""


class Engine(Protocol):
    """What generation needs of an engine."""

    async def complete(self, asked: Asked, request: Request) -> Completion: ...


@dataclass(frozen=True, slots=True)
class Draw:
    """What the seed gives a row: the order of levels, the attributes, the examples shown."""

    levels: tuple[Level, ...]
    length: LengthBucket | None
    audience: str | None
    style: str | None
    examples: tuple[Example, ...]


@dataclass(frozen=True, slots=True)
class _Part:
    """One of a row's requests, to be asked until it parses: all levels, or one of them.

    Attributes:
        name: the part in the ledger's key; empty when it is the row's only one.
        keys: the JSON keys of the answer, in the order asked, with the grade of each.
        grade: the level, when it is about one.
    """

    name: str
    keys: dict[str, int]
    messages: tuple[Message, ...]
    schema: dict[str, Any]
    grade: int | None = None


@dataclass(slots=True)
class _Answer:
    """What became of a part after all its attempts. `passages` is empty if there is a `reason`."""

    passages: dict[int, str]
    status: Status = "kept"
    reason: str | None = None
    detail: str | None = None
    grade: int | None = None
    raw: str | None = None
    attempts: int = 0
    truncated: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0


@dataclass(frozen=True)
class GradedGenerator:
    """Writes graded lists. Built once per run; calls share nothing and may run concurrently.

    Attributes:
        generation: the settings.
        rubric: the levels, from the highest grade to the lowest.
        seed: the run's.
        fingerprint: the stage's, for the ledger.
        prompt: as loaded.
        examples: lists that prompts show some of; may be empty.
        examples_digest: over their content, for the fingerprint; empty without examples.
    """

    generation: GenerationConfig
    rubric: tuple[Level, ...]
    seed: int
    fingerprint: str
    prompt: Prompt
    examples: tuple[Example, ...] = ()
    examples_digest: str = ""

    @classmethod
    def create(cls, config: GradedConfig, fingerprint: str) -> GradedGenerator:
        """Load the prompt and the examples that the settings name.

        Raises:
            InputError: either is missing or wrong.
        """
        generation = config.generation
        default = "graded_list" if generation.mode == "together" else "graded_passage"
        examples: tuple[Example, ...] = ()
        examples_digest = ""
        if generation.examples is not None:
            examples, examples_digest = load_examples(generation.examples, config.grades)
        return cls(
            generation=generation,
            rubric=tuple(sorted(config.levels, key=lambda level: -level.grade)),
            seed=config.run.seed,
            fingerprint=fingerprint,
            prompt=Prompt.load(generation.prompt or default),
            examples=examples,
            examples_digest=examples_digest,
        )

    def draw(self, row: QueryRow) -> Draw:
        """What the seed gives this row.

        Each draw is a stream of its own, so that another list of audiences, say, leaves the order of
        levels as it was. The order is that of digests, which is stable across versions of Python.
        """
        attributes = self.generation.attributes
        levels = self.rubric
        if self.generation.shuffle_levels:
            levels = tuple(sorted(levels, key=lambda level: self._number(row, "level", str(level.grade))))
        others = [example for example in self.examples if example.query != row.query]
        others.sort(key=lambda example: self._number(row, "example", example.query))
        return Draw(
            levels=levels,
            length=self._one_of(attributes.length, row, "length"),
            audience=self._one_of(attributes.audience, row, "audience"),
            style=self._one_of(attributes.style, row, "style"),
            examples=tuple(others[: self.generation.examples_shown]),
        )

    def requests(self, row: QueryRow, attempt: int = 0) -> list[Request]:
        """The requests of one attempt as they are sent: one, or one per level in the order drawn."""
        return [self._request(row, part, attempt) for part in self._parts(row, self.draw(row))]

    async def __call__(self, engine: Engine, row: QueryRow) -> ListRow:
        """Ask until every level has its passage, or the attempts are used up.

        Returns:
            The list, highest grade first, kept; or a row without passages: failed
            (`refused_by_server`, `not_recorded`, `engine_unreachable`, or the last attempt's parse
            fault) or rejected (`prompt_too_long`), with the first failing level of the order drawn.
            Attempts and tokens are summed over all requests, whether answered now or earlier.

        Raises:
            InputError: the prompt cannot be rendered.
            EngineUnavailable: the engine is gone for good.
        """
        draw = self.draw(row)
        answers = await asyncio.gather(*(self._ask(engine, row, part) for part in self._parts(row, draw)))
        failed = next((answer for answer in answers if answer.reason is not None), None)
        passages = {grade: text for answer in answers for grade, text in answer.passages.items()}
        verdict = {} if failed is None else {
            "status": failed.status, "reason": failed.reason, "detail": failed.detail, "grade": failed.grade,
            "raw": failed.raw,
        }  # fmt: skip
        return ListRow(
            id=row.id,
            ordinal=row.ordinal,
            query_id=row.query_id,
            query=row.query,
            passages=[]
            if failed
            else [Passage(grade=level.grade, text=passages[level.grade]) for level in self.rubric],
            level_order=[level.grade for level in draw.levels],
            length=draw.length.name if draw.length else None,
            min_words=draw.length.min_words if draw.length else None,
            max_words=draw.length.max_words if draw.length else None,
            audience=draw.audience,
            style=draw.style,
            attempts=sum(answer.attempts for answer in answers),
            truncated=sum(answer.truncated for answer in answers),
            prompt_tokens=sum(answer.prompt_tokens for answer in answers),
            completion_tokens=sum(answer.completion_tokens for answer in answers),
            **verdict,
        )

    async def _ask(self, engine: Engine, row: QueryRow, part: _Part) -> _Answer:
        """One part, attempt by attempt."""
        answer = _Answer({})
        for attempt in range(self.generation.attempts):
            asked = Asked("generate", self.fingerprint, row.id, part.name, attempt, row.query_id)
            completion = await engine.complete(asked, self._request(row, part, attempt))
            answer.attempts += 1
            answer.truncated += completion.outcome == "length"
            answer.prompt_tokens += completion.prompt_tokens
            answer.completion_tokens += completion.completion_tokens
            if completion.outcome in _AT_ONCE:
                answer.status, answer.reason = _AT_ONCE[completion.outcome]
                answer.detail, answer.grade = _storable(completion.text)[:300] or None, part.grade
                answer.raw = None
                return answer
            answer.raw = _storable(completion.text)[:RAW_CHARACTERS]
            if completion.outcome == "refused":
                found: dict[int, str] | Fault = Fault("refused_by_server", completion.text[:300])
            else:
                found = read_completion(completion, part.keys)
            if not isinstance(found, Fault):
                return _Answer(
                    found, attempts=answer.attempts, truncated=answer.truncated,
                    prompt_tokens=answer.prompt_tokens, completion_tokens=answer.completion_tokens,
                )  # fmt: skip
            answer.status, answer.reason, answer.detail = "failed", found.reason, _storable(found.detail)
            answer.grade = part.grade if found.grade is None else found.grade
        return answer

    def _parts(self, row: QueryRow, draw: Draw) -> list[_Part]:
        if self.generation.mode == "together":
            return [
                self._part(row, draw, None, {f"level_{level.grade}": level.grade for level in draw.levels})
            ]
        return [self._part(row, draw, level, {"passage": level.grade}) for level in draw.levels]

    def _part(self, row: QueryRow, draw: Draw, level: Level | None, keys: dict[str, int]) -> _Part:
        messages = self.prompt.render(
            rubric=self.rubric,
            levels=draw.levels,
            level=level,
            query=row.query,
            min_words=draw.length.min_words if draw.length else None,
            max_words=draw.length.max_words if draw.length else None,
            audience=draw.audience,
            style=draw.style,
            examples=[{"query": e.query, "answer": render_answer(e.passages, keys)} for e in draw.examples],
        )
        grade = None if level is None else level.grade
        return _Part("" if grade is None else str(grade), keys, messages, answer_schema(keys), grade)

    def _request(self, row: QueryRow, part: _Part, attempt: int) -> Request:
        generation = self.generation
        seed = self._number(row, "seed", part.name, str(attempt)) % 2**31
        sampling = Sampling(
            generation.max_tokens,
            generation.temperature,
            generation.top_p,
            seed,
            frequency_penalty=generation.frequency_penalty,
        )
        return Request(part.messages, sampling, part.schema)

    def _one_of(self, choices: Sequence[Any], row: QueryRow, stream: str) -> Any:
        return choices[self._number(row, stream) % len(choices)] if choices else None

    def _number(self, row: QueryRow, *stream: str) -> int:
        """A number below 2**64 for this run's seed, this row and this stream."""
        return int(digest(str(self.seed), row.id, *stream), 16)


def answer_schema(keys: Sequence[str] | dict[str, int]) -> dict[str, Any]:
    """The JSON schema of an answer: exactly these keys, in this order, all text.

    No `maxLength`: long bounds are slow in some grammars, and length is checked by a filter.
    """
    return {
        "type": "object",
        "properties": {key: {"type": "string"} for key in keys},
        "required": list(keys),
        "additionalProperties": False,
    }


def render_answer(passages: dict[int, str], keys: dict[str, int]) -> str:
    """Passages as the compact JSON that a model is to answer with, keys in the order asked."""
    return orjson.dumps({key: passages[grade] for key, grade in keys.items()}).decode()


def _storable(text: str) -> str:
    """Text that fits into UTF-8: what is not valid Unicode becomes `?`."""
    return text.encode(errors="replace").decode()
