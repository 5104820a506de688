"""A test of more load than a broker can handle: it stops reading, its memory stays within ``queued.max.bytes``, and no
record is lost.

The broker's capacity is known and equal on every machine: first it is zero, because the only follower is paused and
every write waits for it. Afterwards it is what the broker achieves, with many times ``queued.max.bytes`` pending.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from signal import SIGCONT, SIGSTOP
from typing import NamedTuple

import pytest

from sparklog.config import MIB
from sparklog.errors import ErrorCode
from sparklog.net.async_client import AsyncConnection
from sparklog.net.blocking import BlockingConnection
from sparklog.protocol.messages import CONSUMER, Fetch, FetchPartition, FetchReply, ProduceReply
from sparklog.testing.process_cluster import ProcessCluster, wait_until
from tests.broker.support import encoded, fetch, produce, produce_request, read_all
from tests.broker.topics import PATIENCE_S, create_topic, hosted, wait_equal

pytestmark = pytest.mark.integration
TOPIC = "pressed"
QUEUED = 4 * MIB
ANSWER = MIB
HOT = MIB
RECORD = 250_000
FRAME = RECORD + 2000
EARLIER = 8
PRODUCERS = 8
EACH = 32
#: The memory beyond ``queued.max.bytes``: for each producer a frame that is being received and its buffer (4 MiB in
#: total), the newest batches (1 MiB), a response each to the follower and two readers (3 MiB), and freed memory that
#: malloc keeps. All pending requests would be 61 MiB, and all responses to the client that never reads at least 40 MiB.
SLACK = 14 * MIB
#: The fetches of the client that never reads. The waiting ones come first, and all of them are due when the next
#: records are committed.
WAITING, AT_ONCE = 60, 800
SETTINGS = {
    "queued.max.bytes": str(QUEUED),
    "hot.batches.bytes": str(HOT),
    "fetch.max.bytes": str(ANSWER),
    "replica.fetch.max.bytes": str(ANSWER),
    "replica.fetch.response.max.bytes": str(ANSWER),
    # The paused follower stays in the ISR, however slow the machine is.
    "zookeeper.session.timeout.ms": "40000",
}


class Acknowledged(NamedTuple):
    offset: int
    value: bytes
    latency_s: float


class Load:
    """Producers in a thread with a separate loop. Each sends all its records at once, without waiting for responses."""

    def __init__(self, cluster: ProcessCluster) -> None:
        self._port = cluster.slots[0].port
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()))
        self.acknowledged: list[list[Acknowledged]] = [[] for _ in range(PRODUCERS)]
        self.codes: set[int] = set()
        self.begun = 0
        self._thread.start()

    def finished(self) -> bool:
        return not self._thread.is_alive()

    def answers(self) -> int:
        return sum(map(len, self.acknowledged))

    async def _run(self) -> None:
        await asyncio.gather(*(self._produce(number) for number in range(PRODUCERS)))

    async def _produce(self, number: int) -> None:
        connection = await AsyncConnection.open("127.0.0.1", self._port, client_id="load", connect_timeout_s=PATIENCE_S)
        with contextlib.closing(connection):
            await asyncio.gather(*(self._ask(connection, number, count) for count in range(EACH)))

    async def _ask(self, connection: AsyncConnection, number: int, count: int) -> None:
        value = value_of(number, count)
        began_s = time.monotonic()
        answer = connection.request(*produce_request(TOPIC, [encoded(1, value)], timeout_ms=60_000))
        self.begun += 1
        reply, _ = await answer
        assert isinstance(reply, ProduceReply)
        self.codes.add(reply.results[0].code)
        latency_s = time.monotonic() - began_s
        self.acknowledged[number].append(Acknowledged(reply.results[0].base_offset, value.encode() + b"0", latency_s))


def value_of(number: int, count: int) -> str:
    return f"{number}-{count}-".ljust(RECORD, "x")


class Resident:
    """A continuous measurement of the largest private memory of a process since the start. It omits the mapped files
    of the log, which belong to the page cache."""

    def __init__(self, pid: int) -> None:
        self._status = Path(f"/proc/{pid}/status")
        self.before = self.most = self.now()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()

    def now(self) -> int:
        line = next(line for line in self._status.read_text().splitlines() if line.startswith("RssAnon:"))
        return int(line.split()[1]) * 1024

    def _watch(self) -> None:
        while not self._ended.wait(0.005):
            self.most = max(self.most, self.now())

    def end(self) -> None:
        self._ended.set()
        self._thread.join()


@contextlib.contextmanager
def watched(pid: int) -> Iterator[Resident]:
    resident = Resident(pid)
    try:
        yield resident
    finally:
        resident.end()


@pytest.fixture(scope="module", params=["true", "false"], ids=["unix", "tcp"])
def pair(request: pytest.FixtureRequest) -> Iterator[ProcessCluster]:
    with ProcessCluster(2, settings=SETTINGS | {"unix.sockets.enable": request.param}) as cluster:
        yield cluster


class NeverReads:
    """A client that fetches the next records ``WAITING`` times, and the first records ``AT_ONCE`` times. It has a
    thread, because the system's buffers for a Unix socket do not hold all these requests."""

    def __init__(self, cluster: ProcessCluster) -> None:
        self._connection = cluster.connect(0, timeout_s=PATIENCE_S)
        self._thread = threading.Thread(target=self._ask)
        self._thread.start()
        wait_until(lambda: counter(cluster, "fetch.consumer.requests") > WAITING, PATIENCE_S, "the first ones")

    def _ask(self) -> None:
        for number in range(WAITING + AT_ONCE):
            offset, max_wait_ms = (EARLIER, 60_000) if number < WAITING else (0, 0)
            wanted = FetchPartition(TOPIC, 0, "", -1, offset, ANSWER if max_wait_ms else 1)
            self._connection.send(Fetch(0, CONSUMER, -1, max_wait_ms, ANSWER // 2, ANSWER, 0, 0, -1, (wanted,)))

    def reads_at_last(self) -> None:
        for _ in range(WAITING + AT_ONCE):
            reply, _ = self._connection.receive()
            assert isinstance(reply, FetchReply) and all(of.code == ErrorCode.NONE for of in reply.partitions)

    def close(self) -> None:
        self._thread.join(PATIENCE_S)
        self._connection.close()


def counter(cluster: ProcessCluster, name: str) -> int:
    return cluster.describe(0).counters.get(name, 0)


def test_load_above_capacity_is_throttled_without_loss(pair: ProcessCluster) -> None:
    create_topic(pair, TOPIC, assignment=((0, 1),), config={"replica.lag.time.max.ms": "600000"})
    with pair.connect(0) as reader:
        unloaded_s = min(seconds_of_one_write(reader, count) for count in range(EARLIER))
        wait_equal(pair, TOPIC, EARLIER)
        assert len(read_all(reader, TOPIC)) == EARLIER
        with watched(pair.pid(0)) as resident, contextlib.closing(NeverReads(pair)) as silent:
            load = hold_back(pair, reader)
            wait_until(load.finished, PATIENCE_S, "every record to be acknowledged")
            check_nothing_lost(load, read_all(reader, TOPIC, end=EARLIER + PRODUCERS * EACH))
            assert min(one.latency_s for of in load.acknowledged for one in of) > unloaded_s
            check_parked(pair, silent)
            check_served(pair)
            assert resident.most - resident.before < QUEUED + SLACK


def seconds_of_one_write(connection: BlockingConnection, count: int) -> float:
    began_s = time.monotonic()
    assert produce(connection, TOPIC, encoded(1, value_of(-1, count))).code == ErrorCode.NONE
    return time.monotonic() - began_s


def hold_back(cluster: ProcessCluster, reader: BlockingConnection) -> Load:
    """Run the load until the broker has accepted its limit and has continued to serve others; then resume its
    follower."""
    cluster.kill(1, SIGSTOP)
    try:
        load = Load(cluster)
        wait_until(lambda: load.begun == PRODUCERS * EACH, PATIENCE_S, "the whole load to be in flight")
        wait_until(lambda: counter(cluster, "requests.queued.bytes") >= QUEUED, PATIENCE_S, "the queue to be full")
        # With each of these responses the broker had a turn to read from the producers as well: more turns than the
        # producers' records need.
        for count in range(100):
            fetched, body = fetch(reader, TOPIC, count % EARLIER, max_bytes=1)
            assert (fetched.batch_count, fetched.high_watermark) == (1, EARLIER) and len(body) > RECORD
        taken = hosted(cluster, 0, TOPIC)
        assert taken is not None and taken.log_end_offset - EARLIER <= QUEUED // RECORD + 1
        assert load.answers() == 0
    finally:
        cluster.kill(1, SIGCONT)
    return load


def check_nothing_lost(load: Load, values: list[bytes]) -> None:
    """Check that every record exists once, at its acknowledged offset, and that each producer's records are in
    order."""
    assert load.codes == {ErrorCode.NONE}
    found = {one.offset: one.value for of in load.acknowledged for one in of}
    assert sorted(found) == list(range(EARLIER, EARLIER + PRODUCERS * EACH))
    assert [found[offset] for offset in sorted(found)] == values[EARLIER:]
    for number in range(PRODUCERS):
        mine = [value for value in values[EARLIER:] if value.startswith(b"%d-" % number)]
        assert mine == [value_of(number, count).encode() + b"0" for count in range(EACH)]


def check_parked(cluster: ProcessCluster, silent: NeverReads) -> None:
    """Check that the broker has not read most of the client's requests. When the client reads at last, it gets all
    responses."""
    assert counter(cluster, "fetch.consumer.requests") < AT_ONCE
    silent.reads_at_last()


def check_served(cluster: ProcessCluster) -> None:
    wait_until(lambda: counter(cluster, "requests.queued.bytes") < 1000, PATIENCE_S, "nothing to be in hand")
    assert QUEUED <= counter(cluster, "requests.queued.bytes.max") < QUEUED + FRAME
    assert counter(cluster, "requests.failed") == 0
    with cluster.connect(0) as connection:
        assert produce(connection, TOPIC, encoded(1, "after")).code == ErrorCode.NONE
