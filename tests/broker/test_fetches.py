"""Tests of waiting fetches: the time and the content of their responses, without sockets."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from sparklog.broker.replication.partition import Answer, Partition, PendingProduce
from sparklog.broker.requests import fetch
from sparklog.broker.requests.fetch import Fetches
from sparklog.broker.requests.fetch_read import follower_has_all, read_for_follower
from sparklog.errors import ErrorCode
from sparklog.model import BrokerEndpoint, LeaderAndIsr, TopicPartition, TopicSchema
from sparklog.net.server_connection import ServerConnection
from sparklog.protocol.messages import (
    CONSUMER,
    ControlUpdate,
    Fetch,
    FetchPartition,
    FetchReply,
    PartitionDecision,
    TopicChange,
)
from sparklog.record.codec import encode_batch
from sparklog.record.schema import DEFAULT_SCHEMA, schema_message
from sparklog.replica.events import ReplicaTicked
from sparklog.replica.fetch_session import FULL, SESSIONLESS, SessionCache
from sparklog.storage.log import Log
from sparklog.storage.log_directory import LogDirectory
from tests.broker.staged import until
from tests.broker.support import LocalReplicas, broker_context, rows

FOLLOWER = 0
INCARNATION = 1


class Served:
    """A host that only notifies fetches of changes."""

    def __init__(self, broker: LocalReplicas) -> None:
        self.now_ms = broker.context.now_ms
        self.log_end_moved = broker.fetches.log_end_moved
        self.high_watermark_moved = broker.fetches.high_watermark_moved

    def __getattr__(self, order: str) -> Callable[..., None]:
        return lambda *_: None


class Line:
    """The connection of one follower. It records the time and the content of each response."""

    peer = "follower"
    token_id = ""
    writable = True

    def __init__(self) -> None:
        self.answers: dict[int, tuple[FetchReply, float]] = {}
        self._asked: dict[int, float] = {}

    def asked(self, cid: int) -> None:
        self._asked[cid] = time.monotonic()

    def reply(self, message: FetchReply, body: object = (), body_bytes: int = -1) -> None:
        assert message.cid not in self.answers, "a second response to one request"
        self.answers[message.cid] = message, time.monotonic() - self._asked.get(message.cid, 0.0)


def led(
    tmp_path: Path,
    scenario: Callable[[LocalReplicas, Partition], Awaitable[None]],
    *,
    replicas: tuple[int, ...] = (FOLLOWER, 1),
    count: int = 1,
) -> None:
    """Let broker 1 lead this number of partitions in epoch 1, with the other replicas in sync. The scenario gets the
    first."""
    directory = LogDirectory.open(tmp_path, cluster_id="cluster", broker_id=1)
    broker = LocalReplicas(broker_context(), directory, Served)

    async def go() -> None:
        broker.context.incarnation = 1
        topic = TopicChange("t", "id", (TopicSchema(0, schema_message(DEFAULT_SCHEMA)),), (), "timestamp", {})
        live = tuple(BrokerEndpoint(number, "host", 9092, INCARNATION) for number in replicas)
        decided = LeaderAndIsr(1, 1, replicas, 1)
        states = tuple(PartitionDecision("t", "id", number, decided, 1, replicas) for number in range(count))
        update = ControlUpdate(0, "c", 1, 1, False, live, (topic,), states, sequence=1)
        await tell(broker, update)
        partition = broker.partitions.require(TopicPartition("t", 0))
        assert len(list(broker.partitions)) == count and partition.replica.is_leader
        await scenario(broker, partition)
        broker.partitions.stop_timer()
        await broker.context.end_tasks()

    try:
        asyncio.run(asyncio.wait_for(go(), 60))
    finally:
        directory.close()


async def tell(broker: LocalReplicas, update: ControlUpdate) -> None:
    """Apply the controller's update completely."""
    told: list[object] = []
    line = SimpleNamespace(reply=told.append)
    broker.update(line, update)
    await until(lambda: bool(told))


def produce(partition: Partition, count: int = 1) -> None:
    batch = encode_batch(rows(count), schema_id=0, compression=None, event_time="timestamp")
    answers: list[Answer] = []
    pending = PendingProduce([(batch.header, memoryview(batch.body))], answers.append)
    partition.produce(pending, acks=1, deadline_ms=2**60)
    assert [answer.code for answer in answers] == [ErrorCode.NONE]


def ask(
    broker: LocalReplicas,
    line: Line,
    cid: int,
    *,
    session: int,
    epoch: int,
    offset: int,
    wait_ms: int,
    incarnation: int = INCARNATION,
) -> None:
    """Send the follower's request ``cid``. The follower has everything below ``offset``."""
    wanted = FetchPartition("t", 0, "id", 1, offset, 1 << 20, 1 if offset else -1)
    request = Fetch(cid, FOLLOWER, incarnation, wait_ms, 1, 1 << 20, 0, session, epoch, (wanted,))
    line.asked(cid)
    broker.fetches.handle(cast(ServerConnection, line), request, memoryview(b""))


def opened(broker: LocalReplicas, line: Line) -> int:
    """Return the id of a session that has received everything."""
    ask(broker, line, 1, session=0, epoch=FULL, offset=0, wait_ms=1000)
    return line.answers[1][0].session_id


@pytest.mark.parametrize(("first_ms", "then_ms"), [(20, 120), (30_000, 60), (40, 40)])
def test_each_request_of_a_session_waits_for_its_own_time(tmp_path: Path, first_ms: int, then_ms: int) -> None:
    """The timer may have been set earlier or later for the previous request."""

    async def scenario(broker: LocalReplicas, partition: Partition) -> None:
        line = Line()
        session = opened(broker, line)
        ask(broker, line, 2, session=session, epoch=1, offset=0, wait_ms=first_ms)
        assert 2 not in line.answers
        ask(broker, line, 3, session=session, epoch=2, offset=0, wait_ms=then_ms)
        assert 2 in line.answers and 3 not in line.answers, "the newer request must end the older one, and wait itself"
        await until(lambda: 3 in line.answers)
        reply, waited_s = line.answers[3]
        assert reply.partitions == () and waited_s >= then_ms / 1000

    led(tmp_path, scenario)


def test_a_timer_that_fires_slightly_early_is_not_set_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A second timer would fire immediately and repeatedly until the time: eight times for each long poll."""
    now_s = 1000.0
    monkeypatch.setattr(fetch, "time", SimpleNamespace(monotonic=lambda: now_s))

    async def scenario(broker: LocalReplicas, partition: Partition) -> None:
        nonlocal now_s
        line = Line()
        ask(broker, line, 1, session=0, epoch=FULL, offset=0, wait_ms=500)
        assert 1 in line.answers, "a new session"
        ask(broker, line, 2, session=line.answers[1][0].session_id, epoch=1, offset=0, wait_ms=500)
        for now_s in (1000.4, 1000.497):  # noqa: B007 - the clock
            broker.fetches._reply_due()
            assert 2 not in line.answers
        now_s = 1000.4985
        broker.fetches._reply_due()
        assert 2 in line.answers

    led(tmp_path, scenario)


def test_records_end_the_wait_and_marks_follow_them(tmp_path: Path) -> None:
    async def scenario(broker: LocalReplicas, partition: Partition) -> None:
        line = Line()
        session = opened(broker, line)
        for number in range(5):
            ask(broker, line, 2 + number, session=session, epoch=1 + number, offset=number, wait_ms=30_000)
            produce(partition)
            await until(lambda cid=2 + number: cid in line.answers)  # type: ignore[misc]
            [found] = line.answers[2 + number][0].partitions
            assert (found.batch_count, found.log_end_offset, found.high_watermark) == (1, number + 1, number)
        # with the next request all records are committed: the follower gets the high watermark, without records
        ask(broker, line, 9, session=session, epoch=6, offset=5, wait_ms=30_000)
        assert 9 not in line.answers and partition.replica.high_watermark == 5
        await until(lambda: 9 in line.answers)
        [found] = line.answers[9][0].partitions
        assert (found.batch_count, found.high_watermark) == (0, 5)

    led(tmp_path, scenario)


def test_a_lost_connection_ends_its_waiting_fetches(tmp_path: Path) -> None:
    async def scenario(broker: LocalReplicas, partition: Partition) -> None:
        line, again = Line(), Line()
        session = opened(broker, line)
        ask(broker, line, 2, session=session, epoch=1, offset=0, wait_ms=1)
        broker.fetches.connection_lost(cast(ServerConnection, line))
        session = opened(broker, again)
        ask(broker, again, 2, session=session, epoch=1, offset=0, wait_ms=30)
        await until(lambda: 2 in again.answers)
        assert 2 not in line.answers

    led(tmp_path, scenario)


def test_no_waiting_fetch_outlives_its_lost_connection(tmp_path: Path) -> None:
    async def scenario(broker: LocalReplicas, partition: Partition) -> None:
        line, other = Line(), Line()
        session = opened(broker, line)
        ask(broker, line, 2, session=session, epoch=1, offset=0, wait_ms=30_000)
        for cid, by in ((3, line), (4, line), (5, other)):
            ask(broker, by, cid, session=0, epoch=SESSIONLESS, offset=0, wait_ms=30_000)
        waiting = broker.fetches._waiting.values()
        assert [fetch.request.cid for fetch in waiting] == [2, 3, 4, 5]
        broker.fetches.connection_lost(cast(ServerConnection, line))
        assert [fetch.request.cid for fetch in waiting] == [5]
        produce(partition)
        await until(lambda: 5 in other.answers)
        assert list(line.answers) == [1] and not waiting
        assert not broker.fetches._sessionless and not broker.fetches._sessionless_of

    led(tmp_path, scenario)


def test_an_evicted_session_completes_its_waiting_fetch(tmp_path: Path) -> None:
    """No event would wake the fetch any more, not even the end of its connection."""

    async def scenario(broker: LocalReplicas, partition: Partition) -> None:
        broker.fetches = Fetches(broker.context, broker.access, broker.partitions, SessionCache(slots=1))
        consumer, follower = Line(), Line()
        wanted = FetchPartition("t", 0, "id", 1, 0, 1 << 20)

        def consume(cid: int, session: int, epoch: int, wait_ms: int) -> None:
            request = Fetch(cid, CONSUMER, 0, wait_ms, 1, 1 << 20, 0, session, epoch, (wanted,))
            consumer.asked(cid)
            broker.fetches.handle(cast(ServerConnection, consumer), request, memoryview(b""))

        consume(1, 0, FULL, 0)
        consume(2, consumer.answers[1][0].session_id, 1, 30_000)
        assert list(consumer.answers) == [1]
        opened(broker, follower)
        await until(lambda: 2 in consumer.answers)
        assert consumer.answers[2][1] < 10, "not at its timeout"
        assert not broker.fetches._waiting

    led(tmp_path, scenario)


def test_the_time_of_each_event_is_measured_separately(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A produce that arrives while another one completes is stepped after it: the time of its append must not count
    as a follower's lag."""

    async def scenario(broker: LocalReplicas, partition: Partition) -> None:
        line, now, appended = Line(), [broker.context.now_ms()], []
        monkeypatch.setattr(partition._host, "now_ms", lambda: now[0])
        session = opened(broker, line)
        append = Log.append_as_leader

        def slow(self: Log, *args: Any, **options: Any) -> object:
            appended.append(now[0])
            if len(appended) == 2:
                now[0] += 10 * partition.replica.settings.lag_time_max_ms
            return append(self, *args, **options)

        monkeypatch.setattr(Log, "append_as_leader", slow)
        batch = encode_batch(rows(1), schema_id=0, compression=None, event_time="timestamp")
        batches = [(batch.header, memoryview(batch.body))]
        second = PendingProduce(batches, lambda answer: None)
        first = PendingProduce(batches, lambda answer: partition.produce(second, acks=1, deadline_ms=2**60))
        partition.produce(first, acks=-1, deadline_ms=2**60)
        ask(broker, line, 2, session=session, epoch=1, offset=1, wait_ms=500)
        assert len(appended) == 2 and partition.log.log_end_offset == 2
        partition.step(ReplicaTicked())
        assert partition.replica.isr_state is not None and partition.replica.isr_state.maximal == (FOLLOWER, 1)
        assert not partition.replica.in_flight

    led(tmp_path, scenario)


def test_a_caught_up_follower_finds_nothing_to_send(tmp_path: Path) -> None:
    """The cached answer equals that of a read."""

    async def scenario(broker: LocalReplicas, partition: Partition) -> None:
        seen = set()
        for _ in range(3):
            end = partition.log.log_end_offset
            for offset in range(end + 2):
                for last_epoch in (-1, 0, 1, 2):
                    for epoch, topic_id, columns in ((1, "id", None), (0, "id", None), (1, "", None), (1, "no", None),
                                                     (1, "id", ())):  # fmt: skip
                        wanted = FetchPartition("t", 0, topic_id, epoch, offset, 1000, last_epoch, columns=columns)
                        has_all = follower_has_all(partition, wanted)
                        look = read_for_follower(broker.partitions, wanted, verdict=None, max_bytes=1000, isolation=0)
                        assert not has_all or not (look.body or look.urgent), wanted
                        seen.add((has_all, look.urgent, bool(look.body)))
            produce(partition, 2)
        assert seen == {(True, False, False), (False, True, False), (False, False, True), (False, False, False)}

    led(tmp_path, scenario)


def test_a_reregistered_follower_counts_from_its_first_fetch(
    tmp_path: Path,
) -> None:
    async def scenario(broker: LocalReplicas, partition: Partition) -> None:
        line = Line()
        produce(partition)
        session = opened(broker, line)
        ask(broker, line, 2, session=session, epoch=1, offset=1, wait_ms=30_000)
        assert partition.replica.replicated_end == 1
        live = (BrokerEndpoint(FOLLOWER, "host", 9092, INCARNATION + 1), BrokerEndpoint(1, "host", 9092, INCARNATION))
        await tell(broker, ControlUpdate(0, "c", 1, 1, False, live, (), (), sequence=2))
        assert partition.replica.replicated_end < 1
        assert 2 not in line.answers, "so nothing would be committed while that request waits"
        newer = INCARNATION + 1
        ask(broker, line, 3, session=session, epoch=2, offset=1, wait_ms=30_000, incarnation=newer)
        assert line.answers[2][0].code == ErrorCode.NONE
        assert line.answers[3][0].code == ErrorCode.FETCH_SESSION_ID_NOT_FOUND
        ask(broker, line, 4, session=session, epoch=FULL, offset=1, wait_ms=30_000, incarnation=newer)
        assert partition.replica.replicated_end == 1

    led(tmp_path, scenario)
