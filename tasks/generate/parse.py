"""Completions to passages: strictly, or a reason why not. Nothing is repaired."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from gradeloom.tasks.engine.types import Completion

_UNUSABLE = re.compile("[\x00\ud800-\udfff]")


@dataclass(frozen=True, slots=True)
class Fault:
    """Why a completion gives no passages: a reason code, more for people, the grade if one is to blame."""

    reason: str
    detail: str
    grade: int | None = None


class _Object(list[tuple[str, Any]]):
    """A JSON object with its keys as they stand, repeated ones included."""


def read_completion(completion: Completion, keys: Mapping[str, int]) -> dict[int, str] | Fault:
    """The passages of an answered request (outcome `stop` or `length`).

    Args:
        completion: what the model wrote.
        keys: the JSON keys that must be there, and no others, with the grade of each.

    Returns:
        Grade -> passage without surrounding white space, in the order of `keys`; or the fault:
        `truncated`, `whitespace_run`, or one of `parse_passages`.
    """
    if completion.outcome == "length":
        blank = sum(map(str.isspace, completion.text))
        detail = f"cut off after {completion.completion_tokens} tokens"
        if blank * 2 > len(completion.text):
            return Fault(
                "whitespace_run", f"{detail}, {blank} of {len(completion.text)} characters are blank"
            )
        return Fault("truncated", detail)
    return parse_passages(completion.text, keys)


def parse_passages(text: str, keys: Mapping[str, int]) -> dict[int, str] | Fault:
    """The passages in a JSON object with exactly these keys.

    Returns:
        Grade -> passage, in the order of `keys`; or the fault: `bad_json`, `duplicate_level`,
        `missing_level`, `extra_level`, `not_text`, `empty_passage`.
    """
    # The standard library, not orjson: only it shows repeated keys.
    try:
        value = json.loads(text, object_pairs_hook=_Object, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        return Fault("bad_json", f"not JSON: {error}"[:200])
    if not isinstance(value, _Object):
        return Fault("bad_json", f"a JSON object was expected, found {type(value).__name__}")
    found = [key for key, _ in value]
    for key, grade in keys.items():
        if found.count(key) > 1:
            return Fault("duplicate_level", f"{key} stands {found.count(key)} times", grade)
    for key, grade in keys.items():
        if key not in found:
            return Fault("missing_level", f"{key} is missing; found {_shown(found)}", grade)
    if len(found) > len(keys):
        extra = [key for key in found if key not in keys]
        return Fault("extra_level", f"unknown: {_shown(extra)}")
    fields = dict(value)
    passages = {}
    for key, grade in keys.items():
        passage = _passage(fields[key], key, grade)
        if isinstance(passage, Fault):
            return passage
        passages[grade] = passage
    return passages


def _passage(value: Any, key: str, grade: int) -> str | Fault:
    if not isinstance(value, str):
        return Fault("not_text", f"{key} is {type(value).__name__.strip('_').lower()}, not text", grade)
    unusable = _UNUSABLE.search(value)
    if unusable:
        return Fault("not_text", f"{key} holds U+{ord(unusable[0]):04X}, which is no text", grade)
    return value.strip() or Fault("empty_passage", f"{key} is empty", grade)


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON")


def _shown(keys: list[str]) -> str:
    return (", ".join(ascii(key)[:40] for key in keys[:6]) or "nothing") + (", …" if len(keys) > 6 else "")
