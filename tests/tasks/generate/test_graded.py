from __future__ import annotations

import hashlib
import json
import struct
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jsonschema import Draft202012Validator

from gradeloom.schemas.config import Attributes, GradedConfig, LengthBucket
from gradeloom.schemas.errors import InputError
from gradeloom.schemas.rows import ListRow, QueryRow, arrow_schema
from gradeloom.tasks.engine.types import Asked, Completion, Request
from gradeloom.tasks.generate.graded import GradedGenerator, answer_schema, render_answer
from gradeloom.tasks.generate.parse import Fault, parse_passages, read_completion
from gradeloom.tasks.prompts import Prompt

KEYS = {"level_1": 1, "level_3": 3, "level_0": 0, "level_2": 2}
TEXTS = {3: "Dust scatters blue light.", 2: "Evening skies vary.", 1: "The sky is high.", 0: "Boil an egg."}


def query(i: int = 1) -> QueryRow:
    return QueryRow(id=f"{i:016x}", ordinal=i, query_id=f"q{i}", query=f"why is the sky red {i}")


def generator(*, seed: int = 0, levels: Any = None, **generation: Any) -> GradedGenerator:
    config: dict[str, Any] = {
        "source": {"path": "q.jsonl"}, "release": {"name": "r"}, "run": {"seed": seed},
        "generation": generation,
    }  # fmt: skip
    return GradedGenerator.create(
        GradedConfig.model_validate(config | ({"levels": levels} if levels else {})), "f1"
    )


def good(request: Request) -> str:
    """The right answer to a request, whichever keys it asks for."""
    assert request.schema is not None
    wanted = request.schema["required"]
    return json.dumps({key: TEXTS.get(int(key[-1]) if key[-1].isdigit() else 3, "A text.") for key in wanted})


Answer = Completion | Callable[[Request], Completion]


class Scripted:
    """Answers by (part, attempt); what is not scripted is answered rightly."""

    def __init__(self, script: dict[tuple[str, int], Answer] | None = None) -> None:
        self.script = script or {}
        self.log: list[tuple[Asked, Request]] = []

    async def complete(self, asked: Asked, request: Request) -> Completion:
        self.log.append((asked, request))
        answer = self.script.get((asked.part, asked.attempt), Completion("stop", good(request), 100, 50))
        return answer if isinstance(answer, Completion) else answer(request)


# --- what is asked --------------------------------------------------------------------------


def test_one_request_asks_for_all_levels_in_the_order_drawn() -> None:
    g = generator(max_tokens=300, temperature=0.8, top_p=0.9)
    draw = g.draw(query())
    [request] = g.requests(query())
    order = [level.grade for level in draw.levels]
    assert request.schema == {
        "type": "object",
        "properties": {f"level_{grade}": {"type": "string"} for grade in order},
        "required": [f"level_{grade}" for grade in order],
        "additionalProperties": False,
    }
    assert list(request.schema["properties"]) == request.schema["required"]
    sampling = request.sampling
    assert (sampling.max_tokens, sampling.temperature, sampling.top_p) == (300, 0.8, 0.9)
    text = request.messages[-1]["content"]
    assert draw.length is not None
    assert f"between {draw.length.min_words} and {draw.length.max_words} words" in text
    assert str(draw.audience) in text
    assert str(draw.style) in text
    assert "why is the sky red 1" in text


def test_per_level_asks_one_request_a_level() -> None:
    g = generator(mode="per_level")
    requests = g.requests(query())
    assert [r.schema for r in requests] == [answer_schema({"passage": 0})] * 4
    for level, request in zip(g.draw(query()).levels, requests, strict=True):
        assert f"Level to write: {level.grade} ({level.name})" in request.messages[-1]["content"]
    assert len({r.sampling.seed for r in requests}) == 4
    assert len({json.dumps(r.messages[0]) for r in requests}) == 1  # the system message is shared


def test_every_attempt_has_another_seed_and_keeps_it() -> None:
    g = generator()
    seeds = [g.requests(query(), attempt)[0].sampling.seed for attempt in range(5)]
    assert len(set(seeds)) == 5
    assert all(seed is not None and 0 <= seed < 2**31 for seed in seeds)
    assert seeds == [g.requests(query(), attempt)[0].sampling.seed for attempt in range(5)]
    assert seeds[0] != generator(seed=1).requests(query())[0].sampling.seed
    assert seeds[0] != g.requests(query(2))[0].sampling.seed
    messages = [g.requests(query(), attempt)[0].messages for attempt in range(2)]
    assert messages[0] == messages[1]


@given(seed=st.integers(0, 2**40), row=st.integers(0, 2**60), count=st.integers(2, 6))
@settings(max_examples=60, deadline=None)
def test_the_order_of_levels_is_a_permutation(seed: int, row: int, count: int) -> None:
    levels = [{"grade": g, "name": f"n{g}", "definition": f"d{g}"} for g in range(count)]
    g = generator(seed=seed, levels=levels)
    order = [level.grade for level in g.draw(query(row)).levels]
    assert sorted(order) == list(range(count))
    assert [level.grade for level in g.rubric] == sorted(order, reverse=True)
    plain = generator(seed=seed, levels=levels, shuffle_levels=False).draw(query(row))
    assert [level.grade for level in plain.levels] == sorted(order, reverse=True)


def test_draws_are_spread_evenly() -> None:
    g = generator()
    draws = [g.draw(query(i)) for i in range(2400)]
    orders = Counter(tuple(level.grade for level in d.levels) for d in draws)
    assert len(orders) == 24
    assert max(orders.values()) < 150  # 100 expected; five standard deviations
    lengths = Counter(d.length.name for d in draws if d.length)
    assert set(lengths) == {"short", "medium", "long"}
    assert min(lengths.values()) > 680  # 800 expected
    # Independent streams: every style meets every audience.
    assert len({(d.audience, d.style) for d in draws}) == 24


def number(*parts: str) -> int:
    """The first 64 bits of SHA-256 over parts that are each preceded by their length, written anew."""
    return int.from_bytes(
        hashlib.sha256(b"".join(struct.pack(">Q", len(p)) + p.encode() for p in parts)).digest()[:8], "big"
    )


def test_a_draw_depends_on_seed_and_row_alone() -> None:
    row, attributes = query(), Attributes()
    first = generator(seed=7).draw(row)
    by_hand = sorted((3, 2, 1, 0), key=lambda grade: number("7", row.id, "level", str(grade)))
    assert [level.grade for level in first.levels] == by_hand
    assert first.length == attributes.length[number("7", row.id, "length") % 3]
    assert first.audience == attributes.audience[number("7", row.id, "audience") % 4]
    assert first.style == attributes.style[number("7", row.id, "style") % 6]
    sampling = generator(seed=7).requests(row, 2)[0].sampling
    assert sampling.seed == number("7", row.id, "seed", "", "2") % 2**31
    elsewhere = row.model_copy(update={"ordinal": 99, "query_id": "other"})
    assert generator(seed=7).draw(elsewhere) == first


def test_another_attribute_list_leaves_the_other_draws_alone() -> None:
    attributes = Attributes(audience=("a pilot",), length=(LengthBucket(name="x", min_words=1, max_words=2),))
    plain, changed = generator(), generator(attributes=attributes.model_dump())
    for i in range(50):
        a, b = plain.draw(query(i)), changed.draw(query(i))
        assert (a.levels, a.style) == (b.levels, b.style)
        assert b.audience == "a pilot"


def test_attributes_may_be_switched_off() -> None:
    g = generator(attributes={"length": [], "audience": [], "style": []})
    draw = g.draw(query())
    assert (draw.length, draw.audience, draw.style) == (None, None, None)
    assert "words" not in g.requests(query())[0].messages[-1]["content"]


def test_the_prompt_follows_the_mode_unless_named() -> None:
    assert generator().prompt == Prompt.load("graded_list")
    assert generator(mode="per_level").prompt == Prompt.load("graded_passage")
    assert generator(prompt="graded_list_small").prompt == Prompt.load("graded_list_small")


# --- examples -------------------------------------------------------------------------------


def examples(tmp_path: Path, *lines: Any) -> str:
    path = tmp_path / "examples.jsonl"
    path.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines))
    return str(path)


def example(name: str) -> dict[str, Any]:
    return {"query": name, "passages": {str(g): f"{name} at {g}" for g in range(4)}}


def test_examples_are_drawn_per_row_and_shown_in_the_order_asked(tmp_path: Path) -> None:
    path = examples(tmp_path, *(example(f"example{i}") for i in range(5)))
    g = generator(examples=path, examples_shown=2)
    shown = [tuple(e.query for e in g.draw(query(i)).examples) for i in range(60)]
    assert all(len(set(pair)) == 2 for pair in shown)
    assert len(set(shown)) > 10
    first = g.draw(query()).examples[0]
    keys = {f"level_{level.grade}": level.grade for level in g.draw(query()).levels}
    assert render_answer(first.passages, keys) in g.requests(query())[0].messages[-1]["content"]
    one = generator(examples=path, mode="per_level").requests(query())
    assert '{"passage":"example' in one[0].messages[-1]["content"]
    assert g.requests(query())[0].messages[0] == generator().requests(query())[0].messages[0]
    assert generator(examples=path, examples_shown=0).requests(query()) == generator().requests(query())


def test_a_row_is_not_shown_its_own_query(tmp_path: Path) -> None:
    g = generator(examples=examples(tmp_path, example(query().query)))
    assert g.draw(query()).examples == ()
    assert len(g.draw(query(2)).examples) == 1


def test_the_digest_of_examples_is_of_their_content(tmp_path: Path) -> None:
    digest = generator(examples=examples(tmp_path, example("a"))).examples_digest
    assert generator(examples=examples(tmp_path, "", example("a"), "")).examples_digest == digest
    assert generator(examples=examples(tmp_path, example("b"))).examples_digest != digest
    assert generator().examples_digest == ""


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "row 2: is not JSON"),
        ([1], "row 2: an object with query and passages"),
        ({**example("a"), "more": 1}, "row 2: an object with query and passages"),
        ({**example("a"), "query": " "}, "row 2, field 'query'"),
        (
            {"query": "a", "passages": {"3": "x"}},
            "row 2, field 'passages': an object with the grades 3, 2, 1, 0",
        ),
        ({"query": "a", "passages": {**example("a")["passages"], "2": ""}}, "row 2, field 'passages.2'"),
    ],
)
def test_a_wrong_example_is_named(tmp_path: Path, line: Any, message: str) -> None:
    with pytest.raises(InputError, match=r"examples\.jsonl") as caught:
        generator(examples=examples(tmp_path, example("good"), line))
    assert message in str(caught.value)


def test_examples_must_be_there(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="holds no example lists"):
        generator(examples=examples(tmp_path, ""))
    with pytest.raises(InputError, match="cannot be read"):
        generator(examples=str(tmp_path / "none.jsonl"))


# --- what comes back ------------------------------------------------------------------------


async def test_a_good_list_is_kept_highest_grade_first() -> None:
    g, engine = generator(), Scripted()
    row = await g(engine, query())
    assert row == ListRow(
        id=query().id, ordinal=1, query_id="q1", query="why is the sky red 1",
        passages=[{"grade": g, "text": TEXTS[g]} for g in (3, 2, 1, 0)],
        level_order=[level.grade for level in g.draw(query()).levels],
        length=row.length, min_words=row.min_words, max_words=row.max_words, audience=row.audience,
        style=row.style, attempts=1, prompt_tokens=100, completion_tokens=50,
    )  # fmt: skip
    draw = g.draw(query())
    assert draw.length is not None
    assert (row.length, row.min_words, row.max_words) == (
        draw.length.name, draw.length.min_words, draw.length.max_words,
    )  # fmt: skip
    assert (row.audience, row.style) == (draw.audience, draw.style)
    assert engine.log == [(Asked("generate", "f1", query().id, "", 0, "q1"), g.requests(query())[0])]


CUT = Completion("length", '{"level_1": "Once', 100, 300)


async def test_a_failed_parse_is_asked_again_with_another_seed() -> None:
    g = generator(attempts=3)
    engine = Scripted({("", 0): CUT, ("", 1): Completion("stop", "no", 100, 2)})
    row = await g(engine, query())
    assert (row.status, row.reason, row.raw) == ("kept", None, None)
    assert (row.attempts, row.truncated, row.prompt_tokens, row.completion_tokens) == (3, 1, 300, 352)
    assert [asked.attempt for asked, _ in engine.log] == [0, 1, 2]
    assert [request for _, request in engine.log] == [g.requests(query(), i)[0] for i in range(3)]


async def test_after_the_last_attempt_the_row_failed_with_the_last_reason() -> None:
    missing = Completion("stop", json.dumps({"level_3": "x" * 5000, "level_1": "y"}), 100, 60)
    row = await generator(attempts=2)(Scripted({("", 0): CUT, ("", 1): missing}), query())
    assert (row.status, row.reason, row.attempts, row.truncated) == ("failed", "missing_level", 2, 1)
    assert row.passages == []
    assert row.raw == missing.text[:4000]
    assert row.grade in (2, 0)
    assert row.detail is not None
    assert (row.prompt_tokens, row.completion_tokens) == (200, 360)


@pytest.mark.parametrize(
    ("outcome", "status", "reason", "asked"),
    [
        ("prompt_too_long", "rejected", "prompt_too_long", 1),
        ("not_recorded", "failed", "not_recorded", 1),
        ("unreachable", "failed", "engine_unreachable", 1),
        ("refused", "failed", "refused_by_server", 3),
    ],
)
@pytest.mark.parametrize("mode", ["together", "per_level"])
async def test_outcomes_without_a_completion(
    mode: str, outcome: Any, status: str, reason: str, asked: int
) -> None:
    g = generator(mode=mode, attempts=3)
    part, grade = ("", None) if mode == "together" else ("2", 2)
    engine = Scripted({(part, i): Completion(outcome, "the server's words") for i in range(3)})
    row = await g(engine, query())
    assert (row.status, row.reason, row.detail, row.grade) == (status, reason, "the server's words", grade)
    assert sum(a.part == part for a, _ in engine.log) == asked
    assert row.passages == []


async def test_per_level_each_level_has_its_own_attempts() -> None:
    g = generator(mode="per_level", attempts=2)
    engine = Scripted({("2", 0): CUT, ("0", 0): Completion("stop", '{"passage": " "}', 10, 5)})
    row = await g(engine, query())
    assert [p.grade for p in row.passages] == [3, 2, 1, 0]
    assert (row.status, row.attempts, row.truncated) == ("kept", 6, 1)
    assert (row.prompt_tokens, row.completion_tokens) == (510, 505)
    asked = Counter(asked.part for asked, _ in engine.log)
    assert asked == {"3": 1, "2": 2, "1": 1, "0": 2}


async def test_per_level_the_first_failing_level_in_the_order_drawn_is_named() -> None:
    g = generator(mode="per_level", attempts=1)
    empty, bad = Completion("stop", '{"passage": " "}', 1, 1), Completion("stop", "{", 1, 1)
    row = await g(Scripted({("1", 0): empty, ("3", 0): bad}), query())
    first = next(level.grade for level in g.draw(query()).levels if level.grade in (1, 3))
    assert (row.grade, row.reason) == {1: (1, "empty_passage"), 3: (3, "bad_json")}[first]
    assert (row.status, row.passages) == ("failed", [])


async def test_other_levels_than_the_default() -> None:
    levels = [{"grade": 0, "name": "bad", "definition": "b"}, {"grade": 5, "name": "good", "definition": "g"}]
    row = await generator(levels=levels)(Scripted(), query())
    assert [p.grade for p in row.passages] == [5, 0]


def completion(text: str, outcome: Any = "stop") -> Completion:
    return Completion(outcome, text, 10, 20)


def with_level(grade: int, value: Any) -> str:
    return json.dumps({key: value if g == grade else TEXTS[g] for key, g in KEYS.items()})


@pytest.mark.parametrize(
    ("answer", "reason", "grade"),
    [
        (completion('{"level_1": "x', "length"), "truncated", None),
        (completion("", "length"), "truncated", None),
        (completion(render_answer(TEXTS, KEYS), "length"), "truncated", None),
        (completion('{"level_1": "some words"' + " \n" * 40, "length"), "whitespace_run", None),
        (completion(""), "bad_json", None),
        (completion("Sure! " + render_answer(TEXTS, KEYS)), "bad_json", None),
        (completion(render_answer(TEXTS, KEYS)[:-1]), "bad_json", None),
        (completion("[1]"), "bad_json", None),
        (completion('"level_1"'), "bad_json", None),
        (completion("[" * 100_000), "bad_json", None),
        (completion('{"level_1": NaN}'), "bad_json", None),
        (completion("{}"), "missing_level", 1),
        (completion(json.dumps({"level_1": "x", "level_3": "y", "level_2": "z"})), "missing_level", 0),
        (completion(json.dumps({"Level_1": "x", "level_3": "y", "level_0": "z"})), "missing_level", 1),
        (completion(render_answer(TEXTS, KEYS)[:-1] + ',"level_4":"x"}'), "extra_level", None),
        (completion(render_answer(TEXTS, KEYS)[:-1] + ',"level_3":"x"}'), "duplicate_level", 3),
        (completion(with_level(2, 7)), "not_text", 2),
        (completion(with_level(2, None)), "not_text", 2),
        (completion(with_level(0, {"text": "x"})), "not_text", 0),
        (completion(with_level(1, "a\x00b")), "not_text", 1),
        (completion(with_level(1, "a\ud800b")), "not_text", 1),
        (completion(with_level(3, " \n\t ")), "empty_passage", 3),
    ],
)
def test_every_fault_has_its_reason_and_names_its_level(
    answer: Completion, reason: str, grade: int | None
) -> None:
    found = read_completion(answer, KEYS)
    assert isinstance(found, Fault)
    assert (found.reason, found.grade) == (reason, grade)
    assert found.detail


def test_passages_are_stripped_and_their_paragraphs_kept() -> None:
    assert parse_passages(with_level(3, "  One.\n\nTwo. \n"), KEYS) == TEXTS | {3: "One.\n\nTwo."}
    pretty = json.dumps(json.loads(render_answer(TEXTS, KEYS)), indent=4)
    assert parse_passages(pretty, KEYS) == TEXTS


USABLE = st.text(st.characters(exclude_characters="\x00", exclude_categories=["Cs"]), max_size=30)


@given(texts=st.lists(USABLE.filter(str.strip), min_size=4, max_size=4))
def test_a_list_survives_rendering_and_parsing(texts: list[str]) -> None:
    passages = dict(enumerate(texts))
    answer = render_answer(passages, KEYS)
    assert parse_passages(answer, KEYS) == {grade: text.strip() for grade, text in passages.items()}
    assert list(parse_passages(answer, KEYS)) == [1, 3, 0, 2]  # type: ignore[arg-type]
    Draft202012Validator(answer_schema(KEYS)).validate(json.loads(answer))


JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.floats() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from([*KEYS, "x"]), inner, max_size=5)
    ),
    max_leaves=8,
)
ANY_TEXT = (
    st.text() | JSON_VALUES.map(json.dumps) | st.text(st.sampled_from('{}[]":,\\ntlu0levd_13e ')).map(str)
)


@given(text=ANY_TEXT, outcome=st.sampled_from(["stop", "length"]))
@settings(max_examples=300)
def test_arbitrary_text_gives_all_passages_or_a_fault(text: str, outcome: Any) -> None:
    found = read_completion(Completion(outcome, text, 1, 1), KEYS)
    if isinstance(found, Fault):
        found.detail.encode(errors="strict")
        return
    assert outcome == "stop"
    assert list(found) == list(KEYS.values())
    assert all(isinstance(p, str) and p == p.strip() and p for p in found.values())
    Draft202012Validator(answer_schema(KEYS)).validate(json.loads(text))


@given(
    text=st.text(st.characters(categories=["Cs", "Cc", "L"])), outcome=st.sampled_from(["stop", "refused"])
)
@settings(max_examples=60, deadline=None)
async def test_whatever_comes_back_can_be_written_down(text: str, outcome: Any) -> None:
    import pyarrow as pa

    script = {("", attempt): Completion(outcome, text, 1, 1) for attempt in range(3)}
    row = await generator()(Scripted(script), query())
    assert row.status == "failed"
    pa.Table.from_pylist([row.model_dump()], schema=arrow_schema(ListRow))


@pytest.mark.realdata
def test_the_recorded_lists_parse(realdata: Path) -> None:
    lines = (realdata / "recorded" / "graded_lists.jsonl").read_text().splitlines()
    for line in lines:
        passages = {int(grade): text for grade, text in json.loads(line)["passages"].items()}
        found = parse_passages(render_answer(passages, KEYS), KEYS)
        assert found == {grade: text.strip() for grade, text in passages.items()}
    assert len(lines) == 300
