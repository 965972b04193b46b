"""The command as a process, and one local Prefect server for all tests of a session."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import psutil
import pytest


class Command(Protocol):
    """`gradeloom ARGUMENTS` in a fresh process that knows of no Prefect but the one of `home`."""

    def __call__(
        self, *arguments: str, home: Path, cwd: Path | None = None
    ) -> subprocess.CompletedProcess[str]: ...


@pytest.fixture(scope="session")
def environment() -> Callable[..., dict[str, str]]:
    def environment(home: Path, **more: str) -> dict[str, str]:
        clean = {k: v for k, v in os.environ.items() if not k.startswith(("PREFECT", "GRADELOOM"))}
        return clean | {"GRADELOOM_HOME": str(home)} | more

    return environment


@pytest.fixture(scope="session")
def gradeloom(environment: Callable[..., dict[str, str]]) -> Command:
    def run(*arguments: str, home: Path, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "gradeloom.flows.cli", *arguments],
            env=environment(home), cwd=cwd or home, stdin=subprocess.DEVNULL, capture_output=True, text=True,
            timeout=150,
        )  # fmt: skip

    return run


@pytest.fixture
def free_port() -> int:
    return _free_port()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@dataclass(frozen=True)
class LocalPrefect:
    home: Path
    url: str
    pid: int

    @property
    def api_url(self) -> str:
        return f"{self.url}/api"


@pytest.fixture(scope="session")
def local_prefect(tmp_path_factory: pytest.TempPathFactory, gradeloom: Command) -> Iterator[LocalPrefect]:
    """`gradeloom ui --background` in a home of its own; `gradeloom ui --stop` must leave no process."""
    home = tmp_path_factory.mktemp("prefect-home")
    done = gradeloom("ui", "--background", "--port", str(_free_port()), "--json", home=home)
    assert done.returncode == 0, done.stderr
    started: dict[str, Any] = json.loads(done.stdout)
    leader = psutil.Process(started["pid"])
    try:
        assert started["state"] == "started"
        yield LocalPrefect(home, started["url"], started["pid"])
    finally:
        family = [leader, *leader.children(recursive=True)]
        done = gradeloom("ui", "--stop", home=home)
    assert (done.returncode, done.stdout) == (0, "Prefect UI: stopped\n"), done.stderr
    assert [p for p in family if p.is_running() and p.status() != psutil.STATUS_ZOMBIE] == []
    assert gradeloom("ui", "--stop", home=home).stdout == "Prefect UI: not running\n"
