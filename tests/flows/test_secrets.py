"""Keys of the environment appear nowhere that a run writes: not under runs, releases, cache or logs, nor in
Prefect's database. The endpoint does its best to spread the key: it repeats the header of requests in
its errors, its refusals, its completions and its tokens."""

from __future__ import annotations

import asyncio
import hashlib
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

import orjson
import psutil
import pytest
from aiohttp import web
from runs_for_tests import Place, fault_place, processes_of, wait_until

from gradeloom.schemas.config import FaultEngine
from gradeloom.tasks.engine.fault_server import FaultServer

KEY = "sk-proj-madeup3f9aQc1d2e5-Zx8_w7vu6tsr"
SECRETS = {
    "OPENAI_API_KEY": KEY,
    "HF_TOKEN": "hf_unrelatedunrelated4711aaaa",
    "GITHUB_TOKEN": "ghp_unrelatedunrelated4711bbbbbbbbbbbbbb",
    "AWS_SECRET_ACCESS_KEY": "unrelated/secret/access/4711/cccccc",
    "SOME_PASSWORD": "unrelated-password-4711-dddddd",
}
QUERIES = 24


class Prefect(Protocol):
    home: Path


class SpreadingEndpoint:
    """The fault server's answers, many of them with the request's own Authorization header in them."""

    def __init__(self) -> None:
        self.seen: Counter[str] = Counter()
        self.headers: set[str] = set()
        self.all_refused = False
        self.url = ""
        self._model = FaultServer(FaultEngine(seed=5))
        self._listening = threading.Event()
        self._loop = asyncio.new_event_loop()
        self._stop = asyncio.Event()
        self._thread = threading.Thread(target=self._loop.run_until_complete, args=[self._serve()])

    def start(self) -> None:
        self._thread.start()
        assert self._listening.wait(30)

    def stop(self) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join()

    async def _serve(self) -> None:
        runner = web.ServerRunner(web.Server(self._answer, access_log=None))
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        self.url = f"{site.name}/v1"
        self._listening.set()
        await self._stop.wait()
        await runner.cleanup()

    async def _answer(self, request: web.BaseRequest) -> web.StreamResponse:
        header = request.headers["Authorization"]
        self.headers.add(header)
        body = await request.read()
        kind = ("refusal", "fault", "completion", "plain")[hashlib.sha256(body).digest()[0] % 4]
        again = f"fault {hashlib.sha256(body).hexdigest()}"
        if self.all_refused:
            return self._error(401, header)
        if kind == "refusal":
            self.seen[kind] += 1
            return self._error(400, header)
        if kind == "fault" and not self.seen[again]:
            self.seen[again] += 1
            return self._error(500, header)
        response = await self._model(request)
        assert isinstance(response, web.Response)
        if kind == "completion":
            self.seen[kind] += 1
            return self._spread(orjson.loads(bytes(response.body)), header)  # type: ignore[arg-type]
        return response

    def _error(self, status: int, header: str) -> web.Response:
        message = f"Incorrect API key provided: {header}. You sent {header!r}."
        headers = {"X-Your-Key": header, "Set-Cookie": f"session={KEY}"}
        return web.json_response({"error": {"message": message}}, status=status, headers=headers)

    def _spread(self, answer: dict[str, Any], header: str) -> web.Response:
        choice = answer["choices"][0]
        text = choice["message"]["content"]
        choice["message"]["content"] = text.replace(" Ref", f" said {header}. Ref", 1)
        if choice["logprobs"]:
            first = choice["logprobs"]["content"][0]
            first["top_logprobs"].append({"token": KEY, "logprob": -11.0, "bytes": None})
        answer["system_fingerprint"] = header
        return web.json_response(answer)


@pytest.fixture
def endpoint() -> Iterator[SpreadingEndpoint]:
    endpoint = SpreadingEndpoint()
    endpoint.start()
    yield endpoint
    endpoint.stop()


def files_with(words: str, *folders: Path) -> list[Path]:
    """Files that hold some words, byte by byte: databases and their logs, Parquet, everything."""
    files = [path for folder in folders for path in folder.rglob("*") if path.is_file()]
    return [path for path in files if words.encode() in path.read_bytes()]


def parts(secret: str) -> list[str]:
    """A secret's two halves: a database may put the end of a text on another page."""
    return [secret[: len(secret) // 2], secret[len(secret) // 2 :]]


def test_secrets_are_written_nowhere(
    tmp_path: Path, endpoint: SpreadingEndpoint, local_prefect: Prefect
) -> None:
    place = fault_place(tmp_path / "secrets", QUERIES, run={"shard_rows": 6, "max_failed": 1.0})
    config = (place.root / "config.yaml").read_text()
    engine = {
        "kind": "openai", "model": "made-up", "endpoints": [endpoint.url], "api_key_env": "OPENAI_API_KEY",
        "retry_delay": 0,
    }  # fmt: skip
    sets = [f"engine={orjson.dumps(engine).decode()}", "generation.attempts=2"]
    env = {**SECRETS, "GRADELOOM_HOME": str(local_prefect.home)}

    released = place.run_on(*sets, env=env)
    assert released.code == 0, released.error
    assert released.said["flow_run_url"] is not None
    endpoint.all_refused = True
    refused = place.run_on(*sets, "release.version=0.2.0", "judge.temperature=0.5", "run.seed=1", env=env)
    assert refused.code == 2, refused.error
    assert "HTTP 401: Incorrect API key provided: Bearer [key]" in refused.last_line

    # The endpoint had the key and gave it back in every way it knows.
    assert endpoint.headers == {f"Bearer {KEY}"}
    assert endpoint.seen["refusal"] > 5
    assert endpoint.seen["completion"] > 5
    assert sum(kind.startswith("fault") for kind in endpoint.seen) > 5
    assert files_with("[key]", place.run)
    assert files_with("[key]", place.cache)
    prefect = local_prefect.home / "prefect"
    assert files_with("Bearer [key]", prefect)  # the run that was refused says why
    assert files_with("tale 0.1.0", prefect)
    assert "made-up" not in config

    for name, secret in SECRETS.items():
        for part in parts(secret):
            assert files_with(part, tmp_path, local_prefect.home) == [], name


def test_processes_that_a_run_starts_do_not_get_the_secrets(tmp_path: Path) -> None:
    place: Place = fault_place(tmp_path / "children", 2, engine={"latency": 0.2})
    running = place.start(env=SECRETS)
    wait_until(lambda: len(processes_of(place)) >= 2, "supervisor and server run")
    for pid in processes_of(place):
        environment = psutil.Process(pid).environ()
        assert not environment.keys() & SECRETS.keys()
        assert not set(environment.values()) & set(SECRETS.values())
    assert running.wait().code == 0
