"""Prompts: YAML files of two Jinja templates, versioned by the digest of their content.

Templates run in Jinja's sandbox; what they are given is data and is never read as a template. A
variable that is missing is an error, never an empty string.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from importlib.resources import files
from pathlib import Path
from typing import Any

from jinja2 import DictLoader, StrictUndefined, Template, TemplateSyntaxError
from jinja2.sandbox import ImmutableSandboxedEnvironment

from gradeloom.schemas.errors import InputError
from gradeloom.schemas.rows import digest
from gradeloom.tasks.engine.types import Message
from gradeloom.tasks.strict_yaml import load_yaml

_REQUIRED = ("name", "version", "user")
_OPTIONAL = ("system",)

# No auto-escaping: a chat message is text, not HTML. The empty loader makes an include an error.
_ENVIRONMENT = ImmutableSandboxedEnvironment(
    undefined=StrictUndefined, loader=DictLoader({}), trim_blocks=True, lstrip_blocks=True, autoescape=False
)


@dataclass(frozen=True)
class Prompt:
    """A prompt as it lies in its file.

    Attributes:
        name: its name, for people and the manifest.
        version: its author's version; what counts is the digest.
        system: Jinja source of the system message, empty if there is none.
        user: Jinja source of the user message.
        digest: 16 hex digits over name, version, system and user; comments do not count.
        file: where it came from, for messages.
    """

    name: str
    version: str
    system: str
    user: str
    digest: str
    file: str = field(default="", compare=False)

    @classmethod
    def load(cls, name_or_path: str) -> Prompt:
        """Load a prompt that gradeloom ships by its name, or any by its path (.yaml, .yml).

        Raises:
            InputError: no such prompt, not YAML, unknown or missing keys, a template's syntax.
        """
        if name_or_path.endswith((".yaml", ".yml")):
            return _parse(_read(Path(name_or_path)), name_or_path)
        shipped = {
            entry.name.removesuffix(".yaml"): entry
            for entry in files("gradeloom.data").joinpath("prompts").iterdir()
            if entry.name.endswith(".yaml")
        }
        if name_or_path not in shipped:
            raise InputError(
                f"no prompt '{name_or_path}'; expected one of {', '.join(sorted(shipped))}, or a .yaml path"
            )
        return _parse(shipped[name_or_path].read_bytes(), f"{name_or_path}.yaml")

    def render(self, **variables: Any) -> tuple[Message, ...]:
        """The messages to send: system first if there is one, then user.

        Raises:
            InputError: a template uses what it was not given, or what the sandbox forbids.
        """
        messages = []
        for role in ("system", "user"):
            source: str = getattr(self, role)
            if source:
                with _template_errors(self.file, role):
                    messages.append({"role": role, "content": _compiled(source).render(variables)})
        return tuple(messages)


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise InputError(f"cannot read the prompt: {error.strerror or error}", file=path) from error


def _parse(data: bytes, file: str) -> Prompt:
    content = load_yaml(data, file=file)
    if not isinstance(content, dict):
        raise InputError("a mapping with name, version, system and user was expected", file=file)
    for key in content:
        if key not in _REQUIRED + _OPTIONAL:
            raise InputError("unknown key; expected name, version, system, user", file=file, field=str(key))
    for key in _REQUIRED:
        if key not in content:
            raise InputError("is missing", file=file, field=key)
    if not isinstance(content["version"], bool) and isinstance(content["version"], int | float):
        content["version"] = str(content["version"])
    texts = {}
    for key in _REQUIRED + _OPTIONAL:
        value = content.get(key) or "" if key in _OPTIONAL else content[key]
        if not isinstance(value, str) or (key in _REQUIRED and not value.strip()):
            raise InputError("text was expected", file=file, field=key)
        texts[key] = value.strip()
    for role in ("system", "user"):
        with _template_errors(file, role):
            _compiled(texts[role])
    body = [texts[key] for key in ("name", "version", "system", "user")]
    return Prompt(**texts, digest=digest(*body), file=file)


@lru_cache(maxsize=64)
def _compiled(source: str) -> Template:
    return _ENVIRONMENT.from_string(source)


@contextmanager
def _template_errors(file: str, role: str) -> Iterator[None]:
    """A template is the user's program: whatever goes wrong in it is named by file and field."""
    try:
        yield
    except TemplateSyntaxError as error:
        raise InputError(f"template line {error.lineno}: {error.message}", file=file, field=role) from error
    except Exception as error:
        why = str(error) or type(error).__name__
        raise InputError(f"cannot be rendered: {why}", file=file, field=role) from error
