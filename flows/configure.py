"""Configurations, read from YAML and `--set`, with every mistake said in one line.

Paths in a configuration that name input files (`source.path`, `generation.examples`, a prompt's YAML
file, an engine's `path`, a decontamination set; a collection's `path`, `queries`, `corpus`, `qrels`,
`exclude`; `twins`) are relative to the working directory if they exist there, else to the
configuration's own folder; `samples:NAME` is a file of gradeloom's bundled samples. Roots (`run.root`,
`release.root`, `cache.root`, `root`, `releases`, `out`) are always relative to the working directory.
"""

from __future__ import annotations

import difflib
import json
import os
import re
from collections.abc import Iterator, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any, TypeVar, get_args

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails, PydanticUndefined

from gradeloom.schemas.config import GradedConfig, Settings
from gradeloom.schemas.errors import InputError
from gradeloom.tasks.engine.models import home
from gradeloom.tasks.strict_yaml import load_yaml

C = TypeVar("C", bound=Settings)

SETTING = "--set"

_COLLECTION = ("path", "queries", "corpus", "qrels", "exclude", "exclude_queries")
_INPUTS = (
    "source.path", "generation.examples", "filters.*.sets.*", "twins",
    *(f"{place}.{name}" for place in ("data.*", "sets.*", "dev", "collection") for name in _COLLECTION),
)  # fmt: skip
"""Settings that name an input file; `*` is any key or index."""
_SECRET_NAME = re.compile(
    r"(^|[_-])(api[_-]?key|key|secret|password|passwd|token|authorization)$", re.IGNORECASE
)
_SECRET_VALUE = re.compile(
    r"(sk-[\w-]{12,}|hf_\w{16,}|gh[pousr]_\w{16,}|AKIA[0-9A-Z]{16}|xox[abpr]-[\w-]{10,}|eyJ[\w-]+\.[\w-]+\.[\w-]+"
    r"|Bearer\s+\S{8,})"
)
_SECRET_URL = re.compile(r"[a-z][a-z0-9+.-]*://[^/\s@]+@", re.IGNORECASE)


def packaged_configs() -> dict[str, Path]:
    """The configurations that come with gradeloom, by name."""
    folder = Path(str(files("gradeloom.data"))) / "configs"
    return {path.stem: path for path in sorted(folder.glob("*.yaml"))}


def load_config(path_or_name: str, sets: Sequence[str] = (), limit: int | None = None) -> GradedConfig:
    """A graded run's configuration, as `read_config` reads it.

    Args:
        path_or_name: a YAML file, or the name of a packaged configuration (`graded-demo`).
        sets: changes `a.b=value`.
        limit: read only the first N rows of the source (`run.limit`).
    """
    limited = [] if limit is None else [f"run.limit={limit}"]
    return read_config(GradedConfig, path_or_name, [*sets, *limited])


def read_config(form: type[C], path_or_name: str | None, sets: Sequence[str] = ()) -> C:
    """Read a configuration, change it, check it.

    Args:
        form: what it must be.
        path_or_name: a YAML file, or the name of a packaged configuration; None to start from nothing.
        sets: changes `a.b=value`; the value is YAML, a number addresses a list's element
            (`filters.1.max_words=60`). A change into a part that the file leaves out starts from
            that part's default.

    Raises:
        InputError: no such configuration, bad YAML, an unknown or wrong setting, a missing input
            file, or something that looks like a secret.
    """
    file = Path(SETTING) if path_or_name is None else _find(path_or_name)
    data = {} if path_or_name is None else _read_yaml(file)
    changed = [_apply(form, data, change) for change in sets]
    _refuse_secrets(data, file)
    if "cache" in form.model_fields and "GRADELOOM_HOME" in os.environ:
        cache = data.setdefault("cache", {})
        if isinstance(cache, dict):
            cache.setdefault("root", str(home() / "cache"))
    _resolve_paths(form, data, file)
    try:
        return form.model_validate(data)
    except ValidationError as error:
        raise _one_line(form, error, data, file, changed) from None


# --- reading --------------------------------------------------------------------------------


def _find(path_or_name: str) -> Path:
    path = Path(path_or_name)
    if path.is_file():
        return path
    packaged = packaged_configs()
    if path_or_name.removesuffix(".yaml") in packaged:
        return packaged[path_or_name.removesuffix(".yaml")]
    raise InputError(
        f"no such configuration: expected a YAML file or one of {', '.join(packaged) or 'none'}",
        file=path_or_name,
    )


def _read_yaml(file: Path) -> dict[str, Any]:
    try:
        text = file.read_bytes()
    except OSError as error:
        raise InputError(f"cannot read: {error.strerror}", file=file) from None
    data = load_yaml(text, file=file)
    if not isinstance(data, dict):
        raise InputError("expected a mapping of settings (key: value)", file=file)
    return data


# --- --set ----------------------------------------------------------------------------------


def _apply(form: type[BaseModel], data: dict[str, Any], change: str) -> str:
    """Make one change in place; the dotted path that was changed."""
    path, equals, text = change.partition("=")
    parts = path.strip().split(".")
    if not equals or not all(parts):
        raise InputError(f"expected key.subkey=value, got '{_short(path)}'", file=SETTING)
    value = load_yaml(text, file=SETTING, field=path)
    here: Any = data
    models = [form]
    for i, part in enumerate(parts[:-1]):
        models = _narrow(models, here)
        key = _key(here, part, path)
        if isinstance(here, dict) and here.get(key) is None:
            here[key] = _default(models, part)
        here = here[key]
        if not isinstance(here, dict | list):
            raise InputError(f"'{'.'.join(parts[: i + 1])}' holds no settings", file=SETTING, field=path)
        if isinstance(key, str):
            models = _models_of(models, key)
    here[_key(here, parts[-1], path)] = value
    return path.strip()


def _key(here: dict[str, Any] | list[Any], part: str, path: str) -> Any:
    if isinstance(here, dict):
        return part
    if part.isdecimal() and int(part) < len(here):
        return int(part)
    raise InputError(f"expected an index from 0 to {len(here) - 1}, got '{part}'", file=SETTING, field=path)


def _default(models: list[type[BaseModel]], name: str) -> Any:
    """The default of a field as plain data, so that a change can reach into it; else an empty mapping."""
    for model in models:
        info = model.model_fields.get(name)
        if info is not None and info.default not in (None, PydanticUndefined):
            return _sparse(info.default)
    return {}


def _sparse(value: Any) -> Any:
    """A setting without what is default anyway; `kind` stays, for it says what the rest means."""
    if isinstance(value, BaseModel):
        kept = {name for name, info in type(value).model_fields.items()
                if name == "kind" or getattr(value, name) != info.default}  # fmt: skip
        return {name: _sparse(getattr(value, name)) for name in type(value).model_fields if name in kept}
    if isinstance(value, list | tuple):
        return [_sparse(v) for v in value]
    return dict(value) if isinstance(value, dict) else value


# --- the tree of models ---------------------------------------------------------------------


def _models_in(annotation: Any) -> list[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [model for inner in get_args(annotation) for model in _models_in(inner)]


def _models_of(models: list[type[BaseModel]], name: str) -> list[type[BaseModel]]:
    return [
        inner
        for model in models
        if name in model.model_fields
        for inner in _models_in(model.model_fields[name].annotation)
    ]


def _narrow(models: list[type[BaseModel]], data: Any) -> list[type[BaseModel]]:
    """Of several models that may stand here, the one that `kind` names."""
    kind = data.get("kind") if isinstance(data, dict) else None
    named = [m for m in models if "kind" in m.model_fields and m.model_fields["kind"].default == kind]
    return named or models


def _every_path(model: type[BaseModel], prefix: str = "") -> Iterator[str]:
    for name, info in model.model_fields.items():
        yield prefix + name
        for inner in _models_in(info.annotation):
            if "tuple" not in str(info.annotation):
                yield from _every_path(inner, f"{prefix}{name}.")


# --- what must not stand in a configuration ----------------------------------------------------


def _refuse_secrets(data: Any, file: Path, path: str = "") -> None:
    """Refuse what looks like a credential: configurations are stored, shown and released.

    Raises:
        InputError: naming the place, never the value.
    """
    if isinstance(data, dict):
        for key, value in data.items():
            here = f"{path}.{key}" if path else str(key)
            if _SECRET_NAME.search(str(key)) and isinstance(value, str) and value:
                raise _secret(file, here)
            _refuse_secrets(value, file, here)
    elif isinstance(data, list):
        for i, value in enumerate(data):
            flag = str(value).partition("=")[0]
            if flag.startswith("--") and _SECRET_NAME.search(flag):
                raise _secret(file, f"{path}.{i}")
            _refuse_secrets(value, file, f"{path}.{i}")
    elif isinstance(data, str) and (_SECRET_VALUE.search(data) or _SECRET_URL.search(data)):
        raise _secret(file, path)


def _secret(file: Path, path: str) -> InputError:
    return InputError(
        "looks like a key or password; put it into an environment variable and name that in `api_key_env`",
        file=file,
        field=path,
    )


# --- paths ----------------------------------------------------------------------------------


def _resolve_paths(form: type[BaseModel], data: dict[str, Any], file: Path) -> None:
    """Make the paths of input files absolute, in place."""
    patterns = [*_INPUTS]
    for name in ("engine", "judge.engine"):
        if any(isinstance(e, dict) and e.get("kind") == "replay" for e in _values(data, name)):
            patterns.append(f"{name}.path")
    for name in ("generation.prompt", "judge.prompt", "judge.pairwise_prompt"):
        if any(str(prompt).endswith((".yaml", ".yml")) for prompt in _values(data, name)):
            patterns.append(name)
    for pattern in patterns:
        if pattern.partition(".")[0] not in form.model_fields:
            continue
        for holder, key, field in _places(data, pattern.split(".")):
            if isinstance(holder[key], str):
                holder[key] = str(_resolve(holder[key], file, field))


def _values(data: Any, pattern: str) -> list[Any]:
    return [holder[key] for holder, key, _ in _places(data, pattern.split("."))]


def _places(data: Any, pattern: Sequence[str], before: str = "") -> Iterator[tuple[Any, Any, str]]:
    """Everything in plain data that a pattern fits: what holds it, its key there, its dotted path."""
    if isinstance(data, dict):
        keys: list[Any] = [key for key in data if pattern[0] in ("*", key)]
    else:
        keys = [i for i in range(len(data)) if pattern[0] in ("*", str(i))] if isinstance(data, list) else []
    for key in keys:
        path = f"{before}{key}"
        if len(pattern) == 1:
            yield data, key, path
        else:
            yield from _places(data[key], pattern[1:], f"{path}.")


def bundled_sample(value: str) -> Path | None:
    """The bundled sample that `samples:NAME` names; None for any other value."""
    if not value.startswith("samples:"):
        return None
    return Path(str(files("gradeloom.data"))) / "samples" / value.removeprefix("samples:")


def _resolve(value: str, file: Path, field: str) -> Path:
    sample = bundled_sample(value)
    candidates = [sample] if sample is not None else [Path.cwd() / value, file.resolve().parent / value]
    for candidate in candidates:
        if candidate.exists():
            return candidate.resolve()
    looked = " and ".join(str(folder) for folder in dict.fromkeys(c.parent for c in candidates))
    raise InputError(f"no such file or folder: '{value}' (looked in {looked})", file=file, field=field)


# --- errors ---------------------------------------------------------------------------------


def _one_line(
    form: type[BaseModel], error: ValidationError, data: Any, file: Path, changed: list[str]
) -> InputError:
    """The first of pydantic's complaints as one line: file, field, what was expected."""
    errors = error.errors(include_url=False)
    # An unknown key is most often the cause of a missing one, so it is said first.
    first = min(errors, key=lambda e: e["type"] != "extra_forbidden")
    path = _path(first["loc"], data)
    message = _expected(form, first, path)
    if len(errors) > 1:
        message += f" (and {len(errors) - 1} more)"
    by_hand = bool(path) and any(f"{path}.".startswith(f"{c}.") or c.startswith(f"{path}.") for c in changed)
    return InputError(message, file=SETTING if by_hand else file, field=path or None)


def _path(loc: tuple[int | str, ...], data: Any) -> str:
    """The place as a person wrote it: pydantic's own names of union members left out."""
    parts: list[str] = []
    for i, part in enumerate(loc):
        inside = part in data if isinstance(data, dict) else _is_index(part, data)
        if inside:
            data = data[part]
        elif isinstance(data, dict) and part == data.get("kind"):
            continue
        elif i < len(loc) - 1:
            data = None
        parts.append(str(part))
    return ".".join(parts)


def _is_index(part: int | str, data: Any) -> bool:
    return isinstance(data, list) and isinstance(part, int) and part < len(data)


def _expected(form: type[BaseModel], error: ErrorDetails, path: str) -> str:
    kind, given = error["type"], error["input"]
    context = error.get("ctx", {})
    if kind == "extra_forbidden":
        return "unknown setting" + _did_you_mean(form, error["loc"], path)
    if kind == "missing":
        return "is missing and has no default"
    if kind == "union_tag_not_found":
        return "expected `kind`: one of " + _kinds(form, error["loc"])
    if kind == "union_tag_invalid":
        return f"unknown kind '{_short(context.get('tag'))}', expected one of {context.get('expected_tags')}"
    if kind in ("model_type", "model_attributes_type", "dict_type"):
        return f"expected settings (key: value), got {_given(given)}"
    if kind in ("tuple_type", "list_type"):
        return f"expected a list, got {_given(given)}"
    if kind in ("too_short", "too_long"):
        bound = (
            f"at least {context['min_length']}" if kind == "too_short" else f"at most {context['max_length']}"
        )
        return f"expected {bound} of them, got {len(given)}"
    if kind == "string_too_short":
        return "expected some text"
    message = error["msg"].removeprefix("Value error, ").removeprefix("Assertion failed, ")
    message = message.replace("Input should be", "expected")
    if kind == "value_error" or isinstance(given, dict | list):
        return _first_line(message)
    return _first_line(f"{message}, got {_given(given)}")


def _given(value: Any) -> str:
    return _short(json.dumps(value, default=str, ensure_ascii=False))


def _models_at(form: type[BaseModel], loc: Sequence[int | str]) -> list[type[BaseModel]]:
    models = [form]
    for part in loc:
        if isinstance(part, int):
            continue
        named = [m for m in models if "kind" in m.model_fields and m.model_fields["kind"].default == part]
        models = named or _models_of(models, part)
    return models


def _kinds(form: type[BaseModel], loc: Sequence[int | str]) -> str:
    models = _models_at(form, loc)
    return ", ".join(str(m.model_fields["kind"].default) for m in models if "kind" in m.model_fields)


def _did_you_mean(form: type[BaseModel], loc: Sequence[int | str], path: str) -> str:
    name = str(loc[-1])
    siblings = sorted({field for model in _models_at(form, loc[:-1]) for field in model.model_fields})
    parent = path.rpartition(".")[0]
    close = difflib.get_close_matches(name, siblings, n=1, cutoff=0.6)
    if close:
        return f", did you mean `{parent + '.' if parent else ''}{close[0]}`?"
    elsewhere = [p for p in _every_path(form) if p.rpartition(".")[2] == name]
    if elsewhere:
        return f", did you mean `{elsewhere[0]}`?"
    return f"; known here: {', '.join(siblings)}" if siblings else ""


def _short(value: Any, limit: int = 60) -> str:
    text = _first_line(str(value))
    return text if len(text) <= limit else text[: limit - 1] + "…"


def _first_line(text: str) -> str:
    return " ".join(text.split())
