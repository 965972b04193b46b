"""Small things that asyncio leaves to its users."""

from __future__ import annotations

import asyncio
import contextvars
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import asynccontextmanager, suppress
from typing import Any, TypeVar

T = TypeVar("T")


class InOrder:
    """Lets tasks through one after another by ordinal, whatever order they arrive in."""

    def __init__(self, first: int = 0) -> None:
        self._next = first
        self._changed = asyncio.Condition()

    @asynccontextmanager
    async def turn(self, ordinal: int) -> AsyncIterator[None]:
        async with self._changed:
            await self._changed.wait_for(lambda: self._next == ordinal)
            yield
            self._next += 1
            self._changed.notify_all()


async def in_parallel(work: Iterable[Awaitable[T]]) -> list[T]:
    """All results in order; the first error stops the others and is raised."""
    tasks = [asyncio.ensure_future(one) for one in work]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        await cancelled(tasks)


async def cancelled(tasks: Iterable[asyncio.Future[Any]]) -> None:
    """Cancel what still runs and wait until it is gone."""
    pending = [task for task in tasks if not task.done()]
    for task in pending:
        task.cancel()
    await asyncio.gather(*pending, return_exceptions=True)


GRACE = 20.0
"""Seconds that blocking work gets to notice that it is no longer wanted."""


class Unwanted(Exception):
    """Raised inside blocking work, at its next sign of life, once nobody waits for it."""


class Thread:
    """Blocking work beside the event loop, which stays free for progress, Prefect and signals.

    Python cannot stop a thread: cancelled, the work is asked to stop at its next `alive`, and left
    to the end of the process when it does not within `GRACE` seconds. So it must be work that may be
    killed at any instant.
    """

    def __init__(self) -> None:
        self._unwanted = threading.Event()

    def alive(self) -> None:
        """To be called by the work, often.

        Raises:
            Unwanted: nobody waits for it any more.
        """
        if self._unwanted.is_set():
            raise Unwanted

    async def run(self, work: Callable[[], T]) -> T:
        """The result of `work`, or what it raised."""
        loop = asyncio.get_running_loop()
        ended = asyncio.Event()
        results: list[T] = []
        errors: list[BaseException] = []
        context = contextvars.copy_context()

        def target() -> None:
            try:
                results.append(context.run(work))
            except BaseException as error:
                errors.append(error)
            with suppress(RuntimeError):  # the loop is gone, and with it whoever waited
                loop.call_soon_threadsafe(ended.set)

        threading.Thread(target=target, daemon=True).start()
        try:
            await ended.wait()
        except asyncio.CancelledError:
            self._unwanted.set()
            with suppress(TimeoutError):
                await asyncio.wait_for(ended.wait(), GRACE)
            raise
        if errors:
            raise errors[0]
        return results[0]
