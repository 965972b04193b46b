from __future__ import annotations

import asyncio
import os
import re
import signal
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from itertools import combinations
from pathlib import Path
from typing import Any

import orjson
import psutil
import pytest
from rapidfuzz.distance import LCSseq
from scripted import fault_server_here

from gradeloom.schemas.config import TREC_LEVELS, FaultEngine, FaultRates
from gradeloom.schemas.errors import EngineUnavailable, InputError
from gradeloom.tasks.engine import fault as module
from gradeloom.tasks.engine.engine import Engine
from gradeloom.tasks.engine.fault import FaultBackend
from gradeloom.tasks.engine.fault_server import FaultServer
from gradeloom.tasks.engine.http import HttpBackend
from gradeloom.tasks.engine.store import Ledger
from gradeloom.tasks.engine.types import Asked, Completion, Request, Sampling, TransportFault

GRADES = (2, 0, 3, 1)


def a_list(query: str, length: str = "between 20 and 30 words", seed: int = 0) -> Request:
    names = [f"level_{grade}" for grade in GRADES]
    schema = {"type": "object", "properties": {n: {"type": "string"} for n in names}, "required": names}
    message = {"role": "user", "content": f"Each passage has {length}. Query: {query}"}
    return Request((message,), Sampling(max_tokens=400, seed=seed), schema)


def a_judgement(query: str, passage: str, **sampling: Any) -> Request:
    rubric = "\n".join(f"{level.grade} = {level.name}" for level in TREC_LEVELS)
    messages = (
        {"role": "system", "content": rubric},
        {"role": "user", "content": f"Query: {query}\n\nPassage: {passage}\n\nGrade (0, 1, 2, 3):"},
    )
    return Request(
        messages, Sampling(**{"max_tokens": 1, "temperature": 0.0, "top_logprobs": 20, **sampling})
    )


@asynccontextmanager
async def serving(folder: Path, **settings: Any) -> AsyncIterator[FaultBackend]:
    backend = FaultBackend(FaultEngine(**settings), folder=folder)
    await backend.start()
    try:
        yield backend
    finally:
        await backend.stop()


async def ask(backend: HttpBackend, requests: Sequence[Request]) -> list[Completion | str]:
    """Each request once, all at the same time; a transport fault as its words, the place left out."""

    async def one(request: Request) -> Completion | str:
        try:
            return await backend.send(Asked("s", "f", "r"), request)
        except TransportFault as fault:
            return str(fault).rpartition("socket: ")[2]

    return await asyncio.gather(*map(one, requests))


def log_of(path: Path) -> list[dict[str, Any]]:
    return [orjson.loads(line) for line in path.read_bytes().splitlines()]


# --- what the "model" says --------------------------------------------------------------------


@pytest.fixture(scope="module")
def lists() -> list[dict[str, str]]:
    async def fetch() -> list[dict[str, str]]:
        async with fault_server_here() as backend:
            found = await ask(backend, [a_list(f"query {i}") for i in range(50)])
        assert all(isinstance(c, Completion) and c.outcome == "stop" for c in found)
        return [orjson.loads(c.text) for c in found if isinstance(c, Completion)]

    return asyncio.run(fetch())


def test_every_property_is_there_in_order_with_its_mark(lists: list[dict[str, str]]) -> None:
    for passages in lists:
        assert list(passages) == ["level_2", "level_0", "level_3", "level_1"]
        for name, text in passages.items():
            assert re.search(r"\btier-\d", text)
            assert text.endswith(f". Ref tier-{name[-1]}.")


def test_lengths_are_as_the_prompt_asks(lists: list[dict[str, str]]) -> None:
    lengths = {len(text.split()) for passages in lists for text in passages.values()}
    assert lengths == set(range(20, 31))


def test_siblings_and_strangers_differ(lists: list[dict[str, str]]) -> None:
    for passages in lists:
        for one, other in combinations(passages.values(), 2):
            assert LCSseq.normalized_similarity(one.split(), other.split()) < 0.5
    texts = [text for passages in lists for text in passages.values()]
    shingles = [set(zip(w, w[1:], w[2:], strict=False)) for w in (text.split() for text in texts)]
    assert all(len(a & b) / len(a | b) < 0.2 for a, b in combinations(shingles, 2))


async def test_grades_are_read_from_the_marks() -> None:
    requests = [a_judgement(f"q {i}", f"text {i}. Ref tier-{i % 4}.") for i in range(400)]
    async with fault_server_here() as backend:
        found = await ask(backend, requests)
    as_written = stricter = abstained = 0
    for i, answer in enumerate(found):
        assert isinstance(answer, Completion)
        assert answer.outcome == "stop"
        assert answer.logprobs is not None
        p = {token: 2.718281828459045**logprob for token, logprob in answer.logprobs}
        assert sum(p.values()) == pytest.approx(1.0)
        assert answer.text == answer.logprobs[0][0]
        mass = sum(p[str(grade)] for grade in range(4))
        best = max(range(4), key=lambda grade: p[str(grade)])
        assert mass == pytest.approx(0.97) or mass == pytest.approx(0.3)
        assert p[str(best)] / mass == pytest.approx(0.85 / 0.97)
        abstained += mass < 0.5
        as_written += best == i % 4
        stricter += best == i % 4 - 1
    assert as_written + stricter == 400
    assert 4 <= stricter <= 40  # 6 % of the three quarters above 0: 18 expected
    assert 2 <= abstained <= 30  # 3 %: 12 expected


async def test_other_questions_a_judge_asks() -> None:
    sampled = [a_judgement("q", "Ref tier-2.", top_logprobs=0, seed=i) for i in range(50)]
    pairs = [a_judgement(f"q{i}", "A: Ref tier-1.\nB: Ref tier-3.") for i in range(50)]
    async with fault_server_here() as backend:
        digits = [c.text for c in await ask(backend, sampled) if isinstance(c, Completion)]
        letters = [c.text for c in await ask(backend, pairs) if isinstance(c, Completion)]
        free = await ask(backend, [Request(({"role": "user", "content": "Say it."},), Sampling(50))])
    assert digits.count("2") > 30
    assert letters.count("B") > 35
    assert isinstance(free[0], Completion)
    assert free[0].text.endswith(".")
    assert free[0].prompt_tokens == 2  # two words, 1.3 tokens each, rounded down


async def test_outcomes_are_spoiled_as_often_as_asked() -> None:
    requests = [a_list(f"query {i}") for i in range(300)]
    async with fault_server_here(truncate=0.2, bad_json=0.2, duplicate=0.2) as backend:
        found = [c for c in await ask(backend, requests) if isinstance(c, Completion)]
    assert len(found) == 300
    cut = [c for c in found if c.outcome == "length"]
    broken = [c for c in found if c.outcome == "stop" and not parses(c.text)]
    whole = [c.text for c in found if c.outcome == "stop" and parses(c.text)]
    assert not any(parses(c.text) for c in cut)
    assert 30 <= len(cut) <= 90
    assert 30 <= len(broken) <= 90
    repeated = len(whole) - len(set(whole))
    assert 26 <= repeated <= 90


def parses(text: str) -> bool:
    try:
        orjson.loads(text)
    except orjson.JSONDecodeError:
        return False
    return True


async def test_a_prompt_longer_than_the_model_takes() -> None:
    async with fault_server_here(max_model_len=64) as backend:
        (found,) = await ask(backend, [a_list("query")])
    assert isinstance(found, Completion)
    assert found.outcome == "prompt_too_long"


# --- determinism ------------------------------------------------------------------------------

MIXED = {"stall": 0.05, "die": 0.05, "bad_body": 0.05, "rate_limited": 0.05, "server_error": 0.05}
SPOILED = {"truncate": 0.1, "bad_json": 0.1, "duplicate": 0.1}


async def test_answers_hang_on_seed_and_request_alone() -> None:
    requests = [a_list(f"query {i}") for i in range(60)]
    async with fault_server_here(seed=5, **SPOILED) as backend:
        at_once = await ask(backend, requests)
        one_by_one = [(await ask(backend, [request]))[0] for request in reversed(requests)][::-1]
    async with fault_server_here(seed=5, **SPOILED) as another:
        restarted = await ask(another, requests)
    async with fault_server_here(seed=6, **SPOILED) as other_seed:
        different = await ask(other_seed, requests)
    assert at_once == one_by_one == restarted
    assert sum(a == b for a, b in zip(at_once, different, strict=True)) < 10


async def test_transport_faults_hang_on_the_occurrence_also_after_a_restart(tmp_path: Path) -> None:
    requests = [a_list(f"query {i}") for i in range(60)]
    settings = {"seed": 5, "transport": FaultRates(**MIXED), "stall_seconds": 0.05}
    log = tmp_path / "requests.jsonl"
    log.touch()
    async with fault_server_here(log=str(log), **settings) as backend:
        first = await ask(backend, requests)
        second = await ask(backend, requests[::-1])
    log.write_bytes(b"".join(log.read_bytes().splitlines(keepends=True)[:60]) + b'{"digest": "torn')
    async with fault_server_here(log=str(log), **settings) as restarted:
        again = await ask(restarted, requests)
    assert again == second[::-1]
    assert again != first
    faults = {answer for answer in (*first, *second) if isinstance(answer, str)}
    assert faults >= {
        "HTTP 429: slow down", "HTTP 500: out of order", "HTTP 200 with a body that is not JSON",
    }  # fmt: skip
    answered = [(a, b) for a, b in zip(first, again, strict=True) if not isinstance(a, str)]
    assert all(a == b for a, b in answered if not isinstance(b, str))


async def test_the_log_says_what_happened_to_every_request(tmp_path: Path) -> None:
    log = tmp_path / "requests.jsonl"
    rates = FaultRates(**MIXED)
    config = FaultEngine(
        seed=1, log=str(log), transport=rates, stall_seconds=0.05, retry_delay=0.0, window=8, **SPOILED
    )
    requests = [a_list(f"query {i}") for i in range(200)]
    with Ledger(tmp_path / "ledger.sqlite") as ledger:
        async with Engine(config, ledger=ledger, cache=None, folder=tmp_path) as engine:
            answers = (engine.complete(Asked("s", "f", str(i)), r) for i, r in enumerate(requests))
            found = await asyncio.gather(*answers)
    lines = log_of(log)
    happened = [line["what"] for line in lines]
    assert {"stall", "die", "bad_body", "rate_limited", "server_error"} < set(happened)
    assert len(lines) == 200 + engine.usage.retries
    assert happened.count("truncate") == sum(c.outcome == "length" for c in found) > 0
    assert {c.outcome for c in found} == {"stop", "length"}
    assert len({line["digest"] for line in lines}) == 200
    of_one = [line["occurrence"] for line in lines if line["digest"] == lines[0]["digest"]]
    assert of_one == list(range(len(of_one)))
    calm = [line["outstanding"] for line in lines]
    assert max(calm) <= 8 + happened.count("stall")  # a stalled request outlives its client


def test_rates_are_shares_of_requests() -> None:
    rates = FaultRates(stall=0.1, die=0.2, bad_body=0.0, rate_limited=0.3, server_error=0.1)
    server = FaultServer(FaultEngine(transport=rates))
    drawn = [server._fault(i.to_bytes(16, "big"), 0) for i in range(5000)]
    shares = {kind: drawn.count(kind) / 5000 for kind in set(drawn)}
    assert set(shares) == {"stall", "die", "rate_limited", "server_error", None}
    expected = {"stall": 0.1, "die": 0.2, "rate_limited": 0.3, "server_error": 0.1, None: 0.3}
    assert shares == pytest.approx(expected, abs=0.03)


def test_the_identity_holds_what_changes_answers_and_nothing_else(tmp_path: Path) -> None:
    def identity(**settings: Any) -> str:
        return FaultBackend(FaultEngine(**settings), folder=tmp_path).identity

    assert identity() == identity(window=3, latency=1.0, transport=FaultRates(die=0.5), log="x")
    assert len({identity(), identity(seed=1), identity(truncate=0.1), identity(bad_json=0.1)}) == 4
    assert identity(seed=1, duplicate=0.25) == "fault:1:0/0/0.25"


# --- the process ------------------------------------------------------------------------------


async def test_nothing_of_ours_is_in_it_and_nothing_of_it_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SOME_API_KEY", "sk-secret")
    async with serving(tmp_path) as backend:
        await backend.start()  # a second time does nothing
        assert backend.pid is not None
        assert backend._server is not None
        pids = [backend.pid, backend._server.supervisor]
        assert all(psutil.pid_exists(pid) for pid in pids if pid)
        environment = psutil.Process(backend.pid).environ()
        assert "SOME_API_KEY" not in environment
        folder = backend._server.scratch
        assert folder is not None
        assert folder.stat().st_mode & 0o777 == 0o700
    assert not any(psutil.pid_exists(pid) for pid in pids if pid)
    assert not folder.exists()
    await backend.stop()


async def test_a_killed_server_is_started_again(tmp_path: Path) -> None:
    config = FaultEngine(retry_delay=0.05, latency=0.01, window=4)
    with Ledger(tmp_path / "ledger.sqlite") as ledger:
        async with Engine(config, ledger=ledger, cache=None, folder=tmp_path) as engine:

            async def one(i: int) -> str:
                if i == 20:
                    assert isinstance(engine._backend, FaultBackend)
                    assert engine._backend.pid is not None
                    os.kill(engine._backend.pid, signal.SIGKILL)
                return (await engine.complete(Asked("s", "f", str(i)), a_list(f"query {i}"))).outcome

            await engine.start()
            first = await asyncio.gather(*(one(i) for i in range(20)))
            found = await asyncio.gather(*(one(i) for i in range(20, 40)))
    assert [*first, *found] == ["stop"] * 40
    assert engine.usage.restarts == 1
    assert engine.usage.retries >= 1


async def test_a_server_that_dies_again_and_again_is_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "RESTARTS", 0)
    async with serving(tmp_path) as backend:
        assert backend._server is not None
        assert backend.pid is not None
        os.kill(backend.pid, signal.SIGKILL)
        await asyncio.to_thread(backend._server._ended.wait, 30)
        with pytest.raises(EngineUnavailable, match=r"died 1 times.*run the same command again"):
            await backend.send(Asked("s", "f", "r"), a_list("query"))


async def test_an_unwritable_log_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    backend = FaultBackend(FaultEngine(log=str(tmp_path / "file" / "log")), folder=tmp_path)
    with pytest.raises(InputError, match=r"file/log, field 'engine.log': cannot write the request log"):
        await backend.start()
