"""Tests that no request of a client keeps the broker's only thread for long: longer work is divided, or done in a
thread.

They measure the processor time of the longest turn of the loop, for all threads, because Arrow decompresses in its own
threads while the loop waits. They compare it with the time that this machine needs for the whole work at once.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pyarrow as pa
import pytest

from sparklog.errors import BrokerError, ErrorCode
from sparklog.protocol.messages import (
    ACKS_ALL,
    CONSUMER,
    MAX_ENTRIES,
    CommitOffsets,
    DeleteRecords,
    DeleteRecordsPartition,
    ElectLeaders,
    Fetch,
    FetchOffsets,
    FetchPartition,
    FindCoordinator,
    GroupOffset,
    ListOffsets,
    ListOffsetsPartition,
    Metadata,
    Produce,
    ProducePartition,
    ProduceReply,
    Request,
)
from sparklog.record.codec import EncodedBatch, encode_batch
from sparklog.record.schema import DEFAULT_SCHEMA
from sparklog.record.validate import validate_batch
from sparklog.testing.process_cluster import wait_until
from tests.broker.metered import MeteredCluster
from tests.broker.support import encoded, produce
from tests.broker.topics import PATIENCE_S, create_topic

pytestmark = pytest.mark.integration
MIB = 1024 * 1024


@pytest.fixture(scope="module")
def metered() -> Iterator[MeteredCluster]:
    cluster = MeteredCluster()
    with cluster:
        create_topic(cluster, "t", replicas=1)
        yield cluster


def longest_turn_s(cluster: MeteredCluster, message: Produce, body: list[bytes]) -> tuple[float, ProduceReply]:
    """Send one request. Return its response, and the longest turn of the loop meanwhile."""
    with cluster.connect(0, timeout_s=300) as connection:
        connection.request(Metadata(0, ()))
        turn = cluster.longest_turn(0)
        turn.write(0, 0)
        reply, _ = connection.request(message, body)
        assert isinstance(reply, ProduceReply)
        connection.request(Metadata(0, ()))  # the turn of the response has ended
        return turn.read()[0] / 1e9, reply


def zeros(mebibytes: int) -> EncodedBatch:
    """Return a batch of some kilobytes that decompresses to this number of MiB."""
    row = {"key": [None], "value": [bytes(mebibytes * MIB - 4096)], "headers": [None], "timestamp": [1]}
    batch = pa.RecordBatch.from_pydict(row, schema=DEFAULT_SCHEMA)
    return encode_batch(batch, schema_id=0, compression="zstd", event_time="timestamp")


def repeated(topic: str, batch: EncodedBatch, count: int) -> tuple[Produce, list[bytes]]:
    header, body = batch.header.pack(), batch.body.to_pybytes()
    named = ProducePartition(topic, 0, "", count, count * len(body))
    return Produce(0, ACKS_ALL, 60_000, (named,)), [header * count, body * count]


def check_s(batch: EncodedBatch) -> float:
    """Return the processor time that this machine needs to check the batch once."""
    found = []
    for _ in range(3):
        began = time.process_time()
        validate_batch(
            batch.header,
            memoryview(batch.body),
            schema=DEFAULT_SCHEMA,
            schema_id=0,
            max_message_bytes=1024 * MIB,
            event_time="timestamp",
        )
        found.append(time.process_time() - began)
    return min(found)


def test_batches_that_decompress_to_gigabytes_take_short_turns(metered: MeteredCluster) -> None:
    create_topic(metered, "wide", partitions=4, replicas=1)
    batch, count = zeros(16), 250
    header, body = batch.header.pack(), batch.body.to_pybytes()
    named = tuple(ProducePartition("wide", number, "", count, count * len(body)) for number in range(4))
    request = Produce(0, ACKS_ALL, 60_000, named)
    longest_s, reply = longest_turn_s(metered, request, [header * count, body * count] * 4)
    assert [result.code for result in reply.results] == [ErrorCode.NONE] * 4
    assert longest_s < 4 * count * check_s(batch) / 8


def test_a_request_that_decompresses_to_too_much_is_refused(metered: MeteredCluster) -> None:
    _, reply = longest_turn_s(metered, *repeated("t", zeros(16), 300))
    assert reply.results[0].code == ErrorCode.MESSAGE_TOO_LARGE
    assert str(4096 * MIB) in reply.results[0].detail


def test_a_very_large_batch_takes_short_turns(metered: MeteredCluster) -> None:
    create_topic(metered, "vast", replicas=1, config={"max.message.bytes": str(1024 * MIB)})
    _, reply = longest_turn_s(metered, *repeated("vast", zeros(100), 1))
    assert reply.results[0].code == ErrorCode.NONE
    with metered.connect(0) as connection:
        large = zeros(100)
        lies = (large.header._replace(max_timestamp=7), large.body)
        assert produce(connection, "vast", lies).code == ErrorCode.INVALID_RECORD


def test_many_batches_for_one_partition_take_short_turns(metered: MeteredCluster) -> None:
    _, reply = longest_turn_s(metered, *repeated("t", encoded(1), 1000))
    assert reply.results[0].code == ErrorCode.NONE
    _, reply = longest_turn_s(metered, *repeated("t", encoded(1), 200_000))
    assert reply.results[0].code == ErrorCode.INVALID_REQUEST
    assert "200000 batches" in reply.results[0].detail and "1000" in reply.results[0].detail


def test_a_bad_batch_rejects_the_good_ones_beside_it(metered: MeteredCluster) -> None:
    """The result is the same whether batches are checked before the append or with it."""
    create_topic(metered, "mixed", replicas=1)
    good = encoded(2)
    bad = (good.header._replace(max_timestamp=good.header.max_timestamp + 1), good.body)
    with metered.connect(0) as connection:
        for batches in ((good, bad), (good, good, bad, good)):
            result = produce(connection, "mixed", *batches)
            assert (result.code, result.base_offset) == (ErrorCode.INVALID_RECORD, -1)
        assert produce(connection, "mixed", good, good).base_offset == 0


def test_a_retry_of_stored_batches_is_not_validated_again(metered: MeteredCluster) -> None:
    """The topic's schema may have changed since the first request."""
    create_topic(metered, "retried", replicas=1)
    first, second = encoded(2, producer=(7, 0, 0)), encoded(2, producer=(7, 0, 2))
    damaged = (second.header._replace(flags=1), second.body)
    with metered.connect(0) as connection:
        assert produce(connection, "retried", first, second).base_offset == 0
        assert produce(connection, "retried", first, second).base_offset == 0
        assert produce(connection, "retried", first, damaged).base_offset == 0


# --- many entries -----------------------------------------------------------------------------------------------------

NAMES = tuple(f"x{number:07}" for number in range(MAX_ENTRIES))
MANY: dict[str, Request] = {
    "fetch": Fetch(0, CONSUMER, -1, 0, 1, 1, 0, 0, -1, tuple(FetchPartition(name, 0, "", -1, 0, 1) for name in NAMES)),
    "list offsets": ListOffsets(0, 0, tuple(ListOffsetsPartition(name, 0, -1) for name in NAMES)),
    "delete records": DeleteRecords(0, tuple(DeleteRecordsPartition(name, 0, -1) for name in NAMES)),
    "elect leaders": ElectLeaders(0, "preferred", 1000, tuple((name, 0) for name in NAMES)),
    "commit": CommitOffsets(0, "g", tuple(GroupOffset(name, 0, 0) for name in NAMES)),
    "produce": Produce(0, ACKS_ALL, 1000, tuple(ProducePartition(name, 0, "", 0, 0) for name in NAMES)),
}


@pytest.mark.parametrize("name", MANY)
def test_the_maximum_number_of_entries_gets_a_full_response(metered: MeteredCluster, name: str) -> None:
    with metered.connect(0, timeout_s=300) as connection:
        connection.request(FindCoordinator(0, "group", "g"))
        wait_until(lambda: _coordinates(metered), PATIENCE_S, "the group's coordinator")
        reply: Any = connection.request(MANY[name])[0]
        answered = "partitions" if name == "fetch" else "results"
        assert len(getattr(reply, answered)) == MAX_ENTRIES


def _coordinates(cluster: MeteredCluster) -> bool:
    with cluster.connect(0) as connection:
        try:
            connection.request(FetchOffsets(0, "g"))
        except BrokerError:
            return False
        return True
