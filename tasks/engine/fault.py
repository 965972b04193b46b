"""The `fault` engine: a deterministic server that fails on purpose, in a process of its own."""

from __future__ import annotations

import asyncio
import os
import shutil
import sys
import tempfile
import time
from pathlib import Path

from gradeloom.schemas.config import FaultEngine
from gradeloom.schemas.errors import EngineUnavailable, InputError
from gradeloom.tasks.engine.fault_server import SETTINGS
from gradeloom.tasks.engine.http import HttpBackend
from gradeloom.tasks.engine.supervisor import Supervised
from gradeloom.tasks.engine.types import Asked, Completion, Request, TransportFault

STARTUP_SECONDS = 60.0
RESTARTS = 5


class FaultBackend:
    """Starts the server, sends to it, starts it again when it was killed.

    Attributes:
        identity: seed and the rates of what changes answers.
        restarts: times the server was started again.

    Args:
        config: what the server does.
        folder: where its log lies (`fault.log`, what it printed; not the request log).
    """

    def __init__(self, config: FaultEngine, *, folder: Path) -> None:
        self.identity = f"fault:{config.seed}:{config.truncate:g}/{config.bad_json:g}/{config.duplicate:g}"
        self.restarts = 0
        self.flags: tuple[str, ...] = ()
        self._config = config
        self._log = folder / "fault.log"
        self._server: Supervised | None = None
        self._http: HttpBackend | None = None
        self._starting = asyncio.Lock()

    @property
    def pid(self) -> int | None:
        """Process id of the server, for tests that kill it."""
        return None if self._server is None else self._server.session

    async def start(self) -> None:
        """Start the server and wait until it listens.

        Raises:
            InputError: the request log cannot be written.
            EngineUnavailable: the server does not come up.
        """
        async with self._starting:
            if self._server is None:
                await self._start()

    async def stop(self) -> None:
        """Stop the server; returns when its process is gone."""
        async with self._starting:
            await self._stop()

    async def send(self, asked: Asked, request: Request) -> Completion:
        """Send one request, once; a server that was killed is started again.

        Raises:
            TransportFault: no outcome came back.
            EngineUnavailable: the server dies again and again.
        """
        async with self._starting:  # not while it is being started again
            server, http = self._server, self._http
        if server is None or http is None:
            raise EngineUnavailable("the fault server is stopped")
        try:
            return await http.send(asked, request)
        except TransportFault:
            if not server.alive():
                await self._revive(server)
            raise

    async def _revive(self, dead: Supervised) -> None:
        async with self._starting:
            if self._server is not dead:
                return  # somebody else has done it, or it was stopped
            if self.restarts == RESTARTS:
                raise EngineUnavailable(
                    f"the fault server died {RESTARTS + 1} times: {dead.last_lines()}; "
                    "run the same command again to go on"
                )
            self.restarts += 1
            await self._stop()
            await self._start()

    async def _start(self) -> None:
        self._check_log()
        scratch = Path(tempfile.mkdtemp(prefix="gradeloom-fault-"))  # of mode 0700
        socket = scratch / "socket"
        server = Supervised(
            [sys.executable, "-P", "-m", "gradeloom.tasks.engine.fault_server", str(socket)],
            env={**_harmless_environment(), SETTINGS: self._config.model_dump_json()},
            log=self._log,
            scratch=scratch,
        )
        http = HttpBackend(
            [f"unix:{socket}"],
            model="fault",
            identity=self.identity,
            request_timeout=self._config.request_timeout,
        )
        self._server, self._http = server, http
        try:
            await asyncio.to_thread(server.start)
            await self._until_it_listens(server, socket)
            await http.start()
        except OSError as error:
            await self._stop()
            raise EngineUnavailable(f"the fault server cannot be started: {error}") from error
        except BaseException:
            await self._stop()  # also when cancelled
            raise

    async def _stop(self) -> None:
        server, http = self._server, self._http
        self._server = self._http = None
        if http is not None:
            await http.stop()
        if server is not None:
            await asyncio.to_thread(server.stop)
            if server.scratch is not None:  # there still when the process was never started
                shutil.rmtree(server.scratch, ignore_errors=True)

    async def _until_it_listens(self, server: Supervised, socket: Path) -> None:
        give_up = time.monotonic() + STARTUP_SECONDS
        while not await _listens(socket):
            if not server.alive() or time.monotonic() > give_up:
                raise EngineUnavailable(f"the fault server does not come up: {server.last_lines()}")
            await asyncio.sleep(0.02)

    def _check_log(self) -> None:
        if self._config.log is None:
            return
        log = Path(self._config.log)
        try:
            log.parent.mkdir(parents=True, exist_ok=True)
            log.touch()
        except OSError as error:
            raise InputError(
                f"cannot write the request log: {error.strerror}", file=log, field="engine.log"
            ) from error


async def _listens(socket: Path) -> bool:
    try:
        _, writer = await asyncio.open_unix_connection(socket)
    except OSError:
        return False
    writer.close()
    return True


def _harmless_environment() -> dict[str, str]:
    """What a Python process needs of our environment, and none of our secrets."""
    names = ("PATH", "HOME", "LANG", "LC_ALL", "TMPDIR", "PYTHONPATH")
    return {name: os.environ[name] for name in names if name in os.environ}
