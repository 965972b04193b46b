"""YAML that people write (configurations, `--set`, prompts): plain data, every mistake said in one line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from gradeloom.schemas.errors import InputError

_MOST_VALUES = 100_000  # a few aliases of aliases write more than any memory holds


def load_yaml(text: str | bytes, *, file: str | Path, field: str | None = None) -> Any:
    """The value that a YAML document holds.

    Safe YAML, read more strictly: a key stands once in a mapping (plain YAML keeps the last one),
    and aliases neither go round in circles nor multiply without end.

    Raises:
        InputError: it is not such YAML; the file and, where known, the line are named.
    """
    try:
        value = yaml.load(text, Loader=_Loader)  # noqa: S506 (a SafeLoader)
        _refuse_endless(value)
    except RecursionError:
        raise InputError("not valid YAML: nested too deeply", file=file, field=field) from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        mark = getattr(error, "problem_mark", None) or getattr(error, "context_mark", None)
        why = getattr(error, "problem", None) or getattr(error, "context", None) or error
        row = mark.line + 1 if mark and field is None else None
        raise InputError(
            f"not valid YAML: {' '.join(str(why).split())}", file=file, row=row, field=field
        ) from None
    return value


class _Loader(yaml.SafeLoader):
    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        try:
            return super().construct_object(node, deep=deep)
        except (ValueError, LookupError, AttributeError, OverflowError):
            # What PyYAML lets through of Python's int(), date(), …: `2024-13-45`, `!!bool maybe`.
            kind = node.tag.rpartition(":")[2]
            raise _error(f"a value that is no {kind}; text wants quotes", node) from None


def _unique_mapping(loader: _Loader, node: yaml.MappingNode) -> dict[Any, Any]:
    seen: dict[Any, int] = {}
    for key_node, _ in node.value:
        if key_node.tag == "tag:yaml.org,2002:merge":
            continue
        key = loader.construct_object(key_node, deep=True)
        if isinstance(key, dict | list):
            raise _error("a key must be a word", key_node)
        if key in seen:
            raise _error(f"'{key}' is given twice (first in line {seen[key]})", key_node)
        seen[key] = key_node.start_mark.line + 1
    loader.flatten_mapping(node)
    return loader.construct_mapping(node, deep=True)


_Loader.add_constructor(yaml.resolver.BaseResolver.DEFAULT_MAPPING_TAG, _unique_mapping)


def _error(problem: str, node: yaml.Node) -> yaml.constructor.ConstructorError:
    return yaml.constructor.ConstructorError(None, None, problem, node.start_mark)


def _refuse_endless(value: Any) -> None:
    """Count values as often as they are referred to, which is what whoever walks over them does."""
    count, waiting = 0, [value]
    while waiting:
        here = waiting.pop()
        inside = list(here.values()) if isinstance(here, dict) else here if isinstance(here, list) else []
        count += len(inside)
        if count > _MOST_VALUES:
            raise yaml.YAMLError(
                f"aliases make more than {_MOST_VALUES:,} values of it, or go round in circles"
            )
        waiting += inside
