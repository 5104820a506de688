"""Tests of Produce requests of Kafka clients: where a batch is decoded, the order of requests, and errors."""

from __future__ import annotations

import asyncio
import gzip
from collections.abc import Iterator
from typing import Any, cast

import pytest
from msgspec.structs import replace

from sparklog.broker.kafka import produce
from sparklog.broker.kafka.call import KafkaCall
from sparklog.broker.kafka.data_apis import data_handlers
from sparklog.broker.kafka.stored_batches import LOOP_BYTES
from sparklog.errors import BrokerError, ErrorCode
from sparklog.kafka.wire import ZERO_UUID, ApiKey
from sparklog.kafka.wire.data import PartitionProduceData, ProduceRequest, ProduceResponse, TopicProduceData
from sparklog.model import DEFAULT_LISTENER
from sparklog.protocol.messages import MAX_ENTRIES
from sparklog.security.principals import ANONYMOUS
from tests.broker.staged import Stage
from tests.broker.test_sliced_requests import Connection
from tests.kafka.records.batches import produced
from tests.kafka.records.reference import Record, write_batch, write_record

TOPIC_ID = bytes(range(16))
_GZIP = 1
#: A thread decodes a batch with this value.
LARGE = b"a" * (2 * LOOP_BYTES)


class Client(Connection):
    """A connection without a login."""

    listener = DEFAULT_LISTENER
    principal = ANONYMOUS

    def close(self) -> None:
        raise AssertionError("the broker has closed the connection")


class Listener:
    """A broker that leads one partition, and one connection of a Kafka client to it."""

    def __init__(self) -> None:
        self.stage = Stage()
        self.stage.hosted.topic_id = TOPIC_ID.hex()
        self.stage.tell(topic_id=TOPIC_ID.hex())
        self._connection = Client()
        self._handle = data_handlers(self.stage.broker)[ApiKey.PRODUCE]

    def produce(
        self, value: bytes, *, compressed: bool = False, version: int = 13
    ) -> asyncio.Future[ProduceResponse | None]:
        """Send one batch. From version 13 on, the request has the id of the topic and not its name."""
        record = Record(None, value, (), 1000)
        records = gzip.compress(write_record(record, time_delta=0, offset_delta=0)) if compressed else None
        batch = write_batch(produced([record], attributes=_GZIP if compressed else 0), records)
        part = PartitionProduceData(index=0, records=memoryview(batch))
        topic = TopicProduceData(
            name="t" if version < 13 else "",
            topic_id=TOPIC_ID if version >= 13 else ZERO_UUID,
            partition_data=[part],
        )
        request = ProduceRequest(acks=-1, timeout_ms=1000, topic_data=[topic])
        return self.ask(request, version)

    def ask(self, request: ProduceRequest, version: int) -> asyncio.Future[ProduceResponse | None]:
        slices = self.stage.broker.slices
        call = KafkaCall(cast(Any, self._connection), cast(Any, None), slices, version=version, client_id="test")
        return cast("asyncio.Future[ProduceResponse | None]", self._handle(call, request))

    def accept_large_batches(self) -> None:
        """Apply a larger ``max.message.bytes`` to the replica, before the metadata cache has it."""
        hosted = self.stage.hosted
        hosted.rules = replace(hosted.rules, max_message_bytes=1 << 30)


async def code(response: asyncio.Future[ProduceResponse | None]) -> int:
    found = await asyncio.wait_for(response, 30)
    assert found is not None
    return int(found.responses[0].partition_responses[0].error_code)


def test_one_batch_does_not_wait_for_slices_of_others() -> None:
    async def test() -> None:
        listener = Listener()

        def others() -> Iterator[None]:
            while True:
                yield None

        listener.stage.broker.slices.start(cast(Any, others()), cast(Any, pytest.fail))
        response = listener.produce(b"a")
        assert len(listener.stage.hosted.appended) == 1
        assert await code(response) == 0
        listener.stage.broker.slices.close()

    asyncio.run(test())


@pytest.mark.parametrize("version", [12, 13])
def test_requests_wait_for_a_batch_that_a_thread_decodes(version: int) -> None:
    async def test() -> None:
        listener = Listener()
        listener.accept_large_batches()
        responses = [listener.produce(LARGE, compressed=True, version=version), listener.produce(b"b", version=version)]
        assert not listener.stage.hosted.appended  # the second request waits for the first one
        assert [await code(response) for response in responses] == [0, 0]
        assert len(listener.stage.hosted.appended) == 2

    asyncio.run(test())


def test_an_unexpected_error_fails_only_its_own_request(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test() -> None:
        listener = Listener()
        listener.accept_large_batches()
        first, second = listener.produce(LARGE, compressed=True), listener.produce(b"b")
        steps = produce._OpenKafkaProduce._steps

        def fail(self: object) -> Any:
            monkeypatch.setattr(produce._OpenKafkaProduce, "_steps", steps)
            raise RuntimeError("unexpected")
            yield

        monkeypatch.setattr(produce._OpenKafkaProduce, "_steps", fail)
        third = listener.produce(b"c")
        codes = [await code(response) for response in (first, second, third)]
        assert codes == [0, ErrorCode.UNKNOWN_SERVER_ERROR, 0]

    asyncio.run(test())


def test_a_request_of_too_many_partitions_is_refused() -> None:
    async def test() -> None:
        parts = [PartitionProduceData(index=0)] * (MAX_ENTRIES + 1)
        request = ProduceRequest(acks=-1, timeout_ms=1000, topic_data=[TopicProduceData(partition_data=parts)])
        with pytest.raises(BrokerError, match="at most 10000"):
            Listener().ask(request, 13)

    asyncio.run(test())
