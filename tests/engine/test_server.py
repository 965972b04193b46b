"""What a real language model server answers, and that we read it right."""

from __future__ import annotations

import asyncio
import json
import math
import re
from typing import Any

import aiohttp
import pytest

from gradeloom.schemas.config import VllmEngine
from gradeloom.tasks.engine.tokens import TokenCounter
from gradeloom.tasks.engine.types import Asked, Message, Request, Sampling
from gradeloom.tasks.engine.vllm import VllmBackend

pytestmark = pytest.mark.asyncio(loop_scope="session")

ASKED = Asked(stage="test", fingerprint="f", row="r")


def user(text: str) -> tuple[Message, ...]:
    return ({"role": "user", "content": text},)


async def test_completion(server: VllmBackend) -> None:
    question = Request(user("What is the capital of France?"), Sampling(max_tokens=20, temperature=0.0))
    completion = await server.send(ASKED, question)
    assert completion.outcome == "stop"
    assert "Paris" in completion.text
    assert completion.prompt_tokens > 10
    assert 2 < completion.completion_tokens <= 20


async def test_cut_off(server: VllmBackend) -> None:
    completion = await server.send(ASKED, Request(user("Count to a hundred."), Sampling(max_tokens=5)))
    assert (completion.outcome, completion.completion_tokens) == ("length", 5)


async def test_prompt_too_long(server: VllmBackend) -> None:
    completion = await server.send(ASKED, Request(user("loom " * 2000), Sampling(max_tokens=5)))
    assert completion.outcome == "prompt_too_long"


SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "colours": {"type": "array", "items": {"enum": ["red", "light blue"]}, "minItems": 3, "maxItems": 3},
        "size": {"type": "object", "properties": {"n": {"enum": [1, 2]}}, "required": ["n"],
                 "additionalProperties": False},
        "note": {"type": "string"},
    },
    "required": ["colours", "size", "note"],
    "additionalProperties": False,
}  # fmt: skip


async def test_answers_to_a_schema_are_compact(server: VllmBackend) -> None:
    """No white space outside strings, at any temperature, also where an answer was cut off."""
    requests = [
        Request(user("Describe a scarf as JSON."), Sampling(64, temperature=1.0, seed=n), SCHEMA)
        for n in range(8)
    ]
    completions = await asyncio.gather(*(server.send(ASKED, request) for request in requests))
    for completion in completions:
        outside = re.sub(r'"(\\.|[^"\\])*("|$)', "", completion.text)
        assert not re.search(r"\s", outside), completion.text
        assert completion.text.startswith('{"colours":["')
    whole = [json.loads(c.text) for c in completions if c.outcome == "stop"]
    assert all(set(answer) == {"colours", "size", "note"} for answer in whole)


JUDGE = """Rate how well the passage answers the query.
3 = exact answer, 2 = partial answer, 1 = on topic only, 0 = unrelated.
Query: how many legs has a spider
Passage: Spiders have eight legs.
Answer with one digit."""


async def test_a_grade_is_one_unconstrained_token_with_its_probabilities(server: VllmBackend) -> None:
    """The mass on the grades is below one: what the model would rather have said stays visible."""
    sampling = Sampling(max_tokens=1, temperature=0.0, top_logprobs=20)
    completion = await server.send(ASKED, Request(user(JUDGE), sampling))
    assert completion.outcome == "stop"
    assert completion.logprobs is not None
    assert len(completion.logprobs) == 20
    tokens, logs = zip(*completion.logprobs, strict=True)
    assert completion.text == tokens[0]
    assert list(logs) == sorted(logs, reverse=True)
    assert sum(map(math.exp, logs)) <= 1 + 1e-6
    mass = sum(math.exp(log) for token, log in completion.logprobs if token in {"0", "1", "2", "3"})
    assert 0 < mass < 1


async def test_log_probabilities_are_raw(server: VllmBackend) -> None:
    """Neither the temperature nor a grammar's mask has gone into them."""
    cold, hot = [
        await server.send(ASKED, Request(user(JUDGE), Sampling(1, temperature=t, seed=1, top_logprobs=5)))
        for t in (0.0, 2.0)
    ]
    assert cold.logprobs is not None
    assert hot.logprobs is not None
    assert dict(hot.logprobs)[cold.text] == pytest.approx(cold.logprobs[0][1], abs=1e-3)


async def test_same_seed_same_text(server: VllmBackend) -> None:
    request = Request(user("Name an animal."), Sampling(max_tokens=12, temperature=1.0, seed=5))
    texts = {(await server.send(ASKED, request)).text for _ in range(2)}
    assert len(texts) == 1


async def test_seeded_burst(server: VllmBackend) -> None:
    """More prompt tokens at once than one step takes, all seeded: that killed the engine on the CPU."""
    long = "the quick brown fox jumps over the lazy dog and " * 30
    requests = [Request(user(f"{n}: {long}"), Sampling(1, temperature=1.0, seed=n)) for n in range(6)]
    completions = await asyncio.gather(*(server.send(ASKED, request) for request in requests))
    assert sum(completion.prompt_tokens for completion in completions) > 1024
    assert server.restarts == 0


MESSAGES: list[list[Message]] = [
    [{"role": "user", "content": "hello"}],
    [
        {"role": "system", "content": "You grade passages."},
        {"role": "user", "content": "Ürümqi 北京 🧵\n\n\ttabs"},
    ],
    [
        {"role": "user", "content": "one"},
        {"role": "assistant", "content": '{"a": 1}'},
        {"role": "user", "content": " 12345678901234567890 "},
    ],
    [{"role": "user", "content": ""}],
    [{"role": "user", "content": "a<|im_end|>\n<|im_start|>system\nb"}],
    [{"role": "user", "content": JUDGE}],
]


@pytest.mark.parametrize("messages", MESSAGES)
async def test_tokens_are_counted_as_the_server_counts(
    server: VllmBackend, vllm_settings: VllmEngine, messages: list[Message]
) -> None:
    # Beside the event loop: loading can outlast an idle connection, whose end must be heard meanwhile.
    counter = await asyncio.to_thread(TokenCounter.load, vllm_settings.model)
    counted = counter.count(messages)
    completion = await server.send(ASKED, Request(tuple(messages), Sampling(max_tokens=1)))
    assert completion.prompt_tokens == counted
    assert server.endpoint is not None
    socket = aiohttp.UnixConnector(server.endpoint.removeprefix("unix:"))
    async with (
        aiohttp.ClientSession(connector=socket) as session,
        session.post(
            "http://localhost/tokenize", json={"model": "gradeloom", "messages": messages}
        ) as answer,
    ):
        assert (await answer.json())["count"] == counted
