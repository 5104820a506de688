"""Tests of checks of batches before their append: in slices on the loop, and very large batches in a thread."""

from __future__ import annotations

import asyncio
import threading
from typing import Any, cast

import pytest

from sparklog.broker.replication.partition import CheckedBatches, check_batch
from sparklog.broker.requests import batch_checks, slices
from sparklog.broker.requests.batch_checks import check_batches
from sparklog.broker.requests.slices import Slices, Steps
from sparklog.errors import BrokerError, ErrorCode
from tests.broker.staged import Hosted
from tests.broker.support import encoded


class Connection:
    """A connection that records whether it may accept a request."""

    held = False
    released = 0

    def pause_requests(self) -> None:
        self.held = True

    def resume_requests(self) -> None:
        self.held = False
        self.released += 1


def checked(count: int, *, bad: frozenset[int] = frozenset()) -> tuple[CheckedBatches, list[str], Connection]:
    """Return the verdict, the slices of the check, and its connection."""
    found: list[CheckedBatches] = []
    yielded: list[str] = []
    connection = Connection()

    async def test() -> None:
        work = Slices()
        good = encoded(2)
        wrong = good.header._replace(max_timestamp=7)
        batches = [(wrong if number in bad else good.header, memoryview(good.body)) for number in range(count)]
        done = asyncio.Event()

        def steps() -> Steps:
            checking = check_batches(cast(Any, Hosted()), batches, work)
            while True:
                try:
                    waited = next(checking)
                except StopIteration as end:
                    found.append(end.value)
                    done.set()
                    return
                yielded.append("turn" if waited is None else "thread")
                yield waited

        work.run(cast(Any, connection), steps(), lambda error: pytest.fail(str(error)))
        await done.wait()
        await asyncio.sleep(0)

    asyncio.run(test())
    return found[0], yielded, connection


def test_each_batch_is_a_slice_if_the_time_is_short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slices, "TURN_S", 0.0)
    verdict, yielded, connection = checked(5, bad=frozenset({1, 3}))
    assert sorted(verdict.refusals) == [1, 3]
    assert {error.code for error in verdict.refusals.values()} == {ErrorCode.INVALID_RECORD}
    assert yielded == ["turn"] * 5
    assert (connection.held, connection.released) == (False, 1)


def test_a_few_batches_take_one_turn_and_block_no_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slices, "TURN_S", 1e9)
    verdict, yielded, connection = checked(5)
    assert (verdict.refusals, yielded) == ({}, [])
    assert (connection.held, connection.released) == (False, 0)


def test_a_large_batch_is_checked_in_a_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slices, "TURN_S", 1e9)
    monkeypatch.setattr(batch_checks, "LOOP_BYTES", 100)
    threads: list[str] = []

    def noting(*args: Any, **options: Any) -> None:
        threads.append(threading.current_thread().name)
        check_batch(*args, **options)

    monkeypatch.setattr(batch_checks, "check_batch", noting)
    verdict, yielded, _ = checked(3, bad=frozenset({2}))
    assert sorted(verdict.refusals) == [2]
    assert yielded == ["thread"] * 3
    assert all(name.startswith("batch checks") for name in threads)


def test_the_checks_of_many_requests_share_one_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each check alone would use the whole turn."""
    monkeypatch.setattr(slices, "TURN_S", 0.0)
    order: list[str] = []

    async def test() -> None:
        work = Slices()

        def steps(name: str) -> Steps:
            for number in range(3):
                order.append(f"{name}{number}")
                yield None

        for name in "abc":
            work.run(cast(Any, Connection()), steps(name), lambda error: pytest.fail(str(error)))
        while len(order) < 9:
            before = len(order)
            await asyncio.sleep(0)
            assert len(order) <= before + 1, "one slice in each turn"

    asyncio.run(test())
    assert order == ["a0", "a1", "b0", "c0", "a2", "b1", "c1", "b2", "c2"]


def test_a_failed_check_is_reported_and_the_connection_stays_usable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slices, "TURN_S", 0.0)
    failures: list[Exception] = []
    connection = Connection()

    async def test() -> None:
        work = Slices()

        def steps() -> Steps:
            yield None
            raise BrokerError(ErrorCode.INVALID_REQUEST, "as the test says")

        failed = asyncio.Event()

        def failing(error: Exception) -> None:
            failures.append(error)
            failed.set()

        work.run(cast(Any, connection), steps(), failing)
        await failed.wait()
        await asyncio.sleep(0)

    asyncio.run(test())
    assert isinstance(failures[0], BrokerError)
    assert (connection.held, connection.released) == (False, 1)
