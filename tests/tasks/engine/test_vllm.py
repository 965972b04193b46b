"""Life and death of a managed server, with a stand-in for vLLM. (The real one: tests/engine.)"""

from __future__ import annotations

import asyncio
import json
import os
import stat
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from gradeloom.schemas.config import VllmEngine
from gradeloom.schemas.errors import EngineUnavailable, InputError
from gradeloom.tasks.engine import vllm
from gradeloom.tasks.engine.types import Asked, Completion, Request, Sampling, TransportFault
from gradeloom.tasks.engine.vllm import VllmBackend

ASKED = Asked(stage="generate", fingerprint="f", row="r")


def request(text: str) -> Request:
    return Request(({"role": "user", "content": text},), Sampling(max_tokens=8))


class Fake:
    """A backend on the stand-in, and what the stand-in noted."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        model = folder / "model"
        model.mkdir()
        (model / "config.json").write_text("{}")
        self.python = folder / "python"
        script = Path(__file__).with_name("fake_vllm.py")
        self.python.write_text(f'#!/bin/sh\nexec {sys.executable} {script} {folder} "$@"\n')
        self.python.chmod(0o755)
        self.backends: list[VllmBackend] = []

    def backend(self, **settings: Any) -> VllmBackend:
        usual = {"model": str(self.folder / "model"), "python": str(self.python)}
        times = {"request_timeout": 20, "startup_timeout": 20}
        config = VllmEngine.model_validate({**usual, **times, **settings})
        self.backends.append(VllmBackend(config, folder=self.folder / "logs"))
        return self.backends[-1]

    def mode(self, mode: str) -> None:
        (self.folder / "mode").write_text(mode)

    def lives(self) -> int:
        return self._log().count("life")

    def asked(self, text: str) -> int:
        return self._log().count(f"asked {text}")

    def read(self, name: str) -> Any:
        return json.loads((self.folder / name).read_text())

    def processes(self) -> list[psutil.Process]:
        """Every living process that has to do with this stand-in."""
        found = []
        for process in psutil.process_iter(["cmdline", "status"]):
            mine = any(str(self.folder) in word for word in process.info["cmdline"] or [])
            if mine and process.info["status"] != psutil.STATUS_ZOMBIE:
                found.append(process)
        return found

    def _log(self) -> list[str]:
        log = self.folder / "log"
        return log.read_text().splitlines() if log.exists() else []


@pytest.fixture
async def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Fake]:
    monkeypatch.setattr(vllm, "TICK", 0.05)
    monkeypatch.setenv("GRADELOOM_HOME", str(tmp_path / "home"))
    fake = Fake(tmp_path)
    yield fake
    for backend in fake.backends:
        await backend.stop()
    assert fake.processes() == []


async def outcome(backend: VllmBackend, text: str) -> str:
    """The answer, or the name of the fault."""
    try:
        return (await backend.send(ASKED, request(text))).text
    except TransportFault:
        return "fault"


async def eventually(condition: Callable[[], bool]) -> None:
    """Wait for what is to happen; the test's time limit is the limit."""
    while not condition():  # noqa: ASYNC110 (it happens in another process)
        await asyncio.sleep(0.02)


async def until_answered(backend: VllmBackend, text: str) -> Completion:
    """Send until there is an answer, as the engine does."""
    for _ in range(50):
        try:
            return await backend.send(ASKED, request(text))
        except TransportFault:
            await asyncio.sleep(0.05)
    raise AssertionError(f"{text!r} was never answered")


# --- start and stop ---------------------------------------------------------------------------


async def test_starts_once_answers_and_leaves_nothing(fake: Fake) -> None:
    backend = fake.backend()
    assert fake.processes() == []  # identity is known without a server
    await asyncio.gather(backend.start(), backend.start())
    await backend.start()
    assert (await backend.send(ASKED, request("hello"))).text == "hello"
    (argument,) = [a for a in fake.read("arguments") if a.startswith("--uds=")]
    socket = Path(argument.removeprefix("--uds="))
    assert stat.S_IMODE(socket.parent.stat().st_mode) == 0o700
    assert len(str(socket)) < 100
    await backend.stop()
    assert fake.processes() == []
    assert not socket.parent.exists()
    assert (fake.lives(), backend.restarts) == (1, 0)


async def test_goes_on_after_a_stop(fake: Fake) -> None:
    backend = fake.backend()
    assert await outcome(backend, "one") == "one"
    await backend.stop()
    assert await outcome(backend, "two") == "two"
    assert (fake.lives(), backend.restarts) == (2, 0)


async def test_tcp_is_local_and_has_a_key(fake: Fake) -> None:
    backend = fake.backend(listen="tcp")
    assert await outcome(backend, "hello") == "hello"
    arguments, environment = fake.read("arguments"), fake.read("environment")
    assert "--host=127.0.0.1" in arguments
    assert len(environment["VLLM_API_KEY"]) >= 32
    assert not any(environment["VLLM_API_KEY"] in argument for argument in arguments)


async def test_arguments_on_the_cpu(fake: Fake) -> None:
    backend = fake.backend(window=300, max_model_len=1024, args=("--seed=7",))
    await backend.start()
    assert fake.read("arguments")[:2] == ["-m", "vllm.entrypoints.openai.api_server"]
    assert backend.flags == (
        "--dtype=float32", "--max-model-len=1024", "--max-num-seqs=256",
        '--structured-outputs-config={"backend":"xgrammar","disable_any_whitespace":true}',
        "--logprobs-mode=raw_logprobs", "--disable-uvicorn-access-log",
        "--enforce-eager", "--no-enable-chunked-prefill", "--max-num-batched-tokens=4096", "--seed=7",
    )  # fmt: skip
    assert set(backend.flags) <= set(fake.read("arguments"))
    assert backend.version == "0.32.0"


async def test_environment_holds_no_secret(fake: Fake, monkeypatch: pytest.MonkeyPatch) -> None:
    secrets = ["OPENAI_API_KEY", "HF_TOKEN", "VLLM_API_KEY", "AWS_SECRET_ACCESS_KEY", "VLLM_DB_PASSWORD",
               "PREFECT_API_URL", "CUDA_AUTH", "MY_OWN"]  # fmt: skip
    for name in secrets:
        monkeypatch.setenv(name, "s3cr3t")
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "3")
    backend = fake.backend(env={"VLLM_LOGGING_LEVEL": "DEBUG"})
    await backend.start()
    environment = fake.read("environment")
    assert not set(secrets) & set(environment)
    assert "s3cr3t" not in environment.values()
    assert environment["OMP_NUM_THREADS"] == "2"
    assert environment["VLLM_CPU_KVCACHE_SPACE"] == "3"
    assert environment["VLLM_LOGGING_LEVEL"] == "DEBUG"
    assert environment["PATH"] == os.environ["PATH"]
    assert (environment["VLLM_NO_USAGE_STATS"], environment["HF_HUB_OFFLINE"]) == ("1", "1")


# --- what the user can have wrong -------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"python": "nowhere/bin/python"}, "no interpreter nowhere/bin/python: `make setup`"),
        ({"python": "/bin/false"}, "is no Python interpreter"),
        ({"python": sys.executable}, "has no vLLM"),
        ({"env": {"HF_TOKEN": "x"}}, "looks like a secret"),
        ({"args": ("--api-key=x",)}, "--api-key is set by gradeloom"),
        ({"args": ("--structured_outputs_config.backend", "auto")}, "is set by gradeloom"),
    ],
)
async def test_wrong_settings(fake: Fake, settings: dict[str, Any], said: str) -> None:
    with pytest.raises(InputError, match=said):
        await fake.backend(**settings).start()
    assert fake.lives() == 0


async def test_dies_while_starting(fake: Fake) -> None:
    fake.mode("dies at start")
    backend = fake.backend()
    with pytest.raises(InputError, match=r"(?s)ended while it was starting.*ValueError: cannot load this"):
        await backend.start()
    with pytest.raises(InputError):  # no second try until a stop
        await backend.send(ASKED, request("x"))
    assert fake.lives() == 1
    await backend.stop()
    fake.mode("")
    assert await outcome(backend, "x") == "x"


async def test_never_ready(fake: Fake) -> None:
    fake.mode("never ready")
    with pytest.raises(EngineUnavailable, match=r"did not answer within 1\.5 s"):
        await fake.backend(startup_timeout=1.5).start()
    assert fake.processes() == []


async def test_answers_with_white_space_are_refused(fake: Fake) -> None:
    fake.mode("spacious")
    with pytest.raises(InputError, match="does not follow a JSON schema compactly"):
        await fake.backend().start()


async def test_cancelled_while_starting(fake: Fake) -> None:
    fake.mode("never ready")
    starting = asyncio.ensure_future(fake.backend().start())
    await eventually(lambda: fake.lives() == 1)
    starting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await starting
    assert fake.processes() == []


# --- death, sickness, stalls ------------------------------------------------------------------


async def test_death_is_noticed_and_only_what_was_out_is_asked_again(fake: Fake) -> None:
    backend = fake.backend()
    assert [await outcome(backend, text) for text in ("a", "b")] == ["a", "b"]
    out = [asyncio.ensure_future(outcome(backend, f"hang once {n}")) for n in range(20)]
    await eventually(lambda: all(fake.asked(f"hang once {n}") for n in range(20)))
    assert await outcome(backend, "die once") == "fault"
    assert await asyncio.gather(*out) == ["fault"] * 20
    again = await asyncio.gather(*(until_answered(backend, f"hang once {n}") for n in range(20)))
    assert [completion.text for completion in again] == [f"hang once {n}" for n in range(20)]
    assert (fake.lives(), backend.restarts) == (2, 1)  # many found it dead, one restarted it
    assert (fake.asked("a"), fake.asked("b"), fake.asked("hang once 7")) == (1, 1, 2)


async def test_killed_from_outside(fake: Fake) -> None:
    backend = fake.backend()
    await backend.start()
    out = asyncio.ensure_future(outcome(backend, "hang once"))
    await eventually(lambda: fake.asked("hang once") == 1)
    for process in fake.processes():
        process.kill()
    assert await out == "fault"
    assert (await until_answered(backend, "hang once")).text == "hang once"
    assert backend.restarts == 1


async def test_a_sick_server_that_goes_on_answering_with_errors(fake: Fake) -> None:
    backend = fake.backend()
    assert (await until_answered(backend, "sick once")).text == "sick once"
    assert (fake.lives(), backend.restarts) == (2, 1)


async def test_stall(fake: Fake) -> None:
    backend = fake.backend(stall_timeout=1.0)
    assert await outcome(backend, "hang once") == "fault"
    assert (await until_answered(backend, "hang once")).text == "hang once"
    assert backend.restarts == 1


async def test_long_work_is_no_stall(fake: Fake) -> None:
    """Tokens move though no answer has come: three times the watchdog's patience."""
    backend = fake.backend(stall_timeout=1.0)
    assert await outcome(backend, "slow") == "slow"
    assert backend.restarts == 0


async def test_gives_up_after_restarts_without_an_answer(fake: Fake) -> None:
    backend = fake.backend(restarts=2)
    assert await outcome(backend, "fine") == "fine"
    with pytest.raises(EngineUnavailable, match=r"(?s)started again 2 times without an answer.*dying of die"):
        await until_answered(backend, "die")
    assert fake.lives() == 3
    with pytest.raises(EngineUnavailable):  # for everybody, and without trying again
        await backend.send(ASKED, request("fine"))
    assert fake.lives() == 3


async def test_answers_in_between_are_progress(fake: Fake) -> None:
    backend = fake.backend(restarts=1)
    for n in range(3):
        assert await outcome(backend, "die") == "fault"
        assert (await until_answered(backend, f"fine {n}")).text == f"fine {n}"
    assert backend.restarts == 3


async def test_does_not_come_up_again(fake: Fake) -> None:
    fake.mode("dies at restart")
    backend = fake.backend(restarts=2)
    assert await outcome(backend, "die") == "fault"
    with pytest.raises(EngineUnavailable, match=r"(?s)ended while it was starting.*cannot load this model"):
        await until_answered(backend, "fine")
    assert fake.lives() == 3
