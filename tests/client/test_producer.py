"""Tests of the producer with real sockets: its promises to callers."""

# ruff: noqa: DTZ001 - a datetime without a time zone is among what is tested

from __future__ import annotations

import asyncio
import concurrent.futures
import datetime as dt
import itertools
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import pandas as pd
import pyarrow as pa
import pytest

from sparklog.client.producer.partitioning import ProducerTopic
from sparklog.client.producer.producer import Producer
from sparklog.client.producer.record_chunk import RecordChunk
from sparklog.client.producer.record_future import RecordFuture
from sparklog.client.producer.results import BatchOutcome, RecordMetadata
from sparklog.errors import BrokerError, ConfigError, ErrorCode
from sparklog.model import OffsetRange, TopicSchema
from sparklog.net.server_connection import ServerConnection
from sparklog.protocol.messages import (
    ErrorReply,
    InitProducerId,
    Metadata,
    Produce,
    Reply,
    Request,
    TopicMetadata,
)
from sparklog.record.schema import DEFAULT_SCHEMA, schema_message
from tests.client.fake_cluster import FakeBroker, FakeCluster
from tests.client.producing import LoseAnswers, produce_requests, times, values

TYPED = pa.schema([("carrier", pa.string()), ("delay", pa.float64())])


def test_a_record_is_stored_with_its_partition_and_offset(fake: FakeCluster) -> None:
    fake.create("t", partitions=3)
    moment = dt.datetime(2026, 1, 1, tzinfo=dt.timezone.utc)
    with Producer(fake.bootstrap) as producer:
        first = producer.send("t", b"v", key="k", headers={"h": b"1", "n": None}, timestamp=moment, partition=2)
        found = first.result(30)
        assert found == RecordMetadata("t", 2, 0, 1_767_225_600_000_000)
        assert producer.send("t", "text", partition=2).result(30).offset == 1
    records = [row for batch in fake.records("t") for row in batch.to_pylist()]
    assert records[0] == {
        "key": b"k",
        "value": b"v",
        "headers": [{"key": "h", "value": b"1"}, {"key": "n", "value": None}],
        "timestamp": moment,
    }
    assert records[1]["value"] == b"text"


@pytest.mark.parametrize(
    ("moment", "expected"),
    [
        (dt.datetime(2026, 1, 1), 1_767_225_600_000_000),
        (dt.datetime(2026, 1, 1, 5, tzinfo=dt.timezone(dt.timedelta(hours=5))), 1_767_225_600_000_000),
        (dt.datetime(1, 1, 1, 0, 0, 0, 1, tzinfo=dt.timezone.utc), -62_135_596_799_999_999),
        (dt.datetime(1684, 12, 31, 23, 59, 59, 999_999, tzinfo=dt.timezone.utc), -8_993_635_200_000_001),
        (dt.datetime(2256, 1, 1, 0, 0, 0, 1, tzinfo=dt.timezone.utc), 9_025_257_600_000_001),
        (dt.datetime(9999, 12, 31, 23, 59, 59, 999_999, tzinfo=dt.timezone.utc), 253_402_300_799_999_999),
        (-5, -5),
    ],
)
def test_a_timestamp_is_stored_exactly(fake: FakeCluster, moment: dt.datetime | int, expected: int) -> None:
    fake.create("t", partitions=1)
    with Producer(fake.bootstrap) as producer:
        assert producer.send("t", b"v", timestamp=moment).result(30).timestamp_us == expected
    stored = fake.records("t")[0].column("timestamp").cast("int64").to_pylist()
    assert stored == [expected]


@pytest.mark.parametrize(
    ("moment", "error"), [("2026-01-01", TypeError), (1.5, TypeError), (1 << 63, ValueError), (pd.NaT, ValueError)]
)
def test_a_wrong_timestamp_is_refused(fake: FakeCluster, moment: Any, error: type[Exception]) -> None:
    fake.create("t", partitions=1)
    with Producer(fake.bootstrap) as producer:
        with pytest.raises(error):
            producer.send("t", b"v", timestamp=moment)
        assert producer.send("t", b"v").result(30).offset == 0


def test_many_records_are_stored_once_and_in_order(fake: FakeCluster) -> None:
    fake.create("t", partitions=4)
    with Producer(fake.bootstrap, batch_bytes=20_000) as producer:
        futures = [producer.send("t", b"%d" % index, key=b"%d" % (index % 50)) for index in range(20_000)]
        producer.flush(20)
        assert all(future.done() for future in futures)
        places = [future.result() for future in futures]
    assert len(set(places)) == len(places)
    assert Counter(values(fake, "t")) == Counter(b"%d" % index for index in range(20_000))
    by_key: dict[bytes, list[int]] = {}
    for batch in fake.records("t"):
        for row in batch.to_pylist():
            by_key.setdefault(row["key"], []).append(int(row["value"]))
    assert all(found == sorted(found) for found in by_key.values())
    log = fake.topics["t"].logs[places[7].partition]
    header, body = next(
        entry for entry in log.batches if entry[0].base_offset <= places[7].offset < entry[0].next_offset
    )
    batch = pa.ipc.read_record_batch(pa.py_buffer(body), fake.records("t")[0].schema)
    assert batch.column("value")[places[7].offset - header.base_offset].as_py() == b"7"


@pytest.mark.parametrize(
    ("settings", "expected_mib"),
    [({}, 4), ({"buffer_bytes": 32 << 20}, 2), ({"buffer_bytes": 1 << 20}, 1), ({"batch_bytes": 3 << 20}, 3)],
)
def test_batches_of_a_table_have_the_configured_size(
    fake: FakeCluster, settings: dict[str, Any], expected_mib: int
) -> None:
    fake.create("t", partitions=1)
    table = pa.table({"value": pa.array([b"x" * 1000] * 12_583, pa.binary())})  # 12 MiB of values
    with Producer(fake.bootstrap, **settings) as producer:
        assert producer.write("t", table).result(30).record_count == table.num_rows
    lengths = [header.length for header, _ in fake.topics["t"].logs[0].batches]
    assert len(lengths) >= 12 // expected_mib
    assert max(lengths) == pytest.approx(expected_mib << 20, rel=0.1)


def test_a_table_write_returns_its_offset_ranges(fake: FakeCluster) -> None:
    fake.create("t", partitions=2, schema=TYPED, key=("carrier",))
    table = pa.table({"delay": [float(index) for index in range(1000)], "carrier": ["UA", "AA"] * 500})
    with Producer(fake.bootstrap, compression="zstd") as producer:
        result = producer.write("t", table).result(30)
        again = producer.write("t", table.slice(0, 10), partition=1).result(30)
    assert result.record_count == 1000
    assert sum(found.offsets.end - found.offsets.start for found in result.ranges) == 1000
    ends = {found.partition: found.offsets.end for found in result.ranges}
    assert again.ranges[0].offsets == OffsetRange(ends.get(1, 0), ends.get(1, 0) + 10)
    delays = sorted(value for batch in fake.records("t") for value in batch.column("delay").to_pylist())
    assert delays == sorted([*map(float, range(1000)), *map(float, range(10))])


def test_rows_of_typed_topics_are_stored(fake: FakeCluster) -> None:
    fake.create("t", schema=TYPED)
    with Producer(fake.bootstrap) as producer:
        assert producer.send("t", {"carrier": "UA", "delay": 1.5}).result(30).offset == 0
        assert producer.send("t", {"carrier": "AA"}).result(30).offset == 1
        with pytest.raises(BrokerError, match="speed"):
            producer.send("t", {"speed": 1})
        with pytest.raises(TypeError, match="expects"):
            producer.send("t", b"bytes")
        with pytest.raises(BrokerError, match="SCHEMA_MISMATCH"):
            producer.send("t", {"delay": "late"}).result(30)


def test_a_row_that_does_not_fit_fails_alone(fake: FakeCluster) -> None:
    fake.create("t", schema=TYPED)
    rows: list[dict[str, object]] = [{"delay": "late" if index in {3, 4} else float(index)} for index in range(10)]
    with Producer(fake.bootstrap) as producer:
        producer.send("t", {}).result(30)
        fake.fault(0, times(1, Produce, LoseAnswers(1)))  # the first record is delayed, so the others share a request
        futures = [producer.send("t", row) for row in [{}, *rows]][1:]
        assert [future.exception(10) is None for future in futures] == [index not in {3, 4} for index in range(10)]
        offsets = [future.result().offset for future in futures if future.exception() is None]
    delays = [value for batch in fake.records("t") for value in batch.column("delay").to_pylist()]
    assert [delays[offset] for offset in offsets] == [float(index) for index in range(10) if index not in {3, 4}]


def test_an_idle_producer_does_not_linger(fake: FakeCluster) -> None:
    fake.create("t")
    with Producer(fake.bootstrap, linger_ms=60_000) as producer:
        for index in range(5):
            assert producer.send("t", b"x").result(30).offset == index


class Late:
    """Responses to produce requests are delayed by ``delay_s``, which may change. A request is in flight until then."""

    def __init__(self, delay_s: float) -> None:
        self.delay_s = delay_s
        self.under_way = self.most = 0

    def __call__(self, broker: FakeBroker, connection: ServerConnection, request: Request) -> bool:
        if isinstance(request, Produce):
            reply = connection.reply
            self.under_way += 1
            self.most = max(self.most, self.under_way)

            def answer(message: Reply, body: Sequence[Any] = (), body_bytes: int = -1) -> None:
                connection.reply = reply  # type: ignore[method-assign]
                asyncio.get_running_loop().call_later(self.delay_s, late, message)

            def late(message: Reply) -> None:
                self.under_way -= 1
                reply(message)

            connection.reply = answer  # type: ignore[method-assign]
        return False


def send_for(producer: Producer, seconds: float) -> int:
    """Send a record every few milliseconds, and return their number."""
    until = time.monotonic() + seconds
    for count in itertools.count():
        if time.monotonic() >= until:
            return count
        producer.send("t", b"%d" % count)
        time.sleep(0.002)
    raise AssertionError


def test_a_second_request_follows_half_a_round_trip_later(fake: FakeCluster) -> None:
    fake.create("t")
    late = Late(0.1)
    fake.fault(0, late)
    with Producer(fake.bootstrap, linger_ms=60_000) as producer:
        producer.send("t", b"first").result(30)
        count = send_for(producer, 1.0)
        assert late.most >= 2
    assert values(fake, "t") == [b"first", *(b"%d" % number for number in range(count))]
    assert len(produce_requests(fake)) <= 25, "not one request for each record"


def test_records_wait_for_others_while_the_broker_is_silent(fake: FakeCluster) -> None:
    fake.create("t")
    late = Late(0.0)
    fake.fault(0, late)
    with Producer(fake.bootstrap, linger_ms=60_000) as producer:
        producer.send("t", b"first").result(30)
        late.delay_s = 1.5
        count = send_for(producer, 1.0)
    assert values(fake, "t") == [b"first", *(b"%d" % number for number in range(count))]
    assert len(fake.topics["t"].logs[0].batches) <= 20, "each waits half as long as the first request has taken so far"


def test_acks_0_and_1_are_supported(fake: FakeCluster) -> None:
    fake.create("t")
    with Producer(fake.bootstrap, acks=0) as producer:
        assert producer.send("t", b"a").result(30).offset == -1
    with Producer(fake.bootstrap, acks=1) as producer:
        assert producer.send("t", b"b").result(30).offset == 1
    assert values(fake, "t") == [b"a", b"b"]
    assert not any(isinstance(request, InitProducerId) for broker in fake.brokers for request in broker.requests)


def test_futures_work_with_callbacks_as_completed_and_asyncio(fake: FakeCluster) -> None:
    fake.create("t", partitions=2)
    with Producer(fake.bootstrap) as producer:
        futures = [producer.send("t", b"x") for _ in range(20)]
        done, left = concurrent.futures.wait(futures, timeout=60)
        assert (done, left) == (set(futures), set())
        assert len(list(concurrent.futures.as_completed([producer.send("t", b"y") for _ in range(20)], 10))) == 20
        told = threading.Event()
        future = producer.send("t", b"z")
        future.add_done_callback(lambda found: told.set() if found is future else None)
        assert told.wait(10)
        assert not future.cancel()

        async def wrapped() -> RecordMetadata:
            return await asyncio.wait_for(asyncio.wrap_future(producer.send("t", b"w")), 10)

        assert asyncio.run(wrapped()).topic == "t"


@pytest.mark.parametrize("error", [None, BrokerError(ErrorCode.MESSAGE_TOO_LARGE, "of a megabyte")])
def test_many_threads_wait_for_one_future_in_different_ways(error: BrokerError | None) -> None:
    metadata = TopicMetadata(0, "t", "id", schemas=(TopicSchema(0, schema_message(DEFAULT_SCHEMA)),))
    chunk = RecordChunk(ProducerTopic(metadata), 0, 0.0)
    chunk.records.append((None, b"v", None, 7))
    chunk.assign_batches([range(1)])
    future = RecordFuture(chunk, 0)
    with concurrent.futures.ThreadPoolExecutor(5) as pool:
        waits: list[Callable[[], object]] = [
            future.result,
            future.result,
            lambda: future.result(30),
            future.exception,
            future.result,
        ]
        found = [pool.submit(wait) for wait in waits]
        assert not concurrent.futures.wait(found, 0.05).done
        chunk.batch_done(0, BatchOutcome(0, 3, 1, error))
        seen = [one.exception(30) or one.result() for one in found]
    place = RecordMetadata("t", 0, 3, 7)
    assert seen == ([error] * 5 if error else [place, place, place, None, place])
    assert chunk.consume_failure() is None


def test_a_callback_may_send_records(fake: FakeCluster) -> None:
    fake.create("t")
    with Producer(fake.bootstrap, buffer_bytes=300) as producer:
        done = threading.Event()

        def again(_: object) -> None:
            producer.send("t", b"x" * 200).add_done_callback(lambda _: done.set())

        producer.send("t", b"x" * 200).add_done_callback(again)
        assert done.wait(10)


def test_values_of_other_types_are_refused(fake: FakeCluster) -> None:
    fake.create("t")
    array: Any = bytearray(b"b")
    with Producer(fake.bootstrap) as producer:
        for arguments in ({"value": 1}, {"value": b"", "key": 1.0}, {"headers": {"a": 1}}, {"headers": {1: b"a"}}):
            with pytest.raises(TypeError):
                producer.send("t", **arguments)
        assert producer.send("t", array).result(30).offset == 0
    assert values(fake, "t") == [b"b"]


@pytest.mark.parametrize(
    "arguments",
    [
        {"acks": 2},
        {"acks": "most"},
        {"compression": "gzip"},
        {"batch_bytes": 0},
        {"linger_ms": -1},
        {"buffer_bytes": 0},
    ],
)
def test_bad_arguments_are_named(arguments: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match=f"{next(iter(arguments))}="):
        Producer("localhost", **arguments)  # type: ignore[arg-type]


def test_bad_addresses_are_refused_before_anything_starts() -> None:
    with pytest.raises(ConfigError, match="bootstrap"):
        Producer("a:b:c")


def test_an_exception_in_the_block_is_raised(fake: FakeCluster) -> None:
    fake.create("t")
    with pytest.raises(RuntimeError, match="mine"), Producer(fake.bootstrap) as producer:
        producer.send("t", b"v")
        raise RuntimeError("mine")
    assert values(fake, "t") == [b"v"]


def test_a_permanent_metadata_refusal_is_reported(fake: FakeCluster) -> None:
    def refuse_all(broker: FakeBroker, connection: ServerConnection, request: Request) -> bool:
        connection.reply(ErrorReply(request.cid, ErrorCode.UNSUPPORTED_VERSION, "too old"))
        return True

    for broker in fake.brokers:
        fake.fault(broker.broker_id, times(1000, Metadata, refuse_all))
    with Producer(fake.bootstrap) as producer, pytest.raises(BrokerError, match="too old"):
        producer.send("t", b"v")
