"""A caller who acts for the producer's loop stays awake for an answer where the one before came soon."""

from __future__ import annotations

import asyncio
import itertools
import os
import select
import socket
import time
from collections.abc import Callable

import pytest

from sparklog import Producer
from sparklog.client import stand_in
from sparklog.net.async_client import AsyncConnection
from tests.client.fake_cluster import FakeCluster

_TIMEOUT_S = 30.0
_ANSWERS = 20


class _Polls:
    """A poll that notes what it is asked."""

    def __init__(self, reader: socket.socket, before: Callable[[int], object]) -> None:
        self.timeouts: list[float] = []
        self._poll = select.poll()
        self._poll.register(reader, select.POLLIN)
        self._before = before

    def poll(self, timeout_ms: float) -> list[tuple[int, int]]:
        self._before(len(self.timeouts))
        self.timeouts.append(timeout_ms)
        return self._poll.poll(timeout_ms)


def _waiting(polls: _Polls) -> AsyncConnection:
    async def made() -> AsyncConnection:
        return AsyncConnection("nobody", 1 << 20)

    connection = asyncio.run(made())
    connection._poll = polls  # type: ignore[assignment]
    return connection


def test_who_is_awake_asks_until_there_are_bytes_and_does_not_sleep() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        polls = _Polls(ours, lambda asked: asked == 100 and theirs.send(b"x"))
        assert _waiting(polls).wait_readable(60.0, 60.0)
    assert polls.timeouts == [0] * 101


def test_who_was_awake_for_long_enough_sleeps_for_the_rest() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        polls = _Polls(ours, lambda asked: None)
        began = time.monotonic()
        assert not _waiting(polls).wait_readable(0.05, 0.02)
        assert time.monotonic() - began >= 0.05
        *awake, asleep = polls.timeouts
        assert awake and set(awake) == {0}
        assert asleep == pytest.approx(30)

        polls.timeouts.clear()
        assert not _waiting(polls).wait_readable(0.02, 60.0)
        assert polls.timeouts[-1] == 0

        polls.timeouts.clear()
        assert not _waiting(polls).wait_readable(0.02)
        assert polls.timeouts == [20]


def _asked(fake: FakeCluster, monkeypatch: pytest.MonkeyPatch, awake_s: float) -> list[float]:
    """For how long who waits stays awake, in turn, if answers within ``awake_s`` come soon."""
    fake.create("t", partitions=1)
    asked: list[float] = []
    wait_readable = AsyncConnection.wait_readable

    def noted(self: AsyncConnection, timeout_s: float, awake_s: float = 0.0) -> bool:
        asked.append(awake_s)
        return wait_readable(self, timeout_s)

    monkeypatch.setattr(stand_in, "_AWAKE_S", awake_s)
    monkeypatch.setattr(AsyncConnection, "wait_readable", noted)
    with Producer(fake.bootstrap) as producer:
        deadline = time.monotonic() + _TIMEOUT_S
        for number in itertools.count():
            assert producer.send("t", b"v").result().offset == number
            if len(asked) >= _ANSWERS:
                return asked
            assert time.monotonic() < deadline
    raise AssertionError("unreachable")


def test_an_answer_that_came_soon_has_the_next_one_waited_for_awake(
    fake: FakeCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert _asked(fake, monkeypatch, 60.0) == [0.0] + [60.0] * (_ANSWERS - 1)


def test_an_answer_that_took_longer_has_the_next_one_waited_for_asleep(
    fake: FakeCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert set(_asked(fake, monkeypatch, 1e-9)) == {0.0}


def test_nobody_stays_awake_on_the_only_processor(fake: FakeCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0})
    assert set(_asked(fake, monkeypatch, 60.0)) == {0.0}
