from __future__ import annotations

import asyncio
import socket
import traceback
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from scripted import Answer, ScriptedServer, a_request, always, asked, completion, error

from gradeloom.schemas.config import OpenAIEngine
from gradeloom.schemas.errors import InputError
from gradeloom.tasks.engine.http import HttpBackend, RetryLater
from gradeloom.tasks.engine.types import Completion, TransportFault

KEY = 'sk-secret/"0123456789'


async def send_once(answer: Answer, patience: float = 20.0, **sampling: Any) -> Completion:
    async with ScriptedServer(answer) as server:
        backend = backend_for(server.url, request_timeout=patience)
        await backend.start()
        try:
            return await backend.send(asked(), a_request(**sampling))
        finally:
            await backend.stop()


def backend_for(*urls: str, **settings: Any) -> HttpBackend:
    return HttpBackend.of(OpenAIEngine(model="m", endpoints=urls, **settings))


# --- what is sent -----------------------------------------------------------------------------


async def body_of(**sampling: Any) -> dict[str, Any]:
    schema = sampling.pop("schema", None)
    async with ScriptedServer(always(completion)) as server:
        backend = backend_for(server.url)
        await backend.start()
        request = a_request(**sampling)
        await backend.send(asked(), type(request)(request.messages, request.sampling, schema))
        await backend.stop()
        return server.bodies[0]


async def test_a_plain_request_holds_no_null() -> None:
    assert await body_of(max_tokens=7, temperature=0.5, top_p=0.9) == {
        "model": "m",
        "messages": [{"role": "user", "content": "hi"}],
        "max_tokens": 7,
        "temperature": 0.5,
        "top_p": 0.9,
    }


async def test_seed_logprobs_and_schema_are_asked_for() -> None:
    schema = {"type": "object", "properties": {"passage": {"type": "string"}}}
    body = await body_of(seed=0, top_logprobs=20, schema=schema)
    assert body["seed"] == 0
    assert (body["logprobs"], body["top_logprobs"]) == (True, 20)
    assert body["response_format"] == {
        "type": "json_schema",
        "json_schema": {"name": "answer", "schema": schema, "strict": True},
    }


async def test_a_unix_socket_is_an_endpoint(tmp_path: Path) -> None:
    paths = []

    async def handle(request: web.BaseRequest) -> web.StreamResponse:
        paths.append(request.path)
        return completion("over a socket")

    runner = web.ServerRunner(web.Server(handle))
    await runner.setup()
    await web.UnixSite(runner, tmp_path / "s").start()
    backend = backend_for(f"unix:{tmp_path}/s")
    await backend.start()
    assert (await backend.send(asked(), a_request())).text == "over a socket"
    assert paths == ["/v1/chat/completions"]
    await backend.stop()
    await runner.cleanup()


# --- outcomes ---------------------------------------------------------------------------------


async def test_a_completion() -> None:
    found = await send_once(always(lambda: completion("hello")))
    assert found == Completion("stop", "hello", prompt_tokens=11, completion_tokens=3)


async def test_a_cut_off_completion_is_length() -> None:
    assert (await send_once(always(lambda: completion("hel", "length")))).outcome == "length"


async def test_one_token_that_was_asked_for_is_not_cut_off() -> None:
    found = await send_once(always(lambda: completion("3", "length")), max_tokens=1)
    assert found.outcome == "stop"


async def test_no_content_is_empty_text() -> None:
    assert (await send_once(always(lambda: completion(None)))).text == ""


async def test_logprobs_of_the_first_token_most_likely_first() -> None:
    first = {
        "token": "3",
        "top_logprobs": [{"token": t, "logprob": p} for t, p in (("2", -3.5), ("3", -0.5))],
    }
    second = {"token": "x", "top_logprobs": [{"token": "x", "logprob": 0.0}]}
    answer = always(lambda: completion("3", logprobs={"content": [first, second]}))
    assert (await send_once(answer, top_logprobs=2)).logprobs == (("3", -0.5), ("2", -3.5))


@pytest.mark.parametrize("logprobs", [None, {}, {"content": None}, {"content": []}])
async def test_logprobs_that_are_not_given_are_none(logprobs: Any) -> None:
    assert (
        await send_once(always(lambda: completion("3", logprobs=logprobs)), top_logprobs=2)
    ).logprobs is None


async def test_an_answer_of_no_token_has_no_logprobs_and_is_no_lack_of_them() -> None:
    """A judge that ends at once abstains; it does not end the run."""
    answer = await send_once(always(lambda: completion("", logprobs={"content": []})), top_logprobs=2)
    assert answer.logprobs == ()


@pytest.mark.parametrize("status", [400, 413, 422])
async def test_a_refused_request_keeps_the_servers_words(status: int) -> None:
    found = await send_once(always(lambda: error(status, "bad\x1b[31m grammar\n" + "x" * 500)))
    assert found.outcome == "refused"
    assert found.text.startswith("bad [31m grammar xxx")
    assert len(found.text) == 200


@pytest.mark.parametrize(
    "message",
    [
        "This model's maximum context length is 2048 tokens. However, you requested 3000 tokens.",
        "The decoder prompt (length 5000) is longer than the maximum model length of 2048.",
        "Input length (3000) exceeds model's maximum context length (2048).",
        "prompt is too long: 210000 tokens > 200000 maximum",
    ],
)
async def test_a_prompt_that_the_server_finds_too_long(message: str) -> None:
    assert (await send_once(always(lambda: error(400, message)))).outcome == "prompt_too_long"


async def test_filtered_content_is_refused() -> None:
    assert (await send_once(always(lambda: completion("", "content_filter")))).outcome == "refused"


# --- transport faults -------------------------------------------------------------------------


def raw(body: bytes, status: int = 200) -> Answer:
    return always(lambda: web.Response(body=body, status=status))


@pytest.mark.parametrize("status", [408, 425, 429, 500, 502, 503, 504])
async def test_a_busy_or_broken_server_is_a_transport_fault(status: int) -> None:
    with pytest.raises(TransportFault, match=rf"http://127.0.0.1:\d+/v1: HTTP {status}: later"):
        await send_once(always(lambda: error(status, "later")))


async def test_the_wait_that_a_server_asks_for_is_known() -> None:
    with pytest.raises(RetryLater) as fault:
        await send_once(always(lambda: error(429, "later", **{"Retry-After": "7"})))
    assert fault.value.seconds == 7.0


async def test_a_date_to_retry_after_is_left_alone() -> None:
    headers = {"Retry-After": "Wed, 21 Oct 2099 07:28:00 GMT"}
    with pytest.raises(TransportFault) as fault:
        await send_once(always(lambda: error(503, "later", **headers)))
    assert not isinstance(fault.value, RetryLater)


@pytest.mark.parametrize(
    "body",
    [
        b'{"choices": [{"mess',
        b"<html>",
        b"",
        b"null",
        b"[]",
        b"{}",
        b'{"choices": []}',
        b'{"choices": [{"message": {"content": "x"}}],'
        b' "usage": {"prompt_tokens": 1, "completion_tokens": 1}}',
        b'{"choices": [{"message": {"content": "x"}, "finish_reason": "stop"}]}',
        b'{"choices": [{"message": {"content": 7}, "finish_reason": "stop"}],'
        b' "usage": {"prompt_tokens": 1, "completion_tokens": 1}}',
        b'{"choices": [{"message": {"content": "x"}, "finish_reason": "abort"}],'
        b' "usage": {"prompt_tokens": 1, "completion_tokens": 1}}',
    ],
)
async def test_a_body_that_is_no_completion_is_a_transport_fault(body: bytes) -> None:
    with pytest.raises(TransportFault):
        await send_once(raw(body))


async def test_no_answer_in_time() -> None:
    release = asyncio.Event()

    async def never(_: dict[str, Any]) -> web.StreamResponse:
        await release.wait()
        return completion()

    asyncio.get_running_loop().call_later(0.5, release.set)  # so that the server can end
    with pytest.raises(TransportFault, match="no answer in time"):
        await send_once(never, patience=0.1)


@pytest.mark.parametrize(
    "response",
    [b"", b"HTTP/1.1 200 OK\r\nContent-Length: 900\r\n\r\n{", b"HTTP/1.1 " + KEY.encode() + b"\r\n\r\n"],
)
async def test_a_connection_that_dies_or_talks_nonsense(
    response: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(response)
        writer.close()

    monkeypatch.setenv("SOME_KEY", KEY)
    server = await asyncio.start_server(handle, "127.0.0.1", 0)
    url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/v1"
    backend = backend_for(url, api_key_env="SOME_KEY")
    await backend.start()
    with pytest.raises(TransportFault, match=url) as caught:
        await backend.send(asked(), a_request())
    assert caught.value.__context__ is None
    assert "secret" not in str(caught.value)
    await backend.stop()
    server.close()


async def test_nobody_listens() -> None:
    backend = backend_for(a_dead_url())
    await backend.start()
    with pytest.raises(TransportFault, match=r"127\.0\.0\.1"):
        await backend.send(asked(), a_request())
    await backend.stop()


def a_dead_url() -> str:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{s.getsockname()[1]}/v1"


# --- the configuration is wrong ---------------------------------------------------------------


@pytest.mark.parametrize("status", [401, 403])
async def test_a_key_that_is_not_taken_names_its_variable(
    status: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SOME_KEY", KEY)
    async with ScriptedServer(always(lambda: error(status, "no"))) as server:
        backend = backend_for(server.url, api_key_env="SOME_KEY")
        await backend.start()
        with pytest.raises(InputError, match=rf"HTTP {status}: no; check the key .* SOME_KEY"):
            await backend.send(asked(), a_request())
        await backend.stop()


async def test_a_missing_key_is_named_before_anything_is_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SOME_KEY", raising=False)
    with pytest.raises(InputError, match="environment variable SOME_KEY is not set"):
        await backend_for("http://127.0.0.1:1/v1", api_key_env="SOME_KEY").start()


async def test_a_key_with_a_line_break_is_not_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOME_KEY", "sk-one\nsk-two")
    with pytest.raises(InputError, match="SOME_KEY holds characters") as caught:
        await backend_for("http://127.0.0.1:1/v1", api_key_env="SOME_KEY").start()
    assert "sk-" not in str(caught.value)


@pytest.mark.parametrize("message", ["The model `m` does not exist.", "Not Found"])
async def test_a_wrong_model_or_path_stops_at_once(message: str) -> None:
    with pytest.raises(InputError, match=f"HTTP 404: {message}; check .* the model 'm'"):
        await send_once(always(lambda: error(404, message)))


async def test_a_redirect_is_not_followed() -> None:
    async with ScriptedServer(always(completion)) as elsewhere:
        moved = web.Response(status=307, headers={"Location": elsewhere.url + "/chat/completions"})
        with pytest.raises(InputError, match=r"HTTP 307.* never followed"):
            await send_once(always(lambda: moved))
        assert elsewhere.bodies == []


# --- the key ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "answer",
    [
        lambda: error(400, f"no: Bearer {KEY}"),
        lambda: error(401, "x" * 185 + KEY),
        lambda: error(500, KEY),
        lambda: web.Response(text=f"<h1>{KEY}</h1>", status=502),
        lambda: web.json_response({"headers": [f"Bearer {KEY}"]}, status=503),
        lambda: web.json_response({"error": {"message": KEY}}),
        lambda: completion(f"you sent {KEY}"),
        lambda: completion("", KEY),
        lambda: completion("3", logprobs={"content": [{"top_logprobs": [{"token": "3", "logprob": KEY}]}]}),
        lambda: web.Response(body=b"{" + KEY.encode()),
    ],
)
async def test_a_key_that_the_server_says_again_is_nowhere(
    answer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SOME_KEY", KEY)
    async with ScriptedServer(always(answer)) as server:
        backend = backend_for(server.url, api_key_env="SOME_KEY")
        await backend.start()
        try:
            shown = repr(await backend.send(asked(), a_request(top_logprobs=2)))
        except (TransportFault, InputError) as caught:
            shown = "".join(traceback.format_exception(caught)) + repr((caught.args, caught.__context__))
        await backend.stop()
        assert server.headers[0]["Authorization"] == f"Bearer {KEY}"
    assert "secret" not in shown
    assert "secret" not in repr(backend) + repr(vars(backend))


@pytest.mark.parametrize("word", ["1", "EMPTY"])
async def test_a_word_in_place_of_a_key_does_not_change_answers(
    word: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SOME_KEY", word)
    logprobs = {"content": [{"top_logprobs": [{"token": word, "logprob": -0.1}]}]}
    async with ScriptedServer(always(lambda: completion(f"{word}.", logprobs=logprobs))) as server:
        backend = backend_for(server.url, api_key_env="SOME_KEY")
        await backend.start()
        answer = await backend.send(asked(), a_request(top_logprobs=2))
        await backend.stop()
    assert answer.text == f"{word}."
    assert answer.logprobs == ((word, -0.1),)


# --- many endpoints ---------------------------------------------------------------------------


async def test_the_endpoint_with_the_fewest_outstanding_is_asked() -> None:
    release, arrived = asyncio.Event(), asyncio.Event()

    async def slow(_: dict[str, Any]) -> web.StreamResponse:
        arrived.set()
        await release.wait()
        return completion("slow")

    async with ScriptedServer(slow) as one, ScriptedServer(always(completion)) as other:
        backend = backend_for(one.url, other.url)
        await backend.start()
        first = asyncio.create_task(backend.send(asked(), a_request()))
        await arrived.wait()
        for _ in range(5):
            await backend.send(asked(), a_request())
        assert (len(one.bodies), len(other.bodies)) == (1, 5)
        release.set()
        assert (await first).text == "slow"
        await backend.send(asked(), a_request())
        assert (len(one.bodies), len(other.bodies)) == (2, 5)
        await backend.stop()


async def test_a_dead_endpoint_does_not_draw_every_request() -> None:
    async with ScriptedServer(always(completion)) as alive:
        backend = backend_for(a_dead_url(), alive.url)
        await backend.start()
        faults = 0
        for _ in range(10):
            try:
                await backend.send(asked(), a_request())
            except TransportFault:
                faults += 1
        await backend.stop()
    assert faults == 1
    assert len(alive.bodies) == 9
