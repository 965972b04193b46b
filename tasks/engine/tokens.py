"""Counting prompt tokens before anything is sent, with the model's own tokenizer and chat template.

Only `tokenizers` and Jinja: torch and transformers take seconds to import and are not needed for this.
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox
import orjson
from tokenizers import Tokenizer

from gradeloom.schemas.errors import InputError
from gradeloom.tasks.engine.models import tokenizer_folder
from gradeloom.tasks.engine.types import Message

_SPECIAL = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


class TokenCounter:
    """Counts tokens as a server does: chat template rendered, generation prompt included.

    Args:
        tokenizer: the model's.
        template: the chat template (Jinja, run in a sandbox: it comes with the model).
        special_tokens: `bos_token` and so on, which templates may name.
        name: what to call the model in an error.
    """

    def __init__(
        self, tokenizer: Tokenizer, template: str, special_tokens: dict[str, str], *, name: str
    ) -> None:
        self._tokenizer = tokenizer
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._special_tokens = special_tokens
        self._name = name
        try:
            self._template = _environment().from_string(template)
        except jinja2.TemplateError as error:
            raise InputError(f"the chat template of {name} cannot be used: {error}") from error

    @classmethod
    def load(cls, name: str, revision: str | None = None) -> TokenCounter:
        """The counter of a model.

        Args:
            name: a folder, a hub name, or `bundled`.
            revision: hub revision.

        Raises:
            InputError: there is no such model, or it has no `tokenizer.json` or no chat template.
        """
        folder = tokenizer_folder(name, revision)
        text = _text(folder / "tokenizer.json")
        if text is None:
            raise InputError(
                f"{name} has no tokenizer.json; name a folder or hub model that has one",
                field="engine.tokenizer",
            )
        try:
            tokenizer = Tokenizer.from_str(text)
        except Exception as error:  # `tokenizers` raises nothing narrower
            raise InputError(f"cannot be read: {error}", file=folder / "tokenizer.json") from error
        settings = _json(folder / "tokenizer_config.json")
        template = _text(folder / "chat_template.jinja") or _template(settings.get("chat_template"))
        if template is None:
            raise InputError(
                f"{name} has no chat template; name a model that has one", field="engine.tokenizer"
            )
        settings = {**_json(folder / "special_tokens_map.json"), **settings}
        special = {key: _token(settings[key]) for key in _SPECIAL if settings.get(key)}
        return cls(tokenizer, template, special, name=name)

    def render(self, messages: Sequence[Message]) -> str:
        """The prompt as the model sees it.

        Raises:
            InputError: the template refuses these messages (for example a system message).
        """
        try:
            return self._template.render(
                messages=[dict(message) for message in messages],
                add_generation_prompt=True,
                tools=None,
                documents=None,
                **self._special_tokens,
            )
        except jinja2.TemplateError as error:
            raise InputError(f"the chat template of {self._name} refuses the messages: {error}") from error

    def count(self, messages: Sequence[Message]) -> int:
        """Tokens of the rendered prompt.

        Raises:
            InputError: as `render`.
        """
        return len(self._tokenizer.encode(self.render(messages), add_special_tokens=False).ids)

    def single_token(self, label: str) -> bool:
        """Whether a label is one token, so that one log-probability is the probability of the label."""
        encoded = self._tokenizer.encode(label, add_special_tokens=False)
        # Where a tokenizer puts a word mark before every text, the bare label may still be a token.
        return len(encoded.ids) == 1 or self._tokenizer.token_to_id(label) is not None


def _text(file: Path) -> str | None:
    """The file's text, or None when there is no such file."""
    try:
        return file.read_text(encoding="utf-8")
    except FileNotFoundError:
        return None
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"cannot be read: {error}", file=file) from error


def _json(file: Path) -> dict[str, Any]:
    """The JSON object in a file; empty when there is no such file."""
    try:
        content = orjson.loads(_text(file) or "{}")
    except orjson.JSONDecodeError as error:
        raise InputError(f"is no JSON: {error}", file=file) from error
    if not isinstance(content, dict):
        raise InputError("holds no JSON object", file=file)
    return content


def _template(setting: Any) -> str | None:
    """A template as `tokenizer_config.json` may hold it: a text, or a list of named ones."""
    if isinstance(setting, list):
        setting = next((t["template"] for t in setting if t.get("name") == "default"), None)
    return setting if isinstance(setting, str) else None


def _token(setting: Any) -> str:
    return str(setting["content"]) if isinstance(setting, dict) else str(setting)


# --- the templates' world, as transformers makes it -------------------------------------------


class _Generation(jinja2.ext.Extension):
    """`{% generation %}` marks what a model wrote, for training; in a prompt it means nothing."""

    tags = {"generation"}  # noqa: RUF012 (as Jinja declares it)

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _environment() -> jinja2.sandbox.ImmutableSandboxedEnvironment:
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[_Generation, jinja2.ext.loopcontrols],
        autoescape=False,
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise
    environment.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
    return environment


def _to_json(value: Any, indent: int | None = None, **options: Any) -> str:
    return json.dumps(value, ensure_ascii=False, indent=indent, **options)


def _raise(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)
