"""Consumer and bounded reader against real sockets: every offset once, in order, whatever leaders do."""

from __future__ import annotations

import datetime as dt
import threading
import time

import numpy as np
import pyarrow as pa
import pytest

from sparklog.client.consumer import Consumer
from sparklog.client.errors import ClientTimeout, LogTruncated
from sparklog.client.fetched import decode_partition, split_partitions
from sparklog.client.link import ClusterLink
from sparklog.client.origin import Origin, origin, with_origin
from sparklog.client.producer import Producer
from sparklog.client.reader import PartitionReader
from sparklog.errors import BrokerError, ConfigError, ErrorCode
from sparklog.model import TopicPartition, TopicSchema
from sparklog.net.server import ServerConnection
from sparklog.protocol.messages import Fetch, FetchedPartition, FetchReply, Request
from sparklog.record.checksum import crc32c
from sparklog.record.codec import encode_batch
from sparklog.record.header import BatchHeader, Flag
from sparklog.record.schema import DEFAULT_SCHEMA, schema_message
from tests.client.fake_cluster import FakeBroker, FakeCluster, Fault

TYPED = pa.schema([("n", pa.int64())])
TP = TopicPartition("t", 0)


def fill(fake: FakeCluster, topic: str = "t", *, records: int = 100, partitions: int = 1, batch: int = 10) -> None:
    """``records`` numbered records in each partition, in batches."""
    if topic not in fake.topics:
        fake.create(topic, partitions=partitions, schema=TYPED)
    add(fake, topic, records=records, partitions=partitions, batch=batch)


def add(fake: FakeCluster, topic: str = "t", *, records: int, partitions: int = 1, batch: int = 10) -> None:
    with Producer(fake.bootstrap) as producer:
        for partition in range(partitions):
            first = fake.topics[topic].logs[partition].end
            for at in range(first, first + records, batch):
                producer.write(topic, pa.table({"n": range(at, at + batch)}), partition=partition)


def numbers(batches: list[pa.RecordBatch]) -> list[int]:
    return [value for batch in batches for value in batch.column("n").to_pylist()]


def drained(consumer: Consumer, count: int) -> list[pa.RecordBatch]:
    found: list[pa.RecordBatch] = []
    deadline = time.monotonic() + 15
    while sum(batch.num_rows for batch in found) < count:
        assert time.monotonic() < deadline, f"{found} after 15 s"
        found += consumer.poll(1.0)
    return found


def refuse(code: ErrorCode, count: int) -> Fault:
    left = count

    def fault(broker: FakeBroker, connection: ServerConnection, request: Request) -> bool:
        nonlocal left
        if not isinstance(request, Fetch) or not left:
            return False
        left -= 1
        answers = tuple(
            FetchedPartition(part.topic, part.partition, int(code), -1, -1, -1, -1, detail="on purpose")
            for part in request.partitions
        )
        connection.reply(FetchReply(request.cid, 0, 0, answers))
        return True

    return fault


# --- consumer ---


def test_everything_from_all_partitions_in_their_order(fake: FakeCluster) -> None:
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


def test_iterating_goes_on_as_records_come(fake: FakeCluster) -> None:
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


def test_leaving_an_iteration_loses_nothing(fake: FakeCluster) -> None:
    fill(fake)
    with Consumer(fake.bootstrap, "t") as consumer:
        first = next(iter(consumer))
        assert consumer.position(TP) == first.num_rows
        assert numbers([first, *drained(consumer, 100 - first.num_rows)]) == list(range(100))


@pytest.mark.parametrize("start", [0, 1, 9, 10, 55, 99, 100])
def test_offsets_to_start_from_cut_the_first_batch(fake: FakeCluster, start: int) -> None:
    fill(fake)
    with Consumer(fake.bootstrap, [TP], start={TP: start}) as consumer:
        assert consumer.position(("t", 0)) == start
        found = drained(consumer, 100 - start)
        assert numbers(found) == list(range(start, 100))
        assert not found or origin(found[0]).offset == start


def test_latest_sees_only_what_comes(fake: FakeCluster) -> None:
    fill(fake)
    with Consumer(fake.bootstrap, "t", start="latest") as consumer:
        assert consumer.poll(0.2) == []
        add(fake, records=10)
        assert numbers(drained(consumer, 10)) == list(range(100, 110))


def test_a_time_to_start_from(fake: FakeCluster) -> None:
    fake.create("d")
    with Producer(fake.bootstrap) as producer:
        for second in range(5):
            producer.send("d", b"%d" % second, timestamp=second * 1_000_000).result(10)
    moment = dt.datetime.fromtimestamp(2.5, dt.timezone.utc)
    with Consumer(fake.bootstrap, "d", start=moment) as consumer:
        assert consumer.to_table().column("value").to_pylist() == [b"3", b"4"]
    with Producer(fake.bootstrap) as producer:
        times = pa.array([5, 9, 7, 1, 8], pa.timestamp("s", "UTC"))
        producer.write("d", pa.table({"value": [b"5", b"9", b"7", b"1", b"8"], "timestamp": times})).result(10)
    moment = dt.datetime.fromtimestamp(6, dt.timezone.utc)
    with Consumer(fake.bootstrap, "d", start=moment) as consumer:
        (batch,) = drained(consumer, 4)
        assert batch.column("value").to_pylist() == [b"9", b"7", b"1", b"8"], "all from the first that is new enough"
        assert origin(batch).offset == 6
    late = dt.datetime.fromtimestamp(99, dt.timezone.utc)
    with Consumer(fake.bootstrap, "d", start=late) as consumer:
        assert consumer.position(("d", 0)) == 10


def test_seek(fake: FakeCluster) -> None:
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


def test_a_table_up_to_the_ends(fake: FakeCluster) -> None:
    fill(fake, partitions=2)
    with Consumer(fake.bootstrap, "t", log_columns=True) as consumer:
        table = consumer.to_table()
        assert table.schema.names == ["n", "_topic", "_partition", "_offset"]
        assert table.num_rows == 200
        assert table.column("_offset").to_pylist() == table.column("n").to_pylist()
        assert set(table.column("_partition").to_pylist()) == {0, 1}
        assert consumer.to_table().num_rows == 0


def test_a_table_up_to_given_offsets_leaves_the_rest(fake: FakeCluster) -> None:
    fill(fake, partitions=2)
    with Consumer(fake.bootstrap, "t") as consumer:
        assert sorted(consumer.to_table({TP: 37}).column("n").to_pylist()) == list(range(37))
        assert consumer.position(TP) == 37
        assert consumer.to_table({TP: 37}).num_rows == 0
        rest = consumer.to_table()
        assert rest.num_rows == 163
        assert sorted(consumer.positions().values()) == [100, 100]


def test_a_table_that_cannot_be_had_moves_no_position(fake: FakeCluster) -> None:
    fill(fake)
    with Consumer(fake.bootstrap, "t") as consumer:
        with pytest.raises(ClientTimeout, match="t-0 at 100 of 200"):
            consumer.to_table({TP: 200}, timeout_s=0.3)
        assert consumer.position(TP) == 0
        assert consumer.to_table().num_rows == 100


def test_columns_are_chosen(fake: FakeCluster) -> None:
    fake.create("t", schema=pa.schema([("n", pa.int64()), ("s", pa.string())]))
    with Producer(fake.bootstrap) as producer:
        producer.write("t", pa.table({"n": [1], "s": ["x"]}))
    with Consumer(fake.bootstrap, "t", columns=["s"]) as consumer:
        assert consumer.to_table().to_pylist() == [{"s": "x"}]
    with pytest.raises(BrokerError, match=r"\['x'\] are not among"):
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


def test_small_answers_still_bring_everything(fake: FakeCluster) -> None:
    fill(fake, partitions=4)
    with Consumer(fake.bootstrap, "t", max_bytes=1) as consumer:
        assert sorted(numbers(drained(consumer, 400))) == sorted(list(range(100)) * 4)


@pytest.mark.parametrize(
    "code",
    [
        ErrorCode.NOT_LEADER_OR_FOLLOWER,
        ErrorCode.OFFSET_NOT_AVAILABLE,
        ErrorCode.FENCED_LEADER_EPOCH,
        ErrorCode.UNKNOWN_LEADER_EPOCH,
    ],
)
def test_what_is_retriable_is_retried(fake: FakeCluster, code: ErrorCode) -> None:
    fill(fake)
    fake.fault(0, refuse(code, 3))
    with Consumer(fake.bootstrap, "t") as consumer:
        assert numbers(drained(consumer, 100)) == list(range(100))


def test_leaders_move_die_and_return(fake: FakeCluster) -> None:
    fill(fake, partitions=2)
    with Consumer(fake.bootstrap, "t") as consumer:
        drained(consumer, 200)
        fake.move(TP, 1)
        add(fake, records=10, partitions=2)
        drained(consumer, 20)
        fake.stop(0)
        add(fake, records=10, partitions=2)
        drained(consumer, 20)
        fake.stop(1)
        fake.start(0)
        fake.start(1)
        fake.move(TP, 0)
        add(fake, records=10, partitions=2)
        found = drained(consumer, 20)
        assert sorted(numbers(found)) == sorted([*range(120, 130)] * 2)


def test_a_leader_that_hangs_is_left_when_another_is_elected(fake: FakeCluster) -> None:
    fill(fake)
    with Consumer(fake.bootstrap, "t") as consumer:
        drained(consumer, 100)
        fake.fault(0, lambda broker, connection, request: isinstance(request, Fetch))
        consumer.poll(1.0)
        fake.move(TP, 1)
        add(fake, records=10)
        assert numbers(drained(consumer, 10)) == list(range(100, 110))


def test_a_slow_reader_is_no_silent_leader(fake: FakeCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sparklog.client.fetching._SUSPECT_AFTER_S", 0.05)
    fill(fake, records=1000)
    with Consumer(fake.bootstrap, "t", max_bytes=1, timeout_s=0.5) as consumer:
        found = []
        for _ in range(10):
            found += consumer.poll(1.0)
            time.sleep(0.15)  # the next answer lies in the socket meanwhile
        assert numbers(found) == list(range(len(found) * 10))
    fetches = [request for broker in fake.brokers for request in broker.requests if isinstance(request, Fetch)]
    assert len(fetches) <= 12, "no answer was thrown away"


def test_an_offset_out_of_range(fake: FakeCluster) -> None:
    fill(fake)
    with Consumer(fake.bootstrap, "t", start={TP: 500}) as consumer:
        with pytest.raises(BrokerError, match=r"t-0 at offset 500: 500 not in \[0, 100\]") as caught:
            consumer.poll(5.0)
        assert caught.value.code == ErrorCode.OFFSET_OUT_OF_RANGE
        assert consumer.position(TP) == 500
    with Consumer(fake.bootstrap, "t", start={TP: 500}, on_out_of_range="earliest") as consumer:
        assert numbers(drained(consumer, 100)) == list(range(100))
    with Consumer(fake.bootstrap, "t", start={TP: 500}, on_out_of_range="latest") as consumer:
        assert consumer.poll(0.2) == []
        assert consumer.position(TP) == 100


def test_a_table_from_beyond_the_end_is_out_of_range(fake: FakeCluster) -> None:
    fill(fake)
    with Consumer(fake.bootstrap, "t", start={TP: 101}) as consumer:
        with pytest.raises(BrokerError, match="OFFSET_OUT_OF_RANGE: t-0: position 101 found, the log ends at 100"):
            consumer.to_table()
        consumer.seek(TP, 100)
        assert consumer.to_table().num_rows == 0
    with Consumer(fake.bootstrap, "t", start={TP: 101}, on_out_of_range="earliest") as consumer:
        assert consumer.to_table().num_rows == 100


def test_a_log_cut_under_its_reader_is_told(fake: FakeCluster) -> None:
    """Each fetch names the epoch of the last record read, so that a leader without that record can say so."""
    fill(fake, records=50)
    fake.do(lambda: setattr(fake.topics["t"].logs[0], "epoch", 3))
    add(fake, records=50)
    asked: list[tuple[int, int]] = []

    def cut(broker: FakeBroker, connection: ServerConnection, request: Request) -> bool:
        if not isinstance(request, Fetch):
            return False
        (part,) = request.partitions
        asked.append((part.fetch_offset, part.last_epoch))
        if part.last_epoch != 3:
            return False
        answer = FetchedPartition("t", 0, 0, 50, 50, 0, 50, diverging=(1, 40))
        connection.reply(FetchReply(request.cid, 0, 0, (answer,)))
        return True

    fake.fault(0, cut)
    with Consumer(fake.bootstrap, "t") as consumer:
        drained(consumer, 100)
        for _ in range(2):
            with pytest.raises(LogTruncated, match="read up to offset 100, the log has its records up to 40") as caught:
                drained(consumer, 1)
            assert caught.value.code == ErrorCode.OFFSET_OUT_OF_RANGE
        assert consumer.position(TP) == 100
        consumer.seek(TP, caught.value.offset)
        assert numbers(drained(consumer, 60)) == list(range(40, 100))
    assert set(asked) >= {(0, -1), (100, 3), (40, -1)}
    with Consumer(fake.bootstrap, "t", on_out_of_range="latest") as consumer:
        assert numbers(drained(consumer, 160)) == [*range(100), *range(40, 100)]


def test_a_corrupt_batch_raises_and_is_not_passed_over(fake: FakeCluster) -> None:
    fill(fake)
    log = fake.topics["t"].logs[0]

    def corrupt() -> None:
        header, body = log.batches[5]
        log.batches[5] = (header, body[:-8] + b"\xff" * 8)

    fake.do(corrupt)
    with Consumer(fake.bootstrap, "t") as consumer:
        with pytest.raises(BrokerError, match="t-0 at offset 50") as caught:
            drained(consumer, 100)
        assert caught.value.code == ErrorCode.CORRUPT_MESSAGE
        with pytest.raises(BrokerError, match="t-0 at offset 50"):
            drained(consumer, 100)


def test_a_recreated_topic_is_not_taken_for_the_old_one(fake: FakeCluster) -> None:
    fill(fake)
    with Consumer(fake.bootstrap, "t") as consumer:
        drained(consumer, 100)
        fake.create("t", schema=TYPED)
        with pytest.raises(BrokerError) as caught:
            drained(consumer, 1)
        assert caught.value.code == ErrorCode.INCONSISTENT_TOPIC_ID


def test_a_deleted_topic_is_told(fake: FakeCluster) -> None:
    fill(fake)
    with Consumer(fake.bootstrap, "t") as consumer:
        drained(consumer, 100)
        fake.do(lambda: fake.topics.pop("t"))
        with pytest.raises(BrokerError) as caught:
            drained(consumer, 1)
        assert caught.value.code == ErrorCode.UNKNOWN_TOPIC_OR_PARTITION


def test_nobody_there(fake: FakeCluster) -> None:
    fill(fake)
    with Consumer(fake.bootstrap, "t", timeout_s=1.0) as consumer:
        drained(consumer, 100)
        fake.stop(0)
        fake.stop(1)
        with pytest.raises(ClientTimeout, match="t-0 at offset 100: not possible for 1 s"):
            drained(consumer, 1)


def test_added_partitions_are_read_from_their_start(fake: FakeCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sparklog.client.consumer._METADATA_MAX_AGE_S", 0.05)
    fill(fake, records=10)
    with Consumer(fake.bootstrap, "t", start="latest") as consumer:
        log_type = type(fake.topics["t"].logs[0])
        fake.do(lambda: fake.topics["t"].logs.append(log_type()))
        with Producer(fake.bootstrap) as producer:
            producer.write("t", pa.table({"n": [7]}), partition=1)
        assert numbers(drained(consumer, 1)) == [7]


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
def test_bad_arguments(fake: FakeCluster, topics: object, arguments: dict[str, object], error: type) -> None:
    fill(fake, records=10)
    with pytest.raises(error):
        Consumer(fake.bootstrap, topics, **arguments)  # type: ignore[arg-type]


def test_origins() -> None:
    batch = pa.record_batch([pa.array([1, 2])], names=["n"])
    place = Origin("a,b", 3, 2**40, 7)
    assert origin(with_origin(batch, place).slice(1)) == place
    with pytest.raises(ValueError, match="no origin"):
        origin(batch)


# --- reader ---


@pytest.mark.parametrize(("start", "end"), [(0, 100), (5, 95), (10, 20), (15, 16), (0, 0), (99, 100)])
def test_a_range_is_read_exactly(fake: FakeCluster, start: int, end: int) -> None:
    fill(fake)
    with PartitionReader(fake.bootstrap, TP, start, end, max_bytes=1) as reader:
        found = list(reader.fetched())
    assert numbers([one.batch for one in found]) == list(range(start, end))
    assert [one.first_offset for one in found] == [one.batch.column("n")[0].as_py() for one in found]


def test_a_range_survives_its_leaders(fake: FakeCluster) -> None:
    fill(fake)
    fake.fault(0, refuse(ErrorCode.NOT_LEADER_OR_FOLLOWER, 2))
    with PartitionReader(fake.bootstrap, TP, 0, 100, max_bytes=1, columns=["n"]) as reader:
        seen: list[int] = []
        for count, (header, batch) in enumerate(reader):
            assert isinstance(header, BatchHeader)
            seen += batch.column("n").to_pylist()
            if count == 2:
                fake.move(TP, 1)
            if count == 5:
                fake.stop(0)
        assert seen == list(range(100))


def test_a_range_cut_while_it_is_read_raises(fake: FakeCluster) -> None:
    fill(fake)

    def cut(broker: FakeBroker, connection: ServerConnection, request: Request) -> bool:
        if not isinstance(request, Fetch) or request.partitions[0].last_epoch < 0:
            return False
        answer = FetchedPartition("t", 0, 0, 100, 100, 0, 100, diverging=(-1, 0))
        connection.reply(FetchReply(request.cid, 0, 0, (answer,)))
        return True

    fake.fault(0, cut)
    with (
        PartitionReader(fake.bootstrap, TP, 0, 100, max_bytes=1) as reader,
        pytest.raises(LogTruncated, match="read up to offset 10, the log has its records up to 0 only"),
    ):
        list(reader)


def test_two_readers_may_share_a_link(fake: FakeCluster) -> None:
    fill(fake, partitions=2)
    with ClusterLink(fake.bootstrap) as link:
        for partition in range(2):
            with PartitionReader(link, TopicPartition("t", partition), 0, 100) as reader:
                assert numbers([batch for _, batch in reader]) == list(range(100))


@pytest.mark.parametrize(
    ("tp", "start", "end", "error"),
    [
        (TP, 90, 110, r"offsets \[90, 110\): stood at 100 for 0.7 s"),
        (TP, 200, 210, "OFFSET_OUT_OF_RANGE"),
        (TopicPartition("t", 3), 0, 1, "partition t-3: topic 't' has 1 partitions"),
        (TopicPartition("u", 0), 0, 1, "UNKNOWN_TOPIC_OR_PARTITION"),
    ],
)
def test_a_range_that_is_not_there_raises(
    fake: FakeCluster, tp: TopicPartition, start: int, end: int, error: str
) -> None:
    fill(fake)
    reader = PartitionReader(fake.bootstrap, tp, start, end, timeout_s=0.7)
    with reader, pytest.raises((BrokerError, ClientTimeout), match=error):
        list(reader)


def test_a_range_of_an_older_topic_of_the_name_raises(fake: FakeCluster) -> None:
    fill(fake)
    reader = PartitionReader(fake.bootstrap, TP, 0, 10, topic_id="other")
    with reader, pytest.raises(BrokerError, match="id1 found, other expected"):
        list(reader)


def test_a_topic_made_anew_in_the_middle_raises(fake: FakeCluster) -> None:
    fill(fake)
    with PartitionReader(fake.bootstrap, TP, 0, 100, max_bytes=1) as reader:
        ranges = iter(reader)
        next(ranges)
        fake.create("t", schema=TYPED)
        fill(fake)
        with pytest.raises(BrokerError, match="INCONSISTENT_TOPIC_ID"):
            list(ranges)


# --- decoding ---


def batch_at(base: int, count: int, **header: int) -> tuple[BatchHeader, bytes]:
    table = pa.record_batch({"n": pa.array(range(base, base + count), pa.int64())})
    encoded = encode_batch(table, schema_id=0, compression=None, event_time=None)
    return encoded.header._replace(base_offset=base, **header), bytes(encoded.body)


def answer(batches: list[tuple[BatchHeader, bytes]]) -> tuple[FetchedPartition, memoryview]:
    bodies = b"".join(body for _, body in batches)
    head = FetchedPartition("t", 0, 0, 99, 99, 0, 99, len(batches), len(bodies))
    return head, memoryview(b"".join(header.pack() for header, _ in batches) + bodies)


def test_control_batches_are_left_out_and_positions_pass_them() -> None:
    head, body = answer([batch_at(0, 5), batch_at(5, 1, flags=int(Flag.CONTROL)), batch_at(6, 2)])
    (part,) = split_partitions([head], body)
    assert numbers([one.batch for one in decode_partition(part, lambda _: TYPED, start=2)]) == [2, 3, 4, 6, 7]
    assert part.next_offset == 8


def test_cleaned_batches_tell_their_offsets() -> None:
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


@pytest.mark.parametrize("change", [-1, 1, 96])
def test_lengths_that_do_not_add_up_are_corrupt(change: int) -> None:
    head, body = answer([batch_at(0, 5)])
    content = bytes(body)[:change] if change < 0 else bytes(body) + bytes(change)
    with pytest.raises(BrokerError, match="CORRUPT_MESSAGE"):
        list(split_partitions([head], memoryview(content)))


def test_a_default_topic_reads_as_kafkas_columns(fake: FakeCluster) -> None:
    fake.create("d")
    with Producer(fake.bootstrap) as producer:
        producer.send("d", b"v", key=b"k", timestamp=7)
    with Consumer(fake.bootstrap, "d") as consumer:
        table = consumer.to_table()
    assert table.schema.equals(DEFAULT_SCHEMA)
    assert table.to_pylist()[0]["timestamp"] == dt.datetime.fromtimestamp(7e-6, dt.timezone.utc)
