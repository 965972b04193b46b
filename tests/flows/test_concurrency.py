from __future__ import annotations

import asyncio

import pytest

from gradeloom.flows.concurrency import InOrder, in_parallel


async def test_turns_go_by_ordinal_whatever_the_order_of_arrival() -> None:
    order, seen = InOrder(), []

    async def one(ordinal: int) -> None:
        async with order.turn(ordinal):
            seen.append(ordinal)

    await in_parallel(one(n) for n in (3, 1, 4, 0, 2))
    assert seen == [0, 1, 2, 3, 4]


async def test_the_first_error_stops_the_others() -> None:
    finished = []

    async def slow() -> None:
        await asyncio.sleep(60)
        finished.append("slow")

    async def fails() -> None:
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        await in_parallel([slow(), fails()])
    assert finished == []
