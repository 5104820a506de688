"""Tests of how coroutines and generators share the time for work on large requests."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Generator

import pytest

from sparklog.broker.requests import slices
from sparklog.broker.requests.slices import Slices


class Work:
    """Several pieces of work. ``done`` has the name of the work for each finished step, in order."""

    def __init__(self) -> None:
        self.slices = Slices()
        self.done: list[str] = []

    async def coroutine(self, name: str, steps: int) -> None:
        for _ in range(steps):
            await self.slices.pause()
            self.done.append(name)

    def generator(self, name: str, steps: int) -> Generator[None, None, None]:
        for _ in range(steps):
            if self.slices.over():
                yield
            self.done.append(name)


def test_coroutines_and_generators_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slices, "TURN_S", 0.0)

    async def test() -> None:
        work = Work()
        await asyncio.gather(
            work.coroutine("a", 20), work.slices.result(work.generator("b", 20)), work.coroutine("c", 20)
        )
        for first in range(0, 45, 15):
            for name in "abc":
                assert 3 <= work.done[first : first + 15].count(name) <= 7, work.done

    asyncio.run(test())


def test_all_work_shares_the_time_of_one_iteration() -> None:
    """Forty requests of 0.01 s each arrive in one iteration of the loop."""

    async def test() -> None:
        shared, ended = Slices(), 0

        async def request() -> None:
            nonlocal ended
            await shared.pause()
            ends_s = time.thread_time() + 0.01
            while time.thread_time() < ends_s:
                pass
            ended += 1

        tasks = [asyncio.ensure_future(request()) for _ in range(40)]
        await asyncio.sleep(0)
        before = 0
        while ended < 40:
            await asyncio.sleep(0)
            assert ended - before <= 4
            before = ended
        await asyncio.gather(*tasks)

    asyncio.run(test())


@pytest.mark.parametrize("iterations", range(6))
def test_a_cancelled_coroutine_leaves_its_time_to_others(iterations: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slices, "TURN_S", 0.0)

    async def test() -> None:
        work = Work()
        cancelled = asyncio.ensure_future(work.coroutine("a", 1000))
        others = asyncio.gather(work.coroutine("b", 20), work.slices.result(work.generator("c", 20)))
        for _ in range(iterations):
            await asyncio.sleep(0)
        cancelled.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await cancelled
        await asyncio.wait_for(others, 30)
        assert (work.done.count("b"), work.done.count("c")) == (20, 20)
        await asyncio.wait_for(work.coroutine("d", 3), 30)

    asyncio.run(test())
