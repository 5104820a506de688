"""Tests of a caller that acts for the producer's loop: it spins for a response if the last ones came soon."""

from __future__ import annotations

import asyncio
import itertools
import os
import random
import select
import socket
import time
from collections.abc import Callable

import pytest

from sparklog import Producer
from sparklog.client.producer import spin_policy
from sparklog.client.producer.spin_policy import SOON_S, SpinPolicy, processors
from sparklog.net.async_client import AsyncConnection
from tests.client.fake_cluster import FakeCluster

_TIMEOUT_S = 30.0
_ANSWERS = 20


class _Polls:
    """A poll that records its arguments."""

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
        return AsyncConnection("unused", 1 << 20)

    connection = asyncio.run(made())
    connection._poll = polls  # type: ignore[assignment]
    return connection


def test_a_spinning_wait_polls_without_sleeping_until_bytes_arrive() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        polls = _Polls(ours, lambda asked: asked == 100 and theirs.send(b"x"))
        assert _waiting(polls).wait_readable(60.0, 60.0)
    assert polls.timeouts == [0] * 101


def test_a_wait_that_has_spun_long_enough_sleeps_the_rest() -> None:
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


def _asked(fake: FakeCluster, monkeypatch: pytest.MonkeyPatch, soon_s: float) -> list[float]:
    """Return the spin times of consecutive waits, if responses within ``soon_s`` are soon."""
    fake.create("t", partitions=1)
    asked: list[float] = []
    wait_readable = AsyncConnection.wait_readable

    def noted(self: AsyncConnection, timeout_s: float, awake_s: float = 0.0) -> bool:
        asked.append(awake_s)
        return wait_readable(self, timeout_s)

    monkeypatch.setattr(spin_policy, "SOON_S", soon_s)
    monkeypatch.setattr(AsyncConnection, "wait_readable", noted)
    with Producer(fake.bootstrap) as producer:
        deadline = time.monotonic() + _TIMEOUT_S
        for number in itertools.count():
            assert producer.send("t", b"v").result().offset == number
            if len(asked) >= _ANSWERS:
                return asked
            assert time.monotonic() < deadline
    raise AssertionError("unreachable")


def test_a_producers_response_times_decide_how_it_waits_next(
    fake: FakeCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert _asked(fake, monkeypatch, 60.0) == [0.0] + [60.0] * (_ANSWERS - 1)


def test_a_producer_sleeps_when_responses_are_slow(fake: FakeCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    assert set(_asked(fake, monkeypatch, 1e-9)) == {0.0}


def test_a_producer_sleeps_on_the_only_processor(fake: FakeCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0})
    assert set(_asked(fake, monkeypatch, 60.0)) == {0.0}


_SOON_S, _LATE_S = SOON_S / 2, SOON_S


def _slept_for(subject: SpinPolicy) -> int:
    """Return the number of early responses for which it sleeps now."""
    for count in range(10_000):
        if subject.spin_s:
            return count
        subject.on_response(_SOON_S)
    raise AssertionError("it never spins again")


def test_each_wasted_spin_doubles_the_sleep_that_follows() -> None:
    subject = SpinPolicy(processors=2)
    slept = []
    for _ in range(13):
        slept.append(_slept_for(subject))
        assert subject.spin_s == SOON_S
        subject.on_response(_LATE_S)
        assert subject.spin_s == 0
    assert slept == [2**n for n in range(11)] + [1024, 1024]


def test_late_responses_while_sleeping_keep_it_sleeping_no_longer() -> None:
    subject = SpinPolicy(processors=2)
    _slept_for(subject)
    subject.on_response(_LATE_S)
    for _ in range(10):
        subject.on_response(_SOON_S)
        subject.on_response(_LATE_S)
        assert subject.spin_s == 0
    assert _slept_for(subject) == 2


def test_quick_responses_in_a_row_compensate_late_ones() -> None:
    subject = SpinPolicy(processors=2)
    for _ in range(3):
        _slept_for(subject)
        subject.on_response(_LATE_S)
    _slept_for(subject)
    for _ in range(15):
        subject.on_response(_SOON_S)
    subject.on_response(_LATE_S)
    assert _slept_for(subject) == 16
    for _ in range(32):
        subject.on_response(_SOON_S)
    subject.on_response(_LATE_S)
    assert _slept_for(subject) == 8


@pytest.mark.parametrize(
    ("one_in", "least", "most"), [(5, 0.0, 0.02), (12, 0.0, 0.2), (50, 0.8, 1.0), (200, 0.95, 1.0)]
)
def test_it_spins_when_few_responses_are_late(one_in: int, least: float, most: float) -> None:
    subject, chance, awake = SpinPolicy(processors=2), random.Random(7), 0
    for _ in range(100_000):
        awake += subject.spin_s > 0
        subject.on_response(_LATE_S if chance.random() < 1 / one_in else _SOON_S)
    assert least <= awake / 100_000 <= most


def test_a_single_processor_never_spins() -> None:
    subject = SpinPolicy(processors=1)
    for _ in range(100):
        subject.on_response(0.0)
        assert subject.spin_s == 0


def test_the_number_of_processors_is_at_least_one() -> None:
    assert processors() >= 1
