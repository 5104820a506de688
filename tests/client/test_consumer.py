"""Tests of the consumer with real sockets: every offset once, in order, from its start position."""

from __future__ import annotations

import datetime as dt
import threading
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from sparklog.client.consumer.consumer import Consumer
from sparklog.client.consumer.origin import Origin, origin, with_origin
from sparklog.client.errors import ClientTimeout
from sparklog.client.producer.producer import Producer
from sparklog.errors import BrokerError, ConfigError
from sparklog.model import TopicPartition, TopicSchema
from sparklog.record.schema import schema_message
from tests.client.fake_cluster import FakeCluster
from tests.client.reading import TP, TYPED, add, drained, fill, numbers


def test_all_partitions_are_read_in_their_order(fake: FakeCluster) -> None:
    fill(fake, partitions=3)
    with Consumer(fake.bootstrap, "t") as consumer:
        assert sorted(consumer.assignment) == [TopicPartition("t", index) for index in range(3)]
        by_partition: dict[int, list[int]] = {}
        for batch in drained(consumer, 300):
            place = origin(batch)
            assert place.topic == "t"
            assert place.offset == batch.column("n")[0].as_py()
            by_partition.setdefault(place.partition, []).extend(batch.column("n").to_pylist())
        assert by_partition == {index: list(range(100)) for index in range(3)}
        assert set(consumer.positions().values()) == {100}
        assert consumer.poll(0) == []


def test_an_iteration_continues_as_records_arrive(fake: FakeCluster) -> None:
    fill(fake)
    with Consumer(fake.bootstrap, ["t"]) as consumer:
        seen: list[int] = []
        later = threading.Thread(target=lambda: add(fake, records=50))
        for batch in consumer:
            seen += batch.column("n").to_pylist()
            if len(seen) == 100:
                later.start()
            if len(seen) == 150:
                break
        later.join()
        assert seen == list(range(150))


def test_leaving_an_iteration_loses_no_record(fake: FakeCluster) -> None:
    fill(fake)
    with Consumer(fake.bootstrap, "t") as consumer:
        first = next(iter(consumer))
        assert consumer.position(TP) == first.num_rows
        assert numbers([first, *drained(consumer, 100 - first.num_rows)]) == list(range(100))


@pytest.mark.parametrize("start", [0, 1, 9, 10, 55, 99, 100])
def test_a_start_offset_cuts_the_first_batch(fake: FakeCluster, start: int) -> None:
    fill(fake)
    with Consumer(fake.bootstrap, [TP], start={TP: start}) as consumer:
        assert consumer.position(("t", 0)) == start
        found = drained(consumer, 100 - start)
        assert numbers(found) == list(range(start, 100))
        assert not found or origin(found[0]).offset == start


def test_a_start_at_latest_reads_only_new_records(fake: FakeCluster) -> None:
    fill(fake)
    with Consumer(fake.bootstrap, "t", start="latest") as consumer:
        assert consumer.poll(0.2) == []
        add(fake, records=10)
        assert numbers(drained(consumer, 10)) == list(range(100, 110))


def test_a_consumer_starts_at_a_time(fake: FakeCluster) -> None:
    fake.create("d")
    with Producer(fake.bootstrap) as producer:
        for second in range(5):
            producer.send("d", b"%d" % second, timestamp=second * 1_000_000).result(30)
    moment = dt.datetime.fromtimestamp(2.5, dt.timezone.utc)
    with Consumer(fake.bootstrap, "d", start=moment) as consumer:
        assert consumer.to_table().column("value").to_pylist() == [b"3", b"4"]
    with Producer(fake.bootstrap) as producer:
        times = pa.array([5, 9, 7, 1, 8], pa.timestamp("s", "UTC"))
        producer.write("d", pa.table({"value": [b"5", b"9", b"7", b"1", b"8"], "timestamp": times})).result(30)
    moment = dt.datetime.fromtimestamp(6, dt.timezone.utc)
    with Consumer(fake.bootstrap, "d", start=moment) as consumer:
        (batch,) = drained(consumer, 4)
        assert batch.column("value").to_pylist() == [b"9", b"7", b"1", b"8"], (
            "all records from the first one that is not older"
        )
        assert origin(batch).offset == 6
    late = dt.datetime.fromtimestamp(99, dt.timezone.utc)
    with Consumer(fake.bootstrap, "d", start=late) as consumer:
        assert consumer.position(("d", 0)) == 10


def test_seek_moves_a_position(fake: FakeCluster) -> None:
    fill(fake)
    with Consumer(fake.bootstrap, "t") as consumer:
        drained(consumer, 100)
        consumer.seek(TP, 95)
        assert numbers(drained(consumer, 5)) == [95, 96, 97, 98, 99]
        consumer.seek(TP, "earliest")
        assert numbers(drained(consumer, 100)) == list(range(100))
        consumer.seek(TP, "latest")
        assert consumer.position(TP) == 100
        with pytest.raises(KeyError, match="t-5 is not assigned"):
            consumer.seek(("t", 5), 0)
        with pytest.raises(ValueError, match="-1"):
            consumer.seek(TP, -1)


_NO_OFFSETS: list[tuple[Any, type[Exception], str]] = [
    (1.5, TypeError, r"t-0: 1\.5 \(float\) found"),
    (True, TypeError, r"t-0: True \(bool\) found"),
    (None, TypeError, r"t-0: None \(NoneType\) found"),
    ("5", ValueError, "t-0: '5' found"),
    (-1, ValueError, "t-0: offset -1: expected 0 or more"),
    (1 << 63, ValueError, f"t-0: offset {1 << 63}: expected at most"),
]


@pytest.mark.parametrize(("offset", "error", "message"), _NO_OFFSETS)
def test_seek_refuses_a_wrong_offset_and_stays(
    fake: FakeCluster, offset: Any, error: type[Exception], message: str
) -> None:
    fill(fake)
    with Consumer(fake.bootstrap, "t") as consumer:
        drained(consumer, 10)
        position = consumer.position(TP)
        with pytest.raises(error, match=message):
            consumer.seek(TP, offset)
        assert consumer.position(TP) == position


@pytest.mark.parametrize(("offset", "error", "message"), _NO_OFFSETS)
def test_a_consumer_refuses_to_start_at_a_wrong_offset(
    fake: FakeCluster, offset: Any, error: type[Exception], message: str
) -> None:
    fill(fake)
    with pytest.raises(error, match=message):
        Consumer(fake.bootstrap, "t", start={TP: offset})


def test_only_seek_accepts_the_named_positions(fake: FakeCluster) -> None:
    fill(fake)
    with (
        Consumer(fake.bootstrap, "t") as consumer,
        pytest.raises(ValueError, match="an offset, 'earliest' or 'latest'"),
    ):
        consumer.seek(TP, "first")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"'first' found; expected an offset$"):
        Consumer(fake.bootstrap, "t", start={TP: "first"})  # type: ignore[dict-item]


def test_an_offset_may_have_any_integer_type(fake: FakeCluster) -> None:
    fill(fake)
    with Consumer(fake.bootstrap, "t", start={TP: np.uint16(7)}) as consumer:
        assert consumer.position(TP) == 7
        consumer.seek(TP, np.int64(95))
        assert numbers(drained(consumer, 5)) == [95, 96, 97, 98, 99]


def test_a_table_ends_at_the_end_offsets(fake: FakeCluster) -> None:
    fill(fake, partitions=2)
    with Consumer(fake.bootstrap, "t", log_columns=True) as consumer:
        table = consumer.to_table()
        assert table.schema.names == ["n", "_topic", "_partition", "_offset"]
        assert table.num_rows == 200
        assert table.column("_offset").to_pylist() == table.column("n").to_pylist()
        assert set(table.column("_partition").to_pylist()) == {0, 1}
        assert consumer.to_table().num_rows == 0


def test_a_table_with_end_offsets_leaves_the_rest(fake: FakeCluster) -> None:
    fill(fake, partitions=2)
    with Consumer(fake.bootstrap, "t") as consumer:
        assert sorted(consumer.to_table({TP: 37}).column("n").to_pylist()) == list(range(37))
        assert consumer.position(TP) == 37
        assert consumer.to_table({TP: 37}).num_rows == 0
        rest = consumer.to_table()
        assert rest.num_rows == 163
        assert sorted(consumer.positions().values()) == [100, 100]


def test_an_impossible_table_moves_no_position(fake: FakeCluster) -> None:
    fill(fake)
    with Consumer(fake.bootstrap, "t") as consumer:
        with pytest.raises(ClientTimeout, match="t-0 at 100 of 200"):
            consumer.to_table({TP: 200}, timeout_s=0.3)
        assert consumer.position(TP) == 0
        assert consumer.to_table().num_rows == 100


def test_a_consumer_reads_chosen_columns(fake: FakeCluster) -> None:
    fake.create("t", schema=pa.schema([("n", pa.int64()), ("s", pa.string())]))
    with Producer(fake.bootstrap) as producer:
        producer.write("t", pa.table({"n": [1], "s": ["x"]}))
    with Consumer(fake.bootstrap, "t", columns=["s"]) as consumer:
        assert consumer.to_table().to_pylist() == [{"s": "x"}]
    with pytest.raises(BrokerError, match=r"\['x'\] not found"):
        Consumer(fake.bootstrap, "t", columns=["x"])


def test_records_of_older_schemas_get_nulls(fake: FakeCluster) -> None:
    topic = fake.create("t", schema=TYPED)
    add(fake, records=10)
    with Consumer(fake.bootstrap, "t") as consumer:
        longer = TYPED.append(pa.field("more", pa.string()))
        fake.do(lambda: topic.schemas.append(TopicSchema(1, schema_message(longer))))
        with Producer(fake.bootstrap) as producer:
            producer.write("t", pa.table({"n": [10], "more": ["x"]}))
        batches = drained(consumer, 11)
        assert {tuple(batch.schema.names) for batch in batches} == {("n",), ("n", "more")}
        consumer.seek(TP, 0)
        assert consumer.to_table().slice(9).to_pylist() == [{"n": 9, "more": None}, {"n": 10, "more": "x"}]


def test_small_responses_return_all_records(fake: FakeCluster) -> None:
    fill(fake, partitions=4)
    with Consumer(fake.bootstrap, "t", max_bytes=1) as consumer:
        assert sorted(numbers(drained(consumer, 400))) == sorted(list(range(100)) * 4)


@pytest.mark.parametrize(
    ("topics", "arguments", "error"),
    [
        ([], {}, ConfigError),
        ("t", {"start": "middle"}, ConfigError),
        ("t", {"on_out_of_range": "skip"}, ConfigError),
        ("t", {"start": {TopicPartition("t", 9): 1}}, ConfigError),
        ("none", {}, BrokerError),
        ([TopicPartition("t", 9)], {}, BrokerError),
    ],
)
def test_bad_arguments_are_refused(
    fake: FakeCluster, topics: object, arguments: dict[str, object], error: type
) -> None:
    fill(fake, records=10)
    with pytest.raises(error):
        Consumer(fake.bootstrap, topics, **arguments)  # type: ignore[arg-type]


def test_records_have_their_partition_and_offset() -> None:
    batch = pa.record_batch([pa.array([1, 2])], names=["n"])
    place = Origin("a,b", 3, 2**40, 7)
    assert origin(with_origin(batch, place).slice(1)) == place
    with pytest.raises(ValueError, match="no origin"):
        origin(batch)


def test_a_poll_returns_at_most_max_records(fake: FakeCluster) -> None:
    fill(fake, partitions=2)
    with Consumer(fake.bootstrap, "t", max_records=7) as consumer:
        rows: list[int] = []
        seen: list[int] = []
        while len(seen) < 200:
            batches = consumer.poll(5.0)
            rows.append(sum(batch.num_rows for batch in batches))
            seen += numbers(batches)
            assert sum(consumer.positions().values()) == len(seen)
        assert max(rows) == 7
        assert sorted(seen) == sorted([*range(100), *range(100)])
    with Consumer(fake.bootstrap, "t", max_records=7) as consumer:
        assert next(iter(consumer)).num_rows <= 7
    with pytest.raises(ConfigError, match="max_records=0"):
        Consumer(fake.bootstrap, "t", max_records=0)


def test_a_paused_partition_keeps_its_position(fake: FakeCluster) -> None:
    fill(fake, partitions=2)
    first, second = TopicPartition("t", 0), TopicPartition("t", 1)
    with Consumer(fake.bootstrap, "t", max_records=5) as consumer:
        consumer.poll(5.0)
        at = consumer.position(first)
        consumer.pause([first])
        assert consumer.paused == [first]
        while consumer.position(second) < 100:
            assert all(origin(batch).partition == 1 for batch in consumer.poll(5.0))
        assert consumer.poll(0.1) == []
        assert consumer.position(first) == at
        consumer.resume([first])
        found: list[pa.RecordBatch] = []
        while consumer.position(first) < 100:
            found += consumer.poll(5.0)
        assert numbers(found) == list(range(at, 100))
        with pytest.raises(KeyError, match="t-5 is not assigned"):
            consumer.pause([("t", 5)])


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ({"pattern": "a.*"}, "need a group"),
        ({"topics": "t", "auto_commit_interval_ms": 5}, "need a group"),
        ({"topics": [TP], "group": "g"}, "name no partitions"),
        ({"topics": "t", "group": "g", "start": {TP: 5}}, "name no partitions"),
        ({"group": "g"}, "a consumer needs a topic"),
    ],
)
def test_a_group_restricts_the_options(fake: FakeCluster, arguments: dict[str, Any], expected: str) -> None:
    with pytest.raises(ConfigError, match=expected):
        Consumer(fake.bootstrap, **arguments)


def test_commits_need_a_group(fake: FakeCluster) -> None:
    fill(fake)
    with Consumer(fake.bootstrap, "t") as consumer:
        with pytest.raises(ConfigError, match="no group"):
            consumer.commit()
        assert (consumer.member_id, consumer.member_epoch) == ("", 0)


def test_the_next_fetch_starts_before_its_batch_is_consumed(fake: FakeCluster) -> None:
    fake.create("t")
    with Producer(fake.bootstrap) as producer:
        for index in range(3):
            producer.send("t", b"%d" % index * 1000).result(30)
    with Consumer(fake.bootstrap, "t", max_bytes=1) as consumer:
        under_way = []
        for _ in range(3):
            assert [batch.num_rows for batch in consumer.poll(30)] == [1]
            under_way.append(len(consumer._fetcher._in_flight))
    assert under_way == [1, 1, 0]
    large = pa.table({"value": [b"x" * 300_000]})
    with Producer(fake.bootstrap) as producer, Consumer(fake.bootstrap, "t", start="latest") as consumer:
        producer.write("t", large).result(30)
        assert len(consumer.poll(30)) == 1
        assert len(consumer._fetcher._in_flight) == 1, "the use of the batches takes some time"
