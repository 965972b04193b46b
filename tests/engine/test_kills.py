"""Whoever of the four is killed, nothing of the real engine is left, and only what was out is asked again."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from gradeloom.schemas.config import VllmEngine
from gradeloom.tasks.engine.types import Asked, Completion, Request, Sampling, TransportFault
from gradeloom.tasks.engine.vllm import VllmBackend

ASKED = Asked(stage="test", fingerprint="f", row="r")
SHARED_MEMORY = Path("/dev/shm")


def living(session: int) -> list[int]:
    """Process ids of a session's members, zombies left out, read from /proc."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            state, _, _, its_session = (entry / "stat").read_text().rpartition(")")[2].split()[:4]
        except OSError:
            continue
        if int(its_session) == session and state != "Z":
            found.append(int(entry.name))
    return found


def named(session: int, name: str) -> int | None:
    """The member of a session whose title holds the name."""
    for pid in living(session):
        if name in Path(f"/proc/{pid}/cmdline").read_text():
            return pid
    return None


def gone(process: psutil.Process) -> bool:
    """Whether a process has ended, reaped or not."""
    try:
        return process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def wait_for(condition: Callable[[], bool], seconds: float) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "did not happen in time"
        time.sleep(0.05)


def session_of(server: VllmBackend) -> int:
    assert server._server is not None
    session = server._server._process.session
    assert session is not None
    return session


async def ask(server: VllmBackend, n: int, tokens: int, faults: list[int]) -> Completion:
    """Send a request until it is answered, noting every sending that failed."""
    request = Request(
        ({"role": "user", "content": f"Tell me a long story about number {n}."},),
        Sampling(tokens, temperature=1.0, seed=n),
    )
    while True:
        try:
            return await server.send(ASKED, request)
        except TransportFault:
            faults.append(n)
            await asyncio.sleep(0.5)


@pytest.mark.asyncio(loop_scope="session")
async def test_api_server_killed(server: VllmBackend) -> None:
    faults: list[int] = []
    restarts, session = server.restarts, session_of(server)
    await asyncio.gather(*(ask(server, n, 4, faults) for n in range(3)))
    out = [asyncio.ensure_future(ask(server, n, 200, faults)) for n in range(3, 7)]
    await asyncio.sleep(2)
    assert named(session, "VLLM::EngineCore")
    os.kill(session, signal.SIGKILL)
    completions = await asyncio.gather(*out)
    assert living(session) == []
    assert {completion.outcome for completion in completions} <= {"stop", "length"}
    assert set(faults) == {3, 4, 5, 6}  # what had been answered was not asked again
    assert server.restarts == restarts + 1


@pytest.mark.asyncio(loop_scope="session")
async def test_engine_core_killed(server: VllmBackend) -> None:
    session = session_of(server)
    out = asyncio.ensure_future(
        server.send(ASKED, Request(({"role": "user", "content": "A story."},), Sampling(200)))
    )
    await asyncio.sleep(1)
    core = named(session, "VLLM::EngineCore")
    assert core is not None
    os.kill(core, signal.SIGKILL)
    with pytest.raises(TransportFault):
        await out
    await asyncio.to_thread(wait_for, lambda: living(session) == [], 30)
    assert server.endpoint is None


START = """
import asyncio, sys
from pathlib import Path
from gradeloom.schemas.config import VllmEngine
from gradeloom.tasks.engine.vllm import VllmBackend
config = VllmEngine.model_validate_json(sys.argv[1])
asyncio.run(VllmBackend(config, folder=Path(sys.argv[2])).start())
"""


@pytest.fixture
def starting(
    vllm_settings: VllmEngine, tmp_path: Path
) -> Iterator[tuple[psutil.Process, psutil.Process, int]]:
    """Another gradeloom, its supervisor, and the session of its server, whose worker runs already."""
    before = {path.name for path in SHARED_MEMORY.iterdir()}
    command = [sys.executable, "-c", START, vllm_settings.model_dump_json(), str(tmp_path)]
    owner = subprocess.Popen(command)
    try:
        us = psutil.Process(owner.pid)
        wait_for(lambda: any("--uds=" in " ".join(p.cmdline()) for p in us.children(recursive=True)), 60)
        (supervisor,) = [p for p in us.children() if "gradeloom.tasks.engine.supervisor" in p.cmdline()]
        wait_for(lambda: len(supervisor.children()) == 1, 10)
        session = supervisor.children()[0].pid
        wait_for(lambda: named(session, "VLLM::Worker") is not None, 120)
        assert named(session, "VLLM::EngineCore")
        yield us, supervisor, session
    finally:
        owner.kill()
        owner.wait()
    wait_for(lambda: living(session) == [] and gone(supervisor), 30)
    left = {path.name for path in SHARED_MEMORY.iterdir() if path.name.startswith("psm_")} - before
    assert left == set()


def test_gradeloom_killed(starting: tuple[psutil.Process, psutil.Process, int]) -> None:
    us, supervisor, session = starting
    us.kill()
    wait_for(lambda: living(session) == [] and gone(supervisor), 30)


def test_supervisor_killed(starting: tuple[psutil.Process, psutil.Process, int]) -> None:
    us, supervisor, session = starting
    supervisor.kill()
    wait_for(lambda: living(session) == [], 30)
    wait_for(lambda: gone(us), 10)  # its server did not start: it ends by itself, and tidies up
