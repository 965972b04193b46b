"""Three small things that asyncio leaves to its users."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Iterable
from contextlib import asynccontextmanager
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
