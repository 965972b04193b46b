"""Example lists, shown in the prompt: JSONL of `{"query": text, "passages": {grade: text}}`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import orjson

from gradeloom.schemas.errors import InputError
from gradeloom.schemas.rows import digest


@dataclass(frozen=True)
class Example:
    """One list worth imitating: a passage for every grade of the config."""

    query: str
    passages: dict[int, str]


def load_examples(path: str, grades: Sequence[int]) -> tuple[tuple[Example, ...], str]:
    """Read and check a file of examples.

    Returns:
        The examples in file order, and 16 hex digits over their content.

    Raises:
        InputError: the file cannot be read or holds none, or a row is not an example with exactly
            these grades; file, row and field are named.
    """
    try:
        lines = Path(path).read_bytes().removeprefix(b"\xef\xbb\xbf").splitlines()
    except OSError as error:
        raise InputError(
            f"cannot be read: {error.strerror or error}", file=path, field="generation.examples"
        ) from error
    examples = tuple(
        _example(line, grades, path, number) for number, line in enumerate(lines, 1) if line.strip()
    )
    if not examples:
        raise InputError("holds no example lists", file=path, field="generation.examples")
    content = [[e.query, [[grade, e.passages[grade]] for grade in grades]] for e in examples]
    return examples, digest(orjson.dumps(content))


def _example(line: bytes, grades: Sequence[int], path: str, number: int) -> Example:
    try:
        value = orjson.loads(line)
    except orjson.JSONDecodeError as error:
        raise InputError(f"is not JSON ({error})", file=path, row=number) from error
    if not isinstance(value, dict) or set(value) != {"query", "passages"}:
        raise InputError(
            "an object with query and passages, and nothing else, was expected", file=path, row=number
        )
    if not isinstance(value["query"], str) or not value["query"].strip():
        raise InputError("text was expected", file=path, row=number, field="query")
    passages = value["passages"]
    wanted = [str(grade) for grade in grades]
    if not isinstance(passages, dict) or set(passages) != set(wanted):
        raise InputError(
            f"an object with the grades {', '.join(wanted)} was expected",
            file=path,
            row=number,
            field="passages",
        )
    for grade in wanted:
        if not isinstance(passages[grade], str) or not passages[grade].strip():
            raise InputError("text was expected", file=path, row=number, field=f"passages.{grade}")
    return Example(value["query"].strip(), {grade: passages[str(grade)].strip() for grade in grades})
