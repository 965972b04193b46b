"""A managed vLLM server: started when needed, watched, started again, stopped with all it started.

One `_Server` is one life of the server. When a life ends before it was asked to (the server died,
says it is not healthy, or stalls), what was out raises `TransportFault`, so that only this is sent
again; the next request starts another life.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import shutil
import socket
import tempfile
import time
from pathlib import Path

import aiohttp

from gradeloom.schemas.config import VllmEngine
from gradeloom.schemas.errors import EngineUnavailable, GradeloomError, InputError
from gradeloom.tasks.engine import models, vllm_command
from gradeloom.tasks.engine.http import HttpBackend
from gradeloom.tasks.engine.supervisor import GRACE, LAST_GRACE, Supervised
from gradeloom.tasks.engine.types import Asked, Completion, Request, Sampling, TransportFault

TICK = 0.25
LONGEST_SOCKET_FOLDER = 60
"""Bytes: a socket's path holds about 107, and vLLM names its own sockets by a UUID."""

_PROBE = Asked(stage="probe", fingerprint="", row="probe")
_PROBE_SCHEMA = {
    "type": "object",
    "properties": {"colour": {"enum": ["red"]}, "sizes": {"type": "array", "items": {"enum": [1]},
                                                          "minItems": 2, "maxItems": 2}},
    "required": ["colour", "sizes"],
    "additionalProperties": False,
}  # fmt: skip
_COMPACT = '{"colour":"red","sizes":[1,1]}'


class VllmBackend:
    """A vLLM server of our own, on CPU or GPU. Belongs to one event loop.

    Args:
        config: the engine's settings.
        folder: where the server's log goes (`vllm.log`).

    Attributes:
        identity: what the model is, and what else decides its answers.
        restarts: lives of the server after the first.
        flags: the arguments the server was started with, but for paths and keys; empty before.
        version: of vLLM; empty before the start.

    Raises:
        InputError: the model is not there.
    """

    def __init__(self, config: VllmEngine, *, folder: Path) -> None:
        self.config = config
        self.folder = folder
        self._model = models.identity(config.model, config.revision)
        self.identity = self._model + vllm_command.answering(config)
        self.restarts = 0
        self.flags: tuple[str, ...] = ()
        self.version = ""
        self._server: _Server | None = None
        self._changing = asyncio.Lock()
        self._failure: GradeloomError | None = None  # why there is no use in trying again
        self._fruitless = 0  # restarts since the last answer

    @property
    def endpoint(self) -> str | None:
        """Where the running server listens: `unix:PATH` or a base URL; None when there is none."""
        return self._server.endpoint if self._server is not None and self._server.lives() else None

    async def start(self) -> None:
        """Start the server and wait until it answers.

        Raises:
            InputError: no interpreter with vLLM, or the server ends while it starts (its last lines
                are in the message: a wrong argument, a model it cannot load, too little memory).
            EngineUnavailable: it does not answer within `startup_timeout`.
        """
        await self._running()

    async def send(self, asked: Asked, request: Request) -> Completion:
        """Send one request, once; start the server first when there is none.

        Raises:
            TransportFault: no outcome: timeout, an error of the server, its death, a stall.
            EngineUnavailable: the server was started again `restarts` times without a single answer.
        """
        server = await self._running()
        completion = await server.send(asked, request)
        self._fruitless = 0
        return completion

    async def stop(self) -> None:
        """Stop the server; return when none of its processes is left."""
        async with self._changing:
            self._failure, self._fruitless = None, 0
            await self._end()

    async def _running(self) -> _Server:
        """The server that runs. Many may find it dead at once: one starts it again, all wait for that."""
        if self._server is not None and self._server.lives():
            return self._server
        async with self._changing:
            while self._server is None or not self._server.lives():
                if self._failure is not None:
                    raise self._failure
                try:
                    await self._next_life()
                except GradeloomError as error:
                    self._failure = error
                    raise
            return self._server

    async def _next_life(self) -> None:
        failed = self._server
        if failed is not None:
            await self._end()
            if self._fruitless >= self.config.restarts:
                raise EngineUnavailable(
                    f"the vLLM server was started again {self._fruitless} times without an answer; "
                    f"the last time: {failed.lost}; its last lines ({failed.log}):\n{failed.last_lines()}"
                )
            self._fruitless += 1
            self.restarts += 1
        server = await asyncio.to_thread(self._prepare)
        try:
            await server.start()
        except _NoStart as error:
            server.lose(str(error))
            await server.end()
            if failed is None:
                raise error.for_user(server) from None
            self._server = server  # one more restart that bore no fruit
        except BaseException:  # cancelled, or a GradeloomError: leave no process behind
            await server.end()
            raise
        else:
            self._server = server

    async def _end(self) -> None:
        server, self._server = self._server, None
        if server is not None:
            await server.end()

    def _prepare(self) -> _Server:
        """Find interpreter and model; both may have to be waited for."""
        config = self.config
        vllm_command.check(config)
        engine = vllm_command.installed(config.python)
        self.flags, self.version = vllm_command.flags(config, engine), engine.version
        model = models.resolve(config.model, config.revision)
        if isinstance(model, str):
            model = models.fetch(model, self._model.rpartition("@")[2])
        scratch = _socket_folder()
        key = None
        listen: tuple[str, ...]
        if config.listen == "unix":
            path = scratch / "http.sock"
            endpoint, listen = f"unix:{path}", (f"--uds={path}",)
        else:
            port, key = _free_port(), secrets.token_urlsafe(32)
            endpoint, listen = f"http://127.0.0.1:{port}/v1", ("--host=127.0.0.1", f"--port={port}")
        process = Supervised(
            vllm_command.command(engine, model, listen, self.flags),
            env=vllm_command.environment(config, engine, scratch, key),
            log=self.folder / "vllm.log",
            scratch=scratch,
        )
        http = HttpBackend(
            (endpoint,),
            model=vllm_command.SERVED_NAME,
            identity=self.identity,
            request_timeout=config.request_timeout,
            api_key=key,
        )
        return _Server(config, process, http, endpoint)


class _NoStart(Exception):
    """The server did not come up."""

    def __init__(self, message: str, *, died: bool) -> None:
        super().__init__(message)
        self.died = died

    def for_user(self, server: _Server) -> GradeloomError:
        message = f"{self}; its last lines ({server.log}):\n{server.last_lines()}"
        return InputError(message, field="engine") if self.died else EngineUnavailable(message)


class _Server:
    """One life of the server.

    Attributes:
        lost: why this life is over, or None.
    """

    def __init__(self, config: VllmEngine, process: Supervised, http: HttpBackend, endpoint: str) -> None:
        self.lost: str | None = None
        self.log = process.log
        self.last_lines = process.last_lines
        self._config = config
        self._process = process
        self._http = http
        self.endpoint = endpoint
        self._side: aiohttp.ClientSession | None = None
        self._watching: asyncio.Task[None] | None = None
        self._out: set[asyncio.Task[Completion]] = set()
        self._faults = 0
        self._moved = 0.0  # when an answer or a token was last seen
        self._looked = 0.0
        self._tokens = ""

    # --- start and end ------------------------------------------------------------------------

    async def start(self) -> None:
        try:
            self._process.start()
        except OSError as error:
            raise InputError(f"cannot start the vLLM server: {error}", field="engine.python") from error
        await self._http.start()
        connector = None
        if self.endpoint.startswith("unix:"):
            connector = aiohttp.UnixConnector(self.endpoint.removeprefix("unix:"))
        self._side = aiohttp.ClientSession(connector=connector)
        await self._until_healthy(time.monotonic() + self._config.startup_timeout)
        self._watching = asyncio.create_task(self._watch())
        await self._probe()

    async def _until_healthy(self, deadline: float) -> None:
        while not await self._healthy(5.0):
            if not self._process.alive():
                raise _NoStart("the vLLM server ended while it was starting", died=True)
            if time.monotonic() > deadline:
                seconds = self._config.startup_timeout
                raise _NoStart(f"the vLLM server did not answer within {seconds:g} s", died=False)
            await asyncio.sleep(TICK)

    async def _probe(self) -> None:
        """One small answer that follows a schema: the model answers, and without idle white space."""
        request = Request(
            ({"role": "user", "content": "Give me a colour and two sizes as JSON."},),
            Sampling(max_tokens=32, temperature=0.0),
            _PROBE_SCHEMA,
        )
        try:
            completion = await self.send(_PROBE, request)
        except TransportFault as fault:
            died = not self._process.alive()
            raise _NoStart(f"the vLLM server failed at its first request ({fault})", died=died) from None
        # A context too small for the probe is no fault of the server.
        if completion.outcome != "prompt_too_long" and completion.text != _COMPACT:
            raise InputError(
                "the vLLM server does not follow a JSON schema compactly: asked for "
                f"{_COMPACT} it gave {completion.text[:200]!r} ({completion.outcome})",
                field="engine",
            )

    async def end(self) -> None:
        """Stop every process of the server and wait until it is gone."""
        grace = GRACE if self.lives() else LAST_GRACE
        self.lose("it was stopped")
        if self._watching is not None:
            self._watching.cancel()
        await self._http.stop()
        if self._side is not None:
            await self._side.close()
        try:
            await asyncio.to_thread(self._process.stop, grace)
        except OSError as error:
            raise EngineUnavailable(str(error)) from error
        if self._process.scratch is not None:  # there still when the process was never started
            shutil.rmtree(self._process.scratch, ignore_errors=True)

    # --- requests -----------------------------------------------------------------------------

    def lives(self) -> bool:
        if self.lost is None and not self._process.alive():
            self.lose("it died")
        return self.lost is None

    def lose(self, reason: str) -> None:
        """End this life for everybody who waits for an answer."""
        if self.lost is None:
            self.lost = reason
            for task in self._out:
                task.cancel()

    async def send(self, asked: Asked, request: Request) -> Completion:
        if not self._out:
            self._moved = time.monotonic()
        task = asyncio.ensure_future(self._http.send(asked, request))
        self._out.add(task)
        try:
            completion = await task
        except asyncio.CancelledError:
            us = asyncio.current_task()
            if self.lost is None or (us is not None and us.cancelling()):
                raise
            raise TransportFault(f"vLLM server: {self.lost}") from None
        except TransportFault:
            self._faults += 1
            raise
        finally:
            self._out.discard(task)
        self._moved = time.monotonic()
        return completion

    # --- watching -----------------------------------------------------------------------------

    async def _watch(self) -> None:
        while self.lives():
            if self._faults:
                self._faults = 0
                await self._check_health()
            if self._out:
                await self._check_progress()
            await asyncio.sleep(TICK)

    async def _check_health(self) -> None:
        """After a fault: a server whose engine died may go on answering, with errors."""
        if await self._healthy(min(30.0, self._config.stall_timeout)) is False:
            self.lose("it is not healthy any more")

    async def _healthy(self, seconds: float) -> bool | None:
        """Whether the server says so; None when it says nothing in time (it may be busy)."""
        try:
            return await self._get("/health", seconds) is not None
        except TimeoutError:
            return None

    async def _check_progress(self) -> None:
        """Progress is an answer, or tokens: with many long requests out, the first answer takes a while."""
        now, patience = time.monotonic(), self._config.stall_timeout
        if now - max(self._moved, self._looked) < patience / 4:
            return
        self._looked = now
        with contextlib.suppress(TimeoutError):
            metrics = await self._get("/metrics", patience / 4)
            tokens = self._tokens if metrics is None else _token_counts(metrics)
            if tokens != self._tokens:
                self._tokens, self._moved = tokens, time.monotonic()
        if self._out and time.monotonic() - self._moved >= patience:
            self.lose(f"it gave neither an answer nor a token for {patience:g} s")

    async def _get(self, path: str, seconds: float) -> str | None:
        """The body of a 200, or None: another status, or no connection.

        Raises:
            TimeoutError: no answer within that many seconds.
        """
        assert self._side is not None
        base = "http://localhost" if self.endpoint.startswith("unix:") else self.endpoint.removesuffix("/v1")
        try:
            async with asyncio.timeout(seconds), self._side.get(base + path) as response:
                return await response.text() if response.status == 200 else None
        except aiohttp.ClientError:
            return None


def _token_counts(metrics: str) -> str:
    """The lines of Prometheus text that move whenever the engine works."""
    names = ("vllm:prompt_tokens_total", "vllm:generation_tokens_total")
    return "\n".join(line for line in metrics.splitlines() if line.startswith(names))


def _socket_folder() -> Path:
    """A new folder that only we can enter, with a short path."""
    here = tempfile.gettempdir()
    short = here if len(os.fsencode(here)) < LONGEST_SOCKET_FOLDER else "/tmp"  # noqa: S108
    return Path(tempfile.mkdtemp(prefix="gradeloom-", dir=short))


def _free_port() -> int:
    """A port that is free now. (Another process may take it before the server: `unix` has no such race.)"""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port: int = s.getsockname()[1]
        return port
