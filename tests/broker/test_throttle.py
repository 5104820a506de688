"""Tests of the rate at which moved partitions are copied, without a network: a token bucket, and the throttled
partitions."""

from __future__ import annotations

import asyncio
import selectors
from functools import partial
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparklog.broker.context import BrokerContext
from sparklog.broker.replication.throttle import CopyThrottle, TokenBucket, limit_of
from sparklog.model import BrokerEndpoint, LeaderAndIsr, TopicPartition, TopicSchema
from sparklog.protocol.messages import ControlUpdate, PartitionDecision, TopicChange
from tests.broker.support import broker_context

RATE = 1000


@given(st.lists(st.tuples(st.integers(1, 5000), st.integers(0, 3000)), min_size=1, max_size=50))
def test_a_client_that_waits_for_each_debt_keeps_the_rate(fetches: list[tuple[int, int]]) -> None:
    bucket = TokenBucket(RATE, 0.0)
    now_s, taken = 0.0, 0
    for count, idle_ms in fetches:
        now_s += idle_ms / 1000
        bucket.consume(count, now_s)
        taken += count
        now_s += bucket.wait_s(now_s)
        assert taken <= RATE * (now_s + 0.5) + 1e-6


def test_a_busy_copy_uses_the_whole_rate() -> None:
    bucket = TokenBucket(RATE, 0.0)
    now_s, taken = 0.0, 0
    while now_s < 10:
        bucket.consume(100, now_s)
        taken += 100
        now_s += bucket.wait_s(now_s) + 0.01  # and the time until the next bytes are available
    assert taken == pytest.approx(RATE * now_s, rel=0.03)


def test_a_debt_is_paid_at_the_new_rate() -> None:
    bucket = TokenBucket(RATE, 0.0)
    bucket.consume(2000, 0.0)
    assert bucket.wait_s(0.0) == 2.0
    bucket.set_rate(4 * RATE, 1.0)
    assert bucket.wait_s(1.0) == 0.25
    assert bucket.wait_s(100.0) == 0.0
    bucket.consume(4 * RATE, 100.0)
    assert bucket.wait_s(100.0) == pytest.approx(0.5)
    assert bucket.wait_s(99.0) == pytest.approx(0.5)  # a clock that stands still


def move(partition: int, *, isr: tuple[int, ...] = (0, 1), throttle_bytes: int = RATE, version: int = 1,
         target: tuple[int, ...] = (2, 1)) -> PartitionDecision:  # fmt: skip
    state = LeaderAndIsr(0, 0, isr, 1)
    return PartitionDecision(
        "t", "id", partition, state, version, (2, 1, 0), target=target, original=(0, 1), throttle_bytes=throttle_bytes
    )


def test_only_added_replicas_out_of_sync_are_throttled() -> None:
    assert [limit_of(move(0), broker_id) for broker_id in range(4)] == [0, 0, RATE, 0]
    assert limit_of(move(0, isr=(0, 1, 2)), 2) == 0
    assert limit_of(move(0, throttle_bytes=0), 2) == 0


class Skipping(selectors.SelectSelector):
    """A selector without waits: the clock jumps to the end of each wait. A turn of the loop takes 20 microseconds."""

    now_s = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        assert timeout is not None, "no event is left"
        self.now_s += max(20e-6, timeout)
        return super().select(0)


class SkippingLoop(asyncio.SelectorEventLoop):
    """A loop whose time depends only on its timers, on a machine of any speed."""

    def __init__(self) -> None:
        self._clock = Skipping()
        super().__init__(self._clock)

    def time(self) -> float:
        return self._clock.now_s


class LoopTimed(BrokerContext):
    def now_ms(self) -> int:
        return int(asyncio.get_running_loop().time() * 1000)


class Subject:
    """A throttle of broker 2 with its own clock."""

    def __init__(self, kind: type[BrokerContext] = BrokerContext) -> None:
        self.broker = broker_context(2, kind)
        self.throttle = CopyThrottle(self.broker)
        self.broker.metadata_listeners.append(self.throttle.metadata_changed)
        self.resumed: list[int] = []
        self.back = asyncio.Event()
        self.sequence = 0

    def tell(self, *decisions: PartitionDecision) -> None:
        self.sequence += 1
        change = TopicChange("t", "id", (TopicSchema(0, b"schema"),), (), None, {})
        brokers = tuple(BrokerEndpoint(number, "host", 1, 1) for number in range(3))
        update = ControlUpdate(0, "c", 1, 1, False, brokers, (change,), decisions, sequence=self.sequence)
        self.broker.cache.apply(update)
        self.broker.metadata_changed()

    def hold(self, partition: int) -> None:
        def resume() -> None:
            self.resumed.append(partition)
            self.back.set()

        self.throttle.hold(TopicPartition("t", partition), resume)


def test_the_smallest_limit_counts_for_all_throttled_replicas(tmp_path: Path) -> None:
    subject = Subject()
    subject.tell(move(0), move(1, throttle_bytes=3 * RATE), move(2, throttle_bytes=0))
    limits = [subject.throttle.limit(TopicPartition("t", number)) for number in range(4)]
    assert limits == [RATE, RATE, 0, 0]
    assert subject.throttle.max_bytes(RATE, 1 << 20) == 16 * 1024
    assert subject.throttle.max_bytes(50 << 20, 8 << 20) == 5 << 20
    assert subject.throttle.max_bytes(0, 8 << 20) == 8 << 20


def test_throttled_partitions_return_one_by_one_or_when_in_sync(tmp_path: Path) -> None:
    async def test() -> None:
        subject = Subject()
        fast = 200_000  # bytes a second: a share of 20,000 takes 0.1 s
        subject.tell(*(move(number, throttle_bytes=fast) for number in range(4)))
        assert subject.throttle.limit(TopicPartition("t", 0)) == fast
        subject.throttle.received(40_000)
        assert subject.throttle.exhausted
        began = asyncio.get_running_loop().time()
        for number in range(4):
            subject.hold(number)
        subject.tell(move(2, isr=(0, 1, 2), throttle_bytes=fast, version=2))
        assert subject.resumed == [2]
        while len(subject.resumed) < 4:
            await subject.back.wait()
            subject.back.clear()
        assert subject.resumed == [2, 0, 1, 3]
        assert asyncio.get_running_loop().time() - began >= 0.2 + 2 * 0.1 - 0.01
        assert subject.throttle._timer is None
        subject.throttle.received(10 * fast)
        subject.hold(0)
        subject.tell(*(move(number, target=(), version=3) for number in range(4)))
        assert subject.resumed[4:] == [0]
        assert not subject.throttle.exhausted
        subject.throttle.close()

    asyncio.run(asyncio.wait_for(test(), 10))


class Copier:
    """A continuous copy of partitions as a fetcher does it: it asks the throttle, and the fetched bytes come later."""

    def __init__(self, subject: Subject, answer_s: float, batch_bytes: int) -> None:
        self._throttle, self._answer_s, self._batch_bytes = subject.throttle, answer_s, batch_bytes
        #: (the time, the number of bytes fetched until then)
        self.copied: list[tuple[float, int]] = [(0.0, 0)]

    def ask(self, number: int) -> None:
        most = self._throttle.max_bytes(self._throttle.limit(TopicPartition("t", number)), 1 << 30)
        count = max(1, most // self._batch_bytes) * self._batch_bytes  # whole batches, and at least one
        asyncio.get_running_loop().call_later(self._answer_s, self._came, number, count)

    def _came(self, number: int, count: int) -> None:
        self._throttle.received(count)
        self.copied.append((asyncio.get_running_loop().time(), self.copied[-1][1] + count))
        if self._throttle.exhausted:
            self._throttle.hold(TopicPartition("t", number), partial(self.ask, number))
        else:
            self.ask(number)


@pytest.mark.parametrize("partitions", [1, 4])
@pytest.mark.parametrize("answer_s", [0.0, 0.002, 0.08])
@pytest.mark.parametrize("batch_bytes", [1000, 150_000, 1_500_000])
def test_a_copy_obeys_the_limit_and_uses_it_fully(
    tmp_path: Path, partitions: int, answer_s: float, batch_bytes: int
) -> None:
    limit, seconds = 1_000_000, 60

    async def copy() -> list[tuple[float, int]]:
        subject = Subject(LoopTimed)
        subject.tell(*(move(number, throttle_bytes=limit) for number in range(partitions)))
        copier = Copier(subject, answer_s, batch_bytes)
        for number in range(partitions):
            copier.ask(number)
        await asyncio.sleep(seconds)
        subject.throttle.close()
        return copier.copied

    loop = SkippingLoop()
    try:
        copied = loop.run_until_complete(copy())
    finally:
        loop.close()
    one_answer = max(batch_bytes, limit // 10)
    for at_s, count in copied:
        assert count <= limit * (at_s + 0.5) + (partitions + 1) * one_answer
    assert copied[-1][1] >= 0.97 * limit * copied[-1][0] - one_answer
