from __future__ import annotations

import asyncio
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import orjson
import pytest
from aiohttp import web
from scripted import ScriptedServer, a_request, asked, completion, error, fault_server_here

from gradeloom.schemas.config import OpenAIEngine, ReplayEngine
from gradeloom.schemas.errors import EngineUnavailable, InputError
from gradeloom.tasks.engine import engine as module
from gradeloom.tasks.engine.engine import Engine
from gradeloom.tasks.engine.http import RetryLater
from gradeloom.tasks.engine.store import Ledger, RequestCache
from gradeloom.tasks.engine.types import Asked, Completion, Request, Sampling, TransportFault


class FakeBackend:
    """Answers as a function of the request's text says; remembers what it was sent."""

    identity = "fake:1"
    restarts = 0
    flags = ("--fast",)

    def __init__(self, answer: Callable[[str], Any] = lambda text: Completion("stop", text, 10, 1)) -> None:
        self.answer = answer
        self.sent: list[str] = []
        self.two_sent = asyncio.Event()
        self.starts = self.stops = 0
        self.start_failure: Exception | None = None

    async def start(self) -> None:
        self.starts += 1
        await asyncio.sleep(0)
        if self.start_failure is not None:
            raise self.start_failure

    async def stop(self) -> None:
        self.stops += 1

    async def send(self, asked: Asked, request: Request) -> Completion:
        text = request.messages[0]["content"]
        self.sent.append(text)
        if len(self.sent) == 2:
            self.two_sent.set()
        await asyncio.sleep(0)
        answer = self.answer(text)
        if asyncio.iscoroutine(answer):
            answer = await answer
        if isinstance(answer, Exception):
            raise answer
        return answer


@pytest.fixture
def ledger(tmp_path: Path):
    with Ledger(tmp_path / "run" / "ledger.sqlite") as ledger:
        yield ledger


@pytest.fixture
def make(ledger: Ledger, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Makes an engine over a fake backend."""

    def make(backend: FakeBackend, cache: RequestCache | None = None, **settings: Any) -> Engine:
        monkeypatch.setattr(module, "_backend", lambda config, folder: backend)
        settings = {"retry_delay": 0.0, "transport_retries": 3, **settings}
        config = OpenAIEngine(model="m", endpoints=["http://unused"], **settings)
        return Engine(config, ledger=ledger, cache=cache, folder=tmp_path)

    return make


# --- asked once -------------------------------------------------------------------------------


async def test_an_attempt_is_never_asked_twice(make: Any) -> None:
    backend = FakeBackend()
    engine = make(backend)
    first = await engine.complete(asked("a"), a_request("one"))
    again = await engine.complete(asked("a"), a_request("one"))
    assert first == Completion("stop", "one", 10, 1)
    assert again == Completion("stop", "one", 10, 1, cached=True)
    assert backend.sent == ["one"]
    usage = engine.usage
    assert (usage.asked, usage.sent, usage.from_ledger) == (2, 1, 1)
    assert (usage.prompt_tokens, usage.completion_tokens) == (10, 1)
    assert usage.outcomes == {"stop": 2}


@pytest.mark.parametrize("outcome", ["length", "refused", "prompt_too_long"])
async def test_a_failed_attempt_is_not_asked_again_but_the_next_is(make: Any, outcome: Any) -> None:
    backend = FakeBackend(lambda text: Completion(outcome, text, 10, 5))
    engine = make(backend)
    for _ in range(2):
        assert (await engine.complete(asked("a"), a_request("seed 0"))).outcome == outcome
    await engine.complete(asked("a", attempt=1), a_request("seed 1"))
    assert backend.sent == ["seed 0", "seed 1"]


async def test_another_process_goes_on_from_the_ledger(make: Any, tmp_path: Path) -> None:
    await make(FakeBackend()).complete(asked("a"), a_request("one"))
    backend = FakeBackend()
    with Ledger(tmp_path / "run" / "ledger.sqlite") as ledger:
        engine = make(backend)
        engine._ledger = ledger
        assert (await engine.complete(asked("a"), a_request("one"))).text == "one"
    assert backend.sent == []
    assert backend.starts == 0


async def test_the_cache_answers_another_run_and_fills_its_ledger(
    make: Any, ledger: Ledger, tmp_path: Path
) -> None:
    with RequestCache(tmp_path / "cache") as cache:
        await make(FakeBackend(), cache).complete(Asked("s", "old", "a"), a_request("one"))
        backend = FakeBackend()
        engine = make(backend, cache)
        found = await engine.complete(Asked("s", "new", "a"), a_request("one"))
        assert found == Completion("stop", "one", 10, 1, cached=True)
        assert ledger.get(Asked("s", "new", "a")) == found
        assert (engine.usage.from_cache, engine.usage.sent, backend.starts) == (1, 0, 0)
        assert (ledger.spent(["old"]), ledger.spent(["new"])) == (11, 0)
        await engine.complete(Asked("s", "new", "b"), a_request("one", seed=7))
        assert backend.sent == ["one"]


async def test_only_completions_that_came_to_their_end_are_cached(make: Any, tmp_path: Path) -> None:
    with RequestCache(tmp_path / "cache") as cache:
        backend = FakeBackend(lambda text: Completion("length", text))
        engine = make(backend, cache)
        await engine.complete(asked("a"), a_request("one"))
        await engine.complete(asked("b"), a_request("one"))
        assert backend.sent == ["one", "one"]
        assert cache.stats().entries == 0


async def test_another_model_is_asked_anew(make: Any, tmp_path: Path) -> None:
    with RequestCache(tmp_path / "cache") as cache:
        await make(FakeBackend(), cache).complete(asked("a"), a_request("one"))
        other = FakeBackend()
        other.identity = "fake:2"
        await make(other, cache).complete(asked("b"), a_request("one"))
        assert other.sent == ["one"]


async def test_not_recorded_is_forgotten(make: Any, ledger: Ledger) -> None:
    backend = FakeBackend(lambda text: Completion("not_recorded"))
    engine = make(backend)
    for _ in range(2):
        assert (await engine.complete(asked("a"), a_request("one"))).outcome == "not_recorded"
    assert ledger.get(asked("a")) is None
    assert len(backend.sent) == 2


# --- the window -------------------------------------------------------------------------------


async def test_no_more_are_outstanding_than_the_window_allows(ledger: Ledger, tmp_path: Path) -> None:
    async def answer(_: dict[str, Any]) -> web.StreamResponse:
        await asyncio.sleep(0.005)
        return completion()

    async with ScriptedServer(answer) as server:
        config = OpenAIEngine(model="m", endpoints=[server.url], window=4)
        async with Engine(config, ledger=ledger, cache=None, folder=tmp_path) as engine:
            requests = (engine.complete(asked(str(i)), a_request(str(i))) for i in range(40))
            found = await asyncio.gather(*requests)
    assert len(server.bodies) == len(found) == 40
    assert server.most_outstanding == 4
    assert 0 < engine.usage.busy_seconds < 60


async def test_requests_are_sent_in_the_order_they_were_asked_for(make: Any) -> None:
    backend = FakeBackend()
    engine = make(backend, window=3)
    await asyncio.gather(*(engine.complete(asked(str(i)), a_request(str(i))) for i in range(50)))
    assert backend.sent == [str(i) for i in range(50)]


async def test_a_cancelled_request_gives_its_place_back(make: Any) -> None:
    held = asyncio.Event()

    async def hang(text: str) -> Completion:
        await held.wait()
        return Completion("stop", text)

    backend = FakeBackend(lambda text: hang(text) if text == "hangs" else Completion("stop", text))
    engine = make(backend, window=2)
    hanging = [asyncio.create_task(engine.complete(asked(f"h{i}"), a_request("hangs"))) for i in range(5)]
    await asyncio.wait_for(backend.two_sent.wait(), 10)
    for task in hanging:
        task.cancel()
    await asyncio.gather(*hanging, return_exceptions=True)
    requests = (engine.complete(asked(str(i)), a_request(str(i))) for i in range(4))
    found = await asyncio.wait_for(asyncio.gather(*requests), 10)
    assert [c.text for c in found] == ["0", "1", "2", "3"]


# --- starting ---------------------------------------------------------------------------------


async def test_the_backend_starts_once_and_only_when_needed(make: Any) -> None:
    backend = FakeBackend()
    engine = make(backend)
    assert backend.starts == 0
    assert engine.flags == ("--fast",)
    await asyncio.gather(*(engine.complete(asked(str(i)), a_request(str(i))) for i in range(10)))
    assert backend.starts == 1
    await engine.stop()
    await engine.complete(asked("later"), a_request("later"))
    assert (backend.starts, backend.stops) == (2, 1)


async def test_a_failed_start_is_not_tried_again_by_everybody(make: Any) -> None:
    backend = FakeBackend()
    backend.start_failure = EngineUnavailable("does not come up")
    engine = make(backend)
    requests = (engine.complete(asked(str(i)), a_request(str(i))) for i in range(10))
    found = await asyncio.gather(*requests, return_exceptions=True)
    assert [str(e) for e in found] == ["does not come up"] * 10
    assert backend.starts == 1
    assert backend.sent == []


async def test_a_context_stops_the_backend(make: Any) -> None:
    backend = FakeBackend()
    async with make(backend) as engine:
        await engine.complete(asked("a"), a_request())
        assert backend.stops == 0
    assert backend.stops == 1


# --- transport faults -------------------------------------------------------------------------


async def test_the_same_attempt_is_sent_again_until_it_is_answered(make: Any, ledger: Ledger) -> None:
    answers = iter([TransportFault("reset"), RetryLater("429", 0.0), Completion("stop", "at last", 5, 5)])
    backend = FakeBackend(lambda _: next(answers))
    engine = make(backend)
    found = await engine.complete(asked("a"), a_request("one"))
    assert found.text == "at last"
    assert backend.sent == ["one"] * 3
    assert (engine.usage.sent, engine.usage.retries, engine.usage.prompt_tokens) == (1, 2, 5)
    assert ledger.get(asked("a")) is not None


async def test_over_http_every_fault_in_a_row_is_overcome(ledger: Ledger, tmp_path: Path) -> None:
    faults = [
        lambda: error(500, "a"),
        lambda: error(429, "b", **{"Retry-After": "0"}),
        lambda: error(503, "c"),
        lambda: web.Response(body=b"{"),
        lambda: web.json_response({}),
    ]
    seen = iter(faults)

    async def answer(_: dict[str, Any]) -> web.StreamResponse:
        return next(seen, completion)()

    async with ScriptedServer(answer) as server:
        config = OpenAIEngine(model="m", endpoints=[server.url], retry_delay=0.0, transport_retries=5)
        async with Engine(config, ledger=ledger, cache=None, folder=tmp_path) as engine:
            assert (await engine.complete(asked("a"), a_request())).outcome == "stop"
    assert engine.usage.retries == len(faults)


async def test_when_nobody_is_answered_the_engine_is_unavailable(make: Any, ledger: Ledger) -> None:
    engine = make(FakeBackend(lambda _: TransportFault("http://h/v1: HTTP 500: broken")))
    with pytest.raises(EngineUnavailable) as caught:
        await engine.complete(asked("a"), a_request("one"))
    assert str(caught.value) == (
        "the engine does not answer: http://h/v1: HTTP 500: broken (sent 4 times); "
        "run the same command again to go on"
    )
    assert ledger.get(asked("a")) is None


async def test_when_only_one_is_not_answered_it_is_unreachable(make: Any, ledger: Ledger) -> None:
    backend = FakeBackend(lambda text: TransportFault("500") if text == "bad" else Completion("stop", text))
    engine = make(backend)

    async def others() -> None:
        while backend.sent.count("bad") < 4:
            n = len(backend.sent)
            await engine.complete(asked(f"good {n}"), a_request(f"good {n}"))

    found, _ = await asyncio.gather(engine.complete(asked("bad"), a_request("bad")), others())
    assert found == Completion("unreachable", "500 (sent 4 times)")
    assert ledger.get(asked("bad")) is None
    assert engine.usage.outcomes["unreachable"] == 1


async def test_the_last_request_may_be_the_one_that_the_server_chokes_on(make: Any) -> None:
    backend = FakeBackend(lambda text: TransportFault("500") if text == "bad" else Completion("stop", text))
    found = await make(backend).complete(asked("bad"), a_request("bad"))
    assert found == Completion("unreachable", "500 (sent 4 times)")
    assert backend.sent == ["bad"] * 4 + ["Say yes."]


async def test_an_error_of_the_configuration_is_not_retried(make: Any) -> None:
    backend = FakeBackend(lambda _: InputError("HTTP 401"))
    with pytest.raises(InputError, match="HTTP 401"):
        await make(backend).complete(asked("a"), a_request())
    assert len(backend.sent) == 1


def test_pauses_double_to_30_seconds_and_honour_the_server(make: Any) -> None:
    engine = make(FakeBackend(), retry_delay=0.5)
    pauses = [engine._pause(asked("a"), n, TransportFault()) for n in range(9)]
    for n, pause in enumerate(pauses):
        assert min(30.0, 0.5 * 2**n) <= pause <= min(30.0, 0.5 * 2**n * 1.25)
    assert pauses == [engine._pause(asked("a"), n, TransportFault()) for n in range(9)]
    assert engine._pause(asked("b"), 0, TransportFault()) != pauses[0]
    assert engine._pause(asked("a"), 0, RetryLater("", 12.0)) == 12.0
    assert engine._pause(asked("a"), 0, RetryLater("", 3600.0)) == 30.0


# --- tokens -----------------------------------------------------------------------------------


class WordCounter:
    """One token a word; digits are single tokens, nothing else is."""

    def count(self, messages: Any) -> int:
        return sum(len(m["content"].split()) for m in messages)

    def single_token(self, label: str) -> bool:
        return label.isdigit()


async def test_a_prompt_that_cannot_fit_is_recorded_and_never_sent(
    make: Any, ledger: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = FakeBackend(lambda text: Completion("stop", "ok"))
    engine = make(backend, max_model_len=64)
    monkeypatch.setattr(engine, "_tokens", WordCounter)
    fits, too_long = "w " * 48, "w " * 49
    assert (await engine.complete(asked("a"), a_request(fits, max_tokens=16))).outcome == "stop"
    found = await engine.complete(asked("b"), a_request(too_long, max_tokens=16))
    assert found.outcome == "prompt_too_long"
    assert found.text == "49 prompt tokens and 16 to be written exceed the model's 64"
    assert backend.sent == [fits]
    recorded = ledger.get(asked("b"))
    assert recorded is not None
    assert recorded.outcome == "prompt_too_long"


def test_labels_must_be_single_tokens(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make(FakeBackend())
    monkeypatch.setattr(engine, "_tokens", WordCounter)
    engine.check_labels(["0", "3"])
    with pytest.raises(InputError, match="label 'AB' is not a single token"):
        engine.check_labels(["0", "AB"])


def test_without_a_tokenizer_nothing_is_counted(make: Any) -> None:
    engine = make(FakeBackend())
    assert engine.count_tokens(a_request().messages) is None
    engine.check_labels(["AB"])


async def test_the_ledger_of_a_full_disk_is_the_callers_error(
    make: Any, ledger: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The real full disk is in test_store; here: its error comes through, and nothing hangs."""

    async def full(*_: Any) -> None:
        raise InputError("database or disk is full", file=ledger.path)

    monkeypatch.setattr(ledger, "record", full)
    engine = make(FakeBackend(), window=2)
    requests = (engine.complete(asked(str(i)), a_request(str(i))) for i in range(6))
    found = await asyncio.wait_for(asyncio.gather(*requests, return_exceptions=True), 10)
    assert all(isinstance(e, InputError) for e in found)


async def test_replay_does_not_use_the_cache(ledger: Ledger, tmp_path: Path) -> None:
    """The same request of two source ids has two recordings."""
    rows = [{"query_id": q, "query": "same", "passages": {"1": f"text of {q}"}} for q in ("q1", "q2")]
    recorded = tmp_path / "recorded.jsonl"
    recorded.write_bytes(b"\n".join(map(orjson.dumps, rows)))
    config = ReplayEngine(path=str(recorded), adapter="graded_lists")
    with RequestCache(tmp_path / "cache") as cache:
        engine = Engine(config, ledger=ledger, cache=cache, folder=tmp_path)
        texts = [(await engine.complete(asked(q), a_request("same"))).text for q in ("q1", "q2")]
    assert texts == ['{"level_1":"text of q1"}', '{"level_1":"text of q2"}']


# --- killed and started again -----------------------------------------------------------------

RUN = """
    import asyncio, sys
    from pathlib import Path
    from gradeloom.schemas.config import FaultEngine
    from gradeloom.tasks.engine.engine import Engine
    from gradeloom.tasks.engine.store import Ledger
    from gradeloom.tasks.engine.types import Asked, Request, Sampling

    async def main(folder):
        config = FaultEngine(seed=3, window=4, latency=0.005, log=str(folder / "requests.jsonl"))
        with Ledger(folder / "ledger.sqlite") as ledger:
            async with Engine(config, ledger=ledger, cache=None, folder=folder) as engine:
                async def one(i):
                    request = Request(({"role": "user", "content": f"q {i}"},), Sampling(50, seed=i))
                    return (await engine.complete(Asked("s", "f", str(i)), request)).text
                print("\\n".join(await asyncio.gather(*(one(i) for i in range(40)))))

    asyncio.run(main(Path(sys.argv[1])))
"""


async def test_killed_and_started_again_only_what_was_in_flight_is_asked_again(tmp_path: Path) -> None:
    script = tmp_path / "run.py"
    script.write_text(textwrap.dedent(RUN))

    def run(**env: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, str(script), str(tmp_path)]
        return subprocess.run(command, capture_output=True, text=True, env={**ENV, **env}, timeout=120)

    for crash in ("after-response:13", "before-commit:4"):
        assert run(GRADELOOM_CRASH=crash).returncode == -9
    resumed = run()
    async with fault_server_here(seed=3) as undisturbed:
        requests = [
            Request(({"role": "user", "content": f"q {i}"},), Sampling(50, seed=i)) for i in range(40)
        ]
        expected = [(await undisturbed.send(asked(), request)).text for request in requests]
    assert resumed.stdout.splitlines() == expected, resumed.stderr
    lines = map(orjson.loads, (tmp_path / "requests.jsonl").read_bytes().splitlines())
    assert 1 <= sum(line["occurrence"] > 0 for line in lines) <= 2 * 4  # the window, at each death


ENV = {"PATH": "/usr/bin:/bin"}
