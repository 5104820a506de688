"""Tests of the conversion from a response's bytes to batches of records."""

from __future__ import annotations

import datetime as dt
from collections.abc import Iterator

import msgspec
import numpy as np
import pyarrow as pa
import pytest

from sparklog.client.consumer.consumer import Consumer
from sparklog.client.consumer.fetched_batches import decode_partition, split_partitions
from sparklog.client.producer.producer import Producer
from sparklog.errors import BrokerError
from sparklog.protocol.messages import AbortedRange, FetchedPartition
from sparklog.record.checksum import crc32c
from sparklog.record.codec import encode_batch
from sparklog.record.header import BatchHeader, Flag
from sparklog.record.schema import DEFAULT_SCHEMA
from tests.client.fake_cluster import FakeCluster
from tests.client.reading import TYPED, numbers


def batch_at(base: int, count: int, **header: int) -> tuple[BatchHeader, bytes]:
    table = pa.record_batch({"n": pa.array(range(base, base + count), pa.int64())})
    encoded = encode_batch(table, schema_id=0, compression=None, event_time=None)
    return encoded.header._replace(base_offset=base, **header), bytes(encoded.body)


def answer(batches: list[tuple[BatchHeader, bytes]]) -> tuple[FetchedPartition, memoryview]:
    bodies = b"".join(body for _, body in batches)
    head = FetchedPartition("t", 0, 0, 99, 99, 0, 99, len(batches), len(bodies))
    return head, memoryview(b"".join(header.pack() for header, _ in batches) + bodies)


def test_control_batches_are_skipped_and_positions_pass_them() -> None:
    head, body = answer([batch_at(0, 5), batch_at(5, 1, flags=int(Flag.CONTROL)), batch_at(6, 2)])
    (part,) = split_partitions([head], body)
    assert numbers([one.batch for one in decode_partition(part, lambda _: TYPED, start=2)]) == [2, 3, 4, 6, 7]
    assert part.next_offset == 8


def test_compacted_batches_carry_their_offsets() -> None:
    header, body = batch_at(10, 3)
    deltas = np.array([0, 4, 9], "<u4").tobytes()
    header = header._replace(
        offset_span=10, offset_array_length=12, body_crc=crc32c(body + deltas), flags=int(Flag.OFFSET_ARRAY)
    )
    head, content = answer([(header, body + deltas + bytes(4))])
    (part,) = split_partitions([head], content)
    assert part.next_offset == 20
    (found,) = decode_partition(part, lambda _: TYPED, start=11, end=19)
    assert (found.first_offset, found.batch.num_rows) == (14, 1)
    assert found.offsets is not None
    assert list(found.offsets) == [14]


class Counted(tuple):  # type: ignore[type-arg]
    """Ranges that count the iterations over them."""

    passes = 0

    def __iter__(self) -> Iterator[AbortedRange]:
        Counted.passes += 1
        return super().__iter__()


def test_aborted_batches_are_omitted_by_producer_and_offset() -> None:
    kind = int(Flag.TRANSACTIONAL)
    batches = [batch_at(n, 1, flags=kind if n % 10 else 0, producer_id=n % 7) for n in range(100)]
    head, body = answer(batches)
    gone = Counted([AbortedRange(3, 20, 40), AbortedRange(3, 60, 70), AbortedRange(5, 0, 99), AbortedRange(99, 0, 99)])
    (part,) = split_partitions([msgspec.structs.replace(head, aborted=gone)], body)
    found = numbers([one.batch for one in decode_partition(part, lambda _: TYPED, start=0)])
    aborted = [n for n in range(100) if n % 7 == 5 or (n % 7 == 3 and (20 <= n <= 40 or 60 <= n <= 70))]
    assert found == [n for n in range(100) if n not in aborted or n % 10 == 0]
    assert Counted.passes == 1, "the ranges are scanned again for every batch"


@pytest.mark.parametrize("change", [-1, 1, 96])
def test_inconsistent_lengths_are_corrupt(change: int) -> None:
    head, body = answer([batch_at(0, 5)])
    content = bytes(body)[:change] if change < 0 else bytes(body) + bytes(change)
    with pytest.raises(BrokerError, match="CORRUPT_MESSAGE"):
        list(split_partitions([head], memoryview(content)))


def test_a_default_topic_is_read_with_kafkas_columns(fake: FakeCluster) -> None:
    fake.create("d")
    with Producer(fake.bootstrap) as producer:
        producer.send("d", b"v", key=b"k", timestamp=7)
    with Consumer(fake.bootstrap, "d") as consumer:
        table = consumer.to_table()
    assert table.schema.equals(DEFAULT_SCHEMA)
    assert table.to_pylist()[0]["timestamp"] == dt.datetime.fromtimestamp(7e-6, dt.timezone.utc)
