"""Tests of clients that have exceeded a quota: they wait as long as the broker demands, and do not give up.

Each asserted duration is a lower bound, which holds on a slow machine too.
"""

from __future__ import annotations

import asyncio
import logging
import time
from typing import Any

import pyarrow as pa
import pytest
from msgspec.structs import replace

from sparklog.client.cluster.quota_waits import MAX_WAIT_MS, QuotaWaits
from sparklog.client.consumer.partition_reader import PartitionReader
from sparklog.client.producer.producer import Producer
from sparklog.model import OffsetRange, TopicPartition
from sparklog.net.server_connection import ServerConnection
from sparklog.protocol.messages import Fetch, Metadata, Produce, Reply, Request
from tests.client.fake_cluster import FakeBroker, FakeCluster
from tests.client.producing import produce_requests

WAIT_MS = 1500
TP = TopicPartition("t", 0)


class Throttle:
    """A fault: the first reply demands a wait. Requests of its connection are handled after it if ``holds`` is set."""

    def __init__(
        self, wanted: type, *, wait_ms: int = WAIT_MS, holds: bool = False, counts: type | None = None
    ) -> None:
        """Demand the wait in the first reply to a request of the type ``wanted``. ``early`` counts requests of a type.

        The type is ``counts``, or else ``wanted``.
        """
        self._wanted = wanted
        self._counts = counts or wanted
        self._wait_ms = wait_ms
        self._holds = holds
        self._demanded = False
        self.until_s = 0.0
        #: The requests that were handled before the end of the wait.
        self.early = 0

    def __call__(self, broker: FakeBroker, connection: ServerConnection, request: Request) -> bool:
        if isinstance(request, self._counts):
            self.early += time.monotonic() < self.until_s
        if isinstance(request, self._wanted) and not self._demanded:
            self._demanded = True
            self._demand(connection)
        return False

    def _demand(self, connection: ServerConnection) -> None:
        loop = asyncio.get_running_loop()

        def reply(answer: Reply, *rest: Any) -> None:
            del connection.reply
            self.until_s = time.monotonic() + self._wait_ms / 1000
            demanding = replace(answer, throttle_time_ms=self._wait_ms)
            if self._holds:  # the client sends more requests before it gets the reply
                connection.pause_requests()
                loop.call_later(self._wait_ms / 1000, connection.resume_requests)
                loop.call_later(0.2, connection.reply, demanding, *rest)
            else:
                connection.reply(demanding, *rest)

        connection.reply = reply  # type: ignore[method-assign,assignment]


def test_a_producer_sends_nothing_during_the_wait(fake: FakeCluster) -> None:
    fake.create("t", partitions=1)
    throttle = Throttle(Produce)
    fake.fault(0, throttle)
    with Producer(fake.bootstrap) as producer:
        for number in range(3):
            assert producer.send("t", b"v").result(30).offset == number
        assert (producer.quota_waits.waits, producer.quota_waits.waited_ms) == (1, WAIT_MS)
    assert time.monotonic() >= throttle.until_s
    assert (len(produce_requests(fake)), throttle.early) == (3, 0)


@pytest.mark.parametrize(("demands", "waits"), [(Metadata, Produce), (Produce, Metadata)], ids=["Metadata", "Produce"])
def test_a_producer_waits_for_each_kind_of_reply(demands: type, waits: type) -> None:
    with FakeCluster(brokers=1) as fake:
        for topic in ("t", "u"):
            fake.create(topic, partitions=1)
        throttle = Throttle(demands, counts=waits, wait_ms=500)
        fake.fault(0, throttle)
        with Producer(fake.bootstrap) as producer:
            for topic in ("t", "u"):
                assert producer.send(topic, b"v").result(30).offset == 0
            assert producer.quota_waits.waits == 1
        assert time.monotonic() >= throttle.until_s > 0
        assert throttle.early == 0


def test_requests_in_flight_outlast_the_wait(fake: FakeCluster) -> None:
    fake.create("t", partitions=1)
    throttle = Throttle(Produce, wait_ms=4000, holds=True)
    fake.fault(0, throttle)
    table = pa.table({"value": [b"%d" % number for number in range(2000)]})
    with Producer(fake.bootstrap, request_timeout_s=3, batch_bytes=4000) as producer:
        assert producer.write("t", table, partition=0).result(30).ranges[0].offsets == OffsetRange(0, 2000)
        assert producer.quota_waits.waits == 1
    assert time.monotonic() >= throttle.until_s
    requests = produce_requests(fake)
    assert len(requests) == len(fake.do(lambda: fake.topics["t"].logs[0].batches)), "no batch was sent twice"


def test_a_reader_fetches_nothing_during_the_wait(fake: FakeCluster) -> None:
    fake.create("t", partitions=1)
    with Producer(fake.bootstrap) as producer:
        for value in (b"one", b"two"):
            producer.send("t", value).result(30)
    throttle = Throttle(Fetch)
    fake.fault(0, throttle)
    with PartitionReader(fake.bootstrap, TP, 0, 2, max_bytes=1) as reader:
        assert sum(batch.num_rows for _, batch in reader) == 2
        assert (reader.counters.quota_waits, reader.counters.quota_waited_ms) == (1, WAIT_MS)
    assert time.monotonic() >= throttle.until_s
    assert throttle.early == 0


def test_waits_are_logged_once_a_minute(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "sparklog")
    waits = QuotaWaits()
    for second in range(121):
        assert waits.add("broker 3", 40, 1000.0 + second) == 40
    assert (waits.waits, waits.waited_ms) == (121, 121 * 40)
    assert [record.getMessage().partition("(")[2] for record in caplog.records] == [
        "1 waits since the last message)",
        "60 waits since the last message)",
        "60 waits since the last message)",
    ]
    assert waits.add("broker 3", 2**62, 2000.0) == MAX_WAIT_MS
    assert waits.add("broker 3", -5, 2000.0) == 0
