"""Servers in the test's own process: one that answers as the test says, and the fault server."""

from __future__ import annotations

import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Self

import orjson
from aiohttp import web
from aiohttp.test_utils import TestServer

from gradeloom.schemas.config import FaultEngine
from gradeloom.tasks.engine.fault_server import BACKLOG, FaultServer
from gradeloom.tasks.engine.http import HttpBackend
from gradeloom.tasks.engine.types import Asked, Request, Sampling

Answer = Callable[[dict[str, Any]], Awaitable[web.StreamResponse]]


class ScriptedServer:
    """Attributes: `bodies` and `headers` received, `most_outstanding` at any moment."""

    def __init__(self, answer: Answer) -> None:
        self._answer = answer
        self.bodies: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.most_outstanding = 0
        self._outstanding = 0
        app = web.Application()
        app.router.add_post("/v1/chat/completions", self._handle)
        self._server = TestServer(app)

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        self.bodies.append(orjson.loads(await request.read()))
        self.headers.append(dict(request.headers))
        self._outstanding += 1
        self.most_outstanding = max(self.most_outstanding, self._outstanding)
        try:
            return await self._answer(self.bodies[-1])
        finally:
            self._outstanding -= 1

    async def __aenter__(self) -> Self:
        await self._server.start_server()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._server.close()

    @property
    def url(self) -> str:
        return str(self._server.make_url("/v1"))


def always(response: Callable[[], web.StreamResponse]) -> Answer:
    async def answer(_: dict[str, Any]) -> web.StreamResponse:
        return response()

    return answer


def completion(text: str | None = "hello", finish: str = "stop", **choice: Any) -> web.Response:
    return web.json_response(
        {
            "choices": [
                {"message": {"role": "assistant", "content": text}, "finish_reason": finish, **choice}
            ],
            "usage": {"prompt_tokens": 11, "completion_tokens": 3},
        }
    )


def error(status: int, message: str, **headers: str) -> web.Response:
    return web.json_response({"error": {"message": message}}, status=status, headers=headers)


def a_request(text: str = "hi", **sampling: Any) -> Request:
    return Request(({"role": "user", "content": text},), Sampling(**{"max_tokens": 16, **sampling}))


def asked(row: str = "r0", attempt: int = 0, part: str = "") -> Asked:
    return Asked("generate", "f00d", row, part, attempt, row)


@asynccontextmanager
async def fault_server_here(**settings: Any) -> AsyncIterator[HttpBackend]:
    """A client of a fault server that has no process of its own, and so starts at once."""
    with tempfile.TemporaryDirectory() as folder:
        runner = web.ServerRunner(web.Server(FaultServer(FaultEngine(**settings))), shutdown_timeout=0.1)
        await runner.setup()
        await web.UnixSite(runner, Path(folder) / "socket", backlog=BACKLOG).start()
        backend = HttpBackend([f"unix:{folder}/socket"], model="fault", identity="", request_timeout=60.0)
        await backend.start()
        try:
            yield backend
        finally:
            await backend.stop()
            await runner.cleanup()
