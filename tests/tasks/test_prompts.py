from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gradeloom.schemas.config import TREC_LEVELS, Level
from gradeloom.schemas.errors import InputError
from gradeloom.tasks.prompts import Prompt

GOOD = 'name: n\nversion: "1"\nsystem: Be brief.\nuser: "Query: {{ query }}"\n'


def prompt(tmp_path: Path, text: str) -> Prompt:
    path = tmp_path / "p.yaml"
    path.write_text(text)
    return Prompt.load(str(path))


def test_system_comes_first_then_user(tmp_path: Path) -> None:
    assert prompt(tmp_path, GOOD).render(query="eggs") == (
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Query: eggs"},
    )
    without = prompt(tmp_path, 'name: n\nversion: 1\nuser: "{{ query }}"\n')
    assert without.version == "1"
    assert without.render(query="eggs") == ({"role": "user", "content": "eggs"},)


@given(
    text=st.text() | st.sampled_from(["{{ 7*7 }}", "{% raw %}", "{{ query }}", "{# x #}", "<b>&amp;", "a\n"])
)
def test_a_variable_arrives_as_it_is(tmp_path_factory: pytest.TempPathFactory, text: str) -> None:
    loaded = prompt(tmp_path_factory.getbasetemp(), GOOD)
    assert loaded.render(query=text)[1]["content"] == "Query: " + text


def test_the_digest_is_of_the_content(tmp_path: Path) -> None:
    first = prompt(tmp_path, GOOD)
    assert prompt(tmp_path, "# a comment\n" + GOOD.replace("Be brief.", "'Be brief.'")).digest == first.digest
    for old, new in [("name: n", "name: m"), ('"1"', '"2"'), ("brief", "long"), ("Query:", "Q:")]:
        assert prompt(tmp_path, GOOD.replace(old, new)).digest != first.digest
    # What stands in system and what stands in user is told apart.
    moved = 'name: n\nversion: "1"\nsystem: a\nuser: bc\n'
    assert (
        prompt(tmp_path, moved).digest
        != prompt(tmp_path, moved.replace("a\n", "ab\n").replace("bc", "c")).digest
    )


@pytest.mark.parametrize(
    ("text", "field", "message"),
    [
        (GOOD + "model: x\n", "model", "unknown key"),
        (GOOD.replace("name: n\n", ""), "name", "is missing"),
        (GOOD.replace('user: "Query: {{ query }}"\n', ""), "user", "is missing"),
        (GOOD.replace("Be brief.", "[1]"), "system", "text was expected"),
        (GOOD.replace('"Query: {{ query }}"', '" "'), "user", "text was expected"),
        (GOOD.replace('"1"', "true"), "version", "text was expected"),
        (GOOD.replace("{{ query }}", "{{ query"), "user", "template line 1"),
        (GOOD.replace("Be brief.", '"{% endif %}"'), "system", "template line 1"),
        ("- a\n", None, "a mapping with name"),
        ("", None, "a mapping with name"),
        ("name: [\n", None, "not valid YAML"),
        ("name: !!python/object/apply:os.getcwd []\n", None, "not valid YAML"),
        (GOOD + "name: n\n", None, "'name' is given twice"),
    ],
)
def test_a_wrong_file_is_named_with_the_field(
    tmp_path: Path, text: str, field: str | None, message: str
) -> None:
    with pytest.raises(InputError) as caught:
        prompt(tmp_path, text)
    place = f"p.yaml, field '{field}': " if field else "p.yaml"
    assert place in str(caught.value)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    "template",
    [
        "{{ nobody }}",
        "{{ query.nothing }}",
        "{{ query.__class__.__mro__ }}",
        "{{ levels.append(1) }}",
        "{% include 'x' %}",
        "{{ 1 / 0 }}",
        "{{ query + 1 }}",
        "{{ range(10000000000) }}",
    ],
)
def test_what_cannot_be_rendered_is_an_input_error(tmp_path: Path, template: str) -> None:
    loaded = prompt(tmp_path, GOOD.replace("{{ query }}", template))
    with pytest.raises(InputError, match=r"p\.yaml, field 'user': cannot be rendered"):
        loaded.render(query="x", levels=[1])


def test_unknown_names_and_missing_files() -> None:
    with pytest.raises(InputError, match="no prompt 'nope'; expected one of graded_list, "):
        Prompt.load("nope")
    with pytest.raises(InputError, match="no prompt"):
        Prompt.load("../prompts/judge")
    with pytest.raises(InputError, match="cannot read the prompt"):
        Prompt.load("nowhere/p.yaml")


@pytest.mark.parametrize(
    "name", ["graded_list", "graded_list_small", "graded_passage", "judge", "judge_pair"]
)
def test_shipped_prompts_are_named_as_their_files(name: str) -> None:
    assert Prompt.load(name).name == name
    assert Prompt.load(name).digest == Prompt.load(name).digest


def test_the_judge_is_shown_every_level_then_the_query_then_the_passage() -> None:
    for levels in (TREC_LEVELS, TREC_LEVELS[::-1]):
        system, user = Prompt.load("judge").render(levels=levels, query="red sky", passage="Dust scatters.")
        places = [system["content"].index(level.definition) for level in levels]
        assert sorted(places, reverse=levels[0].grade > levels[-1].grade) == places
        assert user["content"] == "Query: red sky\n\nPassage: Dust scatters.\n\nGrade (0, 1, 2, 3):"
    same = [Prompt.load("judge").render(levels=TREC_LEVELS, query=q, passage=q)[0] for q in "ab"]
    assert same[0] == same[1]


def test_the_pairwise_judge_is_shown_both_passages_in_the_order_given() -> None:
    content = Prompt.load("judge_pair").render(query="red sky", first="Dust.", second="Eggs.")[1]["content"]
    assert content == "Query: red sky\n\nPassage A: Dust.\n\nPassage B: Eggs.\n\nBetter passage (A or B):"


@pytest.mark.parametrize("name", ["graded_list", "graded_list_small"])
@pytest.mark.parametrize("bare", [False, True])
def test_the_generator_is_shown_everything_it_is_given(name: str, bare: bool) -> None:
    order = (TREC_LEVELS[2], TREC_LEVELS[0], TREC_LEVELS[3], TREC_LEVELS[1])
    messages = Prompt.load(name).render(
        rubric=TREC_LEVELS,
        levels=order,
        level=None,
        query="red {{ sky }}",
        min_words=None if bare else 31,
        max_words=None if bare else 57,
        audience=None if bare else "a pilot",
        style=None if bare else "a leaflet",
        examples=[] if bare else [{"query": "an example", "answer": '{"level_1":"x"}'}],
    )
    text = "\n".join(m["content"] for m in messages)
    assert "red {{ sky }}" in text
    if name == "graded_list":
        assert all(level.definition in text for level in TREC_LEVELS)
    user = messages[1]["content"]
    if name == "graded_list":
        keys = user[user.index("level_") :]
        assert sorted(range(4), key=lambda g: keys.index(f"level_{g}")) == [1, 3, 0, 2]
    for shown in ("31", "57", "a pilot", "a leaflet", "an example", '{"level_1":"x"}'):
        assert (shown in user) == (not bare)


def test_the_small_prompt_shows_the_example_before_the_query() -> None:
    rubric = [Level(grade=g, name=f"n{g}", definition=f"d{g}") for g in (1, 0)]
    nothing: dict[str, Any] = dict.fromkeys(["min_words", "max_words", "audience", "style"])
    example = {"query": "blue sea", "answer": '{"level_1":"a","level_0":"b"}'}
    user = Prompt.load("graded_list_small").render(
        rubric=rubric, levels=rubric, level=None, query="red sky", examples=[example], **nothing
    )[1]["content"]
    assert user.splitlines() == [
        "Topic: blue sea", '{"level_1":"a","level_0":"b"}', "", "Topic: red sky",
    ]  # fmt: skip


@pytest.mark.parametrize(
    "template", ["{{ 5 | xmlattr }}", "{{ 'a' * 100000000000000 }}", "{{ 5 | dictsort }}"]
)
def test_whatever_goes_wrong_in_a_template_is_named(tmp_path: Path, template: str) -> None:
    broken = prompt(tmp_path, GOOD.replace("{{ query }}", template))
    with pytest.raises(InputError, match=r"field 'user': cannot be rendered: "):
        broken.render(query="q")
