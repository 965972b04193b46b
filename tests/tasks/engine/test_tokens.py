"""Prompt tokens, counted as a server counts them. (Against the real server: tests/engine.)"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit

from gradeloom.schemas.errors import InputError
from gradeloom.tasks.engine.tokens import TokenCounter
from gradeloom.tasks.engine.types import Message

WORDS = [
    "[UNK]",
    "<bos>",
    "<eos>",
    "user:",
    "assistant:",
    "what",
    "is",
    "a",
    "loom",
    "0",
    "1",
    "grade",
    "three",
]
TEMPLATE = (
    "{{ bos_token }} {% for m in messages %}{{ m['role'] }}: {{ m['content'] }} {{ eos_token }} {% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)


def write_model(folder: Path, template: Any = TEMPLATE, **settings: Any) -> Path:
    """A model folder whose tokens are the words between white space."""
    tokenizer = Tokenizer(WordLevel({word: n for n, word in enumerate(WORDS)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    tokenizer.enable_truncation(5)  # as some models ship; a count must not stop there
    tokenizer.enable_padding(length=50)
    tokenizer.add_special_tokens(["<bos>", "<eos>"])
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"bos_token": "<bos>", "eos_token": {"content": "<eos>", "lstrip": False}, **settings}
    if template is not None:
        settings["chat_template"] = template
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


def user(text: str) -> Message:
    return {"role": "user", "content": text}


def test_count_by_hand(tmp_path: Path) -> None:
    counter = TokenCounter.load(str(write_model(tmp_path)))
    # <bos> user: what is a loom <eos> assistant:
    assert counter.count([user("what is a loom")]) == 8
    assert counter.render([user("what is a loom")]) == "<bos> user: what is a loom <eos> assistant:"
    # … and three more: user: grade <eos>
    assert counter.count([user("what is a loom"), user("grade")]) == 11


def test_special_tokens_in_a_text_count_as_the_server_counts_them(tmp_path: Path) -> None:
    counter = TokenCounter.load(str(write_model(tmp_path)))
    assert counter.count([user("a<eos><eos>")]) == counter.count([user("a")]) + 2


def test_template_in_its_own_file_comes_first(tmp_path: Path) -> None:
    write_model(tmp_path)
    (tmp_path / "chat_template.jinja").write_text("{{ messages[0].content }} assistant:")
    assert TokenCounter.load(str(tmp_path)).count([user("a loom")]) == 3


def test_named_templates(tmp_path: Path) -> None:
    named = [{"name": "tool_use", "template": "never"}, {"name": "default", "template": "a loom"}]
    assert TokenCounter.load(str(write_model(tmp_path, named))).count([user("x")]) == 2


MESSAGES = [
    {"role": "system", "content": "You write\n<b>passages</b>."},
    user(' what "is" a lööm? '),
    {"role": "assistant", "content": "{}"},
    user("grade"),
]


@pytest.mark.parametrize(
    "template",
    [
        TEMPLATE,
        "{% for m in messages %}\n    {% if m.role == 'system' %}\n  S{{ m.content | trim }}\n"
        "{% else %}{{ m | tojson }}{% endif %}\n{% endfor %}",
        "{% for m in messages %}{% if loop.index0 == 1 %}{% continue %}{% endif %}{{ m.content }}"
        "{% if loop.last %}{% break %}{% endif %}{% endfor %}",
        "{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}{{ m.content }}"
        "{% endgeneration %}{% else %}{{ m.content }}{% endif %}{% endfor %}",
        "{% if tools is not none %}tools{% endif %}{% if documents %}documents{% endif %}{{ bos_token }}",
        "{%- set ns = namespace(n=0) -%}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}"
        "{{ ns.n }}",
        "{{ strftime_now('%Y') }} {{ messages | length }}",
        "{{ messages[0].content.split('\n')[0] ~ messages[1]['content'].strip() }}",
        "{% macro say(m) %}{{ m.role }}!{% endmacro %}{% for m in messages %}{{ say(m) }}{% endfor %}",
    ],
)
def test_templates_render_as_transformers_renders_them(tmp_path: Path, template: str) -> None:
    from transformers import PreTrainedTokenizerFast

    folder = write_model(tmp_path, template)
    reference = PreTrainedTokenizerFast(
        tokenizer_file=str(folder / "tokenizer.json"), bos_token="<bos>", eos_token="<eos>"
    )
    expected = reference.apply_chat_template(
        MESSAGES, chat_template=template, tokenize=False, add_generation_prompt=True
    )
    assert TokenCounter.load(str(folder)).render(MESSAGES) == expected


def test_single_token(tmp_path: Path) -> None:
    counter = TokenCounter.load(str(write_model(tmp_path)))
    assert counter.single_token("1")
    assert not counter.single_token("three looms")


def test_a_template_may_refuse(tmp_path: Path) -> None:
    template = "{% if messages[0].role == 'system' %}{{ raise_exception('no system role') }}{% endif %}"
    counter = TokenCounter.load(str(write_model(tmp_path, template)))
    with pytest.raises(InputError, match="no system role"):
        counter.count([{"role": "system", "content": "x"}])


@pytest.mark.parametrize(
    "template",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.append(1) }}",
        "{{ cycler.__init__.__globals__.os.popen('id').read() }}",
    ],
)
def test_a_template_is_confined(tmp_path: Path, template: str) -> None:
    counter = TokenCounter.load(str(write_model(tmp_path, template)))
    with pytest.raises(InputError, match="refuses the messages"):
        counter.count([user("x")])


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda folder: (folder / "tokenizer.json").unlink(), "has no tokenizer.json"),
        (lambda folder: (folder / "tokenizer.json").write_text("{}"), "cannot be read"),
        (lambda folder: (folder / "tokenizer_config.json").write_text("[1]"), "holds no JSON object"),
        (lambda folder: (folder / "tokenizer_config.json").write_text("{"), "is no JSON"),
        (lambda folder: write_model(folder, None), "has no chat template"),
        (lambda folder: write_model(folder, "{% if %}"), "cannot be used"),
    ],
)
def test_what_is_wrong_is_said(tmp_path: Path, damage: Any, said: str) -> None:
    damage(write_model(tmp_path))
    with pytest.raises(InputError, match=said):
        TokenCounter.load(str(tmp_path))


def test_a_model_of_the_hub_cache_offline(tmp_path: Path) -> None:
    """Nothing but the local hub cache is asked when HF_HUB_OFFLINE is set."""
    commit = "0123456789abcdef0123456789abcdef01234567"
    repo = tmp_path / "hub" / "models--weavers--loom"
    write_model(repo / "snapshots" / commit)
    (repo / "snapshots" / commit / "config.json").write_text("{}")
    (repo / "refs").mkdir()
    (repo / "refs" / "main").write_text(commit)
    code = (
        "import sys; from gradeloom.tasks.engine import models;"
        "from gradeloom.tasks.engine.tokens import TokenCounter;"
        "m = [{'role': 'user', 'content': 'what is a loom'}];"
        "print(TokenCounter.load('weavers/loom').count(m), models.identity('weavers/loom'));"
        "print({'torch', 'transformers'} & set(sys.modules))"
    )
    env = {"HF_HUB_OFFLINE": "1", "HF_HUB_CACHE": str(tmp_path / "hub"), "PATH": "/usr/bin:/bin"}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True)
    assert done.stdout == f"8 hub:weavers/loom@{commit}\nset()\n"
