"""The `replay` engine: recorded completions, matched by (stage, source id, part, attempt).

Each kind of recorded file has an adapter that turns its rows into what an engine would have answered.
What is not recorded is `not_recorded`, never a guess.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson

from gradeloom.schemas.config import ReplayEngine
from gradeloom.schemas.errors import InputError
from gradeloom.tasks.engine.types import Asked, Completion, Request

NO_PROBABILITY = -9999.0
"""The log-probability of what has none, as vLLM writes it: JSON has no infinity."""

Key = tuple[str, str, str]
"""(stage, source id, part)"""

Answer = Callable[[Request], Completion | None]
"""What was recorded, in the form that a request asks for; None when it asks for something else."""


class ReplayBackend:
    """Answers from a recorded file. Only first attempts (0) are recorded.

    Raises:
        InputError: the file cannot be read, or a row is not what its adapter expects.
    """

    def __init__(self, config: ReplayEngine) -> None:
        path = Path(config.path)
        try:
            data = path.read_bytes()
        except OSError as error:
            raise InputError(f"cannot read the recorded file: {error.strerror}", file=path) from error
        self.restarts = 0
        self.flags: tuple[str, ...] = ()
        self.identity = "replay:" + hashlib.sha256(data).hexdigest()[:32]
        self._answers: dict[Key, Answer] = {}
        adapter = _ADAPTERS[config.adapter]
        for number, line in enumerate(data.splitlines(), start=1):
            if line.strip():
                self._add(adapter, _Row(path, number, line))

    def _add(self, adapter: Adapter, row: _Row) -> None:
        for key, answer in adapter(row):
            if key in self._answers:
                raise row.error("is recorded twice: " + ", ".join(part for part in key if part))
            self._answers[key] = answer

    async def start(self) -> None:
        """Nothing to start."""

    async def stop(self) -> None:
        """Nothing to stop."""

    async def send(self, asked: Asked, request: Request) -> Completion:
        answer = self._answers.get((asked.stage, asked.source_id, asked.part))
        completion = answer(request) if answer is not None and asked.attempt == 0 else None
        return completion or Completion("not_recorded")


# --- rows -------------------------------------------------------------------------------------


class _Row:
    """One row of a recorded file and the errors that name it."""

    def __init__(self, path: Path, number: int, line: bytes) -> None:
        self._path, self._number = path, number
        try:
            values = orjson.loads(line)
        except orjson.JSONDecodeError as error:
            raise self.error(f"not JSON ({error})") from None
        if not isinstance(values, dict):
            raise self.error("expected a JSON object")
        self.values = values

    def error(self, message: str, field: str | None = None) -> InputError:
        return InputError(message, file=self._path, row=self._number, field=field)

    def text(self, field: str) -> str:
        value = self.values.get(field)
        if not isinstance(value, str) or not value:
            raise self.error("expected a non-empty string", field)
        return value

    def grade(self, field: str) -> int:
        value = self.values.get(field)
        if type(value) is not int or not 0 <= value <= 9:
            raise self.error("expected a grade, 0 to 9", field)
        return value


Adapter = Callable[[_Row], Iterator[tuple[Key, Answer]]]


def _graded_lists(row: _Row) -> Iterator[tuple[Key, Answer]]:
    """`{query_id, passages: {"3": text, …}}`: answers of stage `generate`, whole and by level."""
    passages = row.values.get("passages")
    if not isinstance(passages, dict) or not passages:
        raise row.error("expected an object of grade -> text", "passages")
    for grade, text in passages.items():
        if len(grade) != 1 or not grade.isdecimal() or not isinstance(text, str):
            raise row.error('expected grades "0" to "9", each with a text', "passages")
    query_id = row.text("query_id")
    yield ("generate", query_id, ""), _Fields({f"level_{grade}": text for grade, text in passages.items()})
    for grade, text in passages.items():
        yield ("generate", query_id, grade), _Fields({"passage": text})


@dataclass(frozen=True, slots=True)
class _Fields:
    """Recorded texts by name; answered as compact JSON, in the order of the request's schema if any."""

    texts: dict[str, str]

    def __call__(self, request: Request) -> Completion | None:
        names = list(self.texts if request.schema is None else request.schema.get("properties", {}))
        if not names or any(name not in self.texts for name in names):
            return None
        return Completion("stop", orjson.dumps({name: self.texts[name] for name in names}).decode())


def _judgements(row: _Row) -> Iterator[tuple[Key, Answer]]:
    """`{query_id, level, grade, p: [p of grade 0, p of grade 1, …]}`: answers of stage `judge`."""
    p = row.values.get("p")
    if not isinstance(p, list) or not p or not all(_is_probability(value) for value in p):
        raise row.error("expected probabilities (0 to 1) of the grades 0, 1, …", "p")
    pairs = [(str(grade), math.log(value) if value > 0 else NO_PROBABILITY) for grade, value in enumerate(p)]
    logprobs = tuple(sorted(pairs, key=lambda pair: -pair[1]))
    completion = Completion("stop", str(row.grade("grade")), logprobs=logprobs)
    yield ("judge", row.text("query_id"), str(row.grade("level"))), lambda request: completion


def _is_probability(value: Any) -> bool:
    return type(value) in (int, float) and 0 <= value <= 1


_ADAPTERS: dict[str, Adapter] = {"graded_lists": _graded_lists, "judgements": _judgements}
