"""Produce, Fetch and ListOffsets calls that real clients rarely send: limits, leader epochs, ids and broken batches."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from itertools import count
from typing import Any

import pytest

from sparklog.errors import ErrorCode
from sparklog.kafka.records.batch_view import read_batches
from sparklog.kafka.wire import ApiKey
from sparklog.kafka.wire.data import (
    FetchPartition,
    FetchRequest,
    FetchResponse,
    FetchTopic,
    ListOffsetsPartition,
    ListOffsetsPartitionResponse,
    ListOffsetsRequest,
    ListOffsetsTopic,
    OffsetForLeaderEpochRequest,
    OffsetForLeaderPartition,
    OffsetForLeaderTopic,
    PartitionData,
    PartitionProduceData,
    PartitionProduceResponse,
    ProduceRequest,
    TopicProduceData,
)
from sparklog.kafka.wire.transactions import InitProducerIdRequest
from sparklog.model import TopicPartition
from sparklog.record.checksum import crc32c
from sparklog.testing.final_logs import metadata_of
from sparklog.testing.process_cluster import ProcessCluster
from sparklog.testing.settled_admin import SettledAdmin
from tests.integration.kafka_calls import KafkaCalls
from tests.kafka.records.batches import produced
from tests.kafka.records.reference import Record, read_batch, write_batch
from tests.waiting import wait_until

pytestmark = pytest.mark.integration

TIME_MS = 1_700_000_000_000
LATEST, EARLIEST, GREATEST_TIME, EARLIEST_LOCAL, LATEST_TIERED = -1, -2, -3, -4, -5
_numbers = count()


@pytest.fixture(scope="module")
def cluster() -> Iterator[ProcessCluster]:
    with ProcessCluster(2, kafka=True) as running:
        yield running


class Leader:
    """A connection to the leader of the only partition of one topic."""

    def __init__(self, cluster: ProcessCluster, **config: str) -> None:
        self.topic = f"calls-{next(_numbers)}"
        with SettledAdmin(cluster.bootstrap) as admin:
            settings = {key.replace("_", "."): value for key, value in config.items()}
            admin.create_topic(self.topic, partitions=1, replication_factor=2, config=settings)
            self.topic_id = bytes.fromhex(admin.describe_topic(self.topic).topic_id)
        partition = metadata_of(cluster, self.topic)[0]
        self.leader, self.epoch = partition.leader, partition.leader_epoch
        self.calls = KafkaCalls(cluster.slots[self.leader].kafka_address)
        self.other = KafkaCalls(cluster.slots[1 - self.leader].kafka_address)

    def close(self) -> None:
        for connection in (self.calls, self.other):
            connection.__exit__(None, None, None)

    def produce(
        self, records: bytes | None, *, version: int = 9, acks: int = -1, name: str | None = None, calls: Any = None
    ) -> PartitionProduceResponse:
        topic = TopicProduceData(
            name=self.topic if name is None else name,
            topic_id=self.topic_id,
            partition_data=[PartitionProduceData(index=0, records=records)],
        )
        request = ProduceRequest(acks=acks, timeout_ms=30_000, topic_data=[topic])
        response = (calls or self.calls).ask(ApiKey.PRODUCE, version, request)
        found: PartitionProduceResponse = response.responses[0].partition_responses[0]
        return found

    def write(self, *values: str, times: tuple[int, ...] = (), **changes: Any) -> PartitionProduceResponse:
        records = [
            Record(b"key", value.encode(), (), TIME_MS if not times else times[at]) for at, value in enumerate(values)
        ]
        return self.produce(write_batch(produced(records, **changes)))

    def fetch(self, offset: int, *, version: int = 12, calls: Any = None, whole: bool = False, **options: Any) -> Any:
        """Return the result of the partition. ``options`` are fields of the partition or of the request."""
        of_request = {
            name: options.pop(name)
            for name in ("max_wait_ms", "min_bytes", "max_bytes", "isolation_level", "session_id", "session_epoch")
            if name in options
        }
        wanted = FetchPartition(partition=0, fetch_offset=offset, **{"partition_max_bytes": 1 << 20, **options})
        topic = FetchTopic(topic=self.topic, topic_id=self.topic_id, partitions=[wanted])
        request = FetchRequest(**{"max_bytes": 1 << 20, "min_bytes": 1, **of_request}, topics=[topic])
        response: FetchResponse = (calls or self.calls).ask(ApiKey.FETCH, version, request)
        if whole:
            return response
        found: PartitionData = response.responses[0].partitions[0]
        return found

    def find(self, timestamp: int, *, version: int = 10, **options: Any) -> ListOffsetsPartitionResponse:
        wanted = ListOffsetsPartition(partition_index=0, timestamp=timestamp, **options)
        request = ListOffsetsRequest(replica_id=-1, topics=[ListOffsetsTopic(name=self.topic, partitions=[wanted])])
        response = self.calls.ask(ApiKey.LIST_OFFSETS, version, request)
        found: ListOffsetsPartitionResponse = response.topics[0].partitions[0]
        return found


def values(found: PartitionData) -> dict[int, str]:
    """Return the values of the records by offset."""
    return {
        offset: (record.value or b"").decode()
        for view in read_batches(memoryview(bytes(found.records or b"")))
        if not view.control
        for batch in [read_batch(bytes(view.data))]
        for offset, record in zip(batch.offsets, batch.records, strict=True)
    }


@pytest.fixture
def new_leader(cluster: ProcessCluster) -> Iterator[Callable[..., Leader]]:
    created: list[Leader] = []

    def create(**config: str) -> Leader:
        created.append(Leader(cluster, **config))
        return created[-1]

    yield create
    for one in created:
        one.close()


@pytest.fixture
def leader(new_leader: Callable[..., Leader]) -> Leader:
    return new_leader()


@pytest.mark.parametrize("version", range(4, 19))
def test_every_version_of_fetch_returns_the_records(leader: Leader, version: int) -> None:
    leader.write("a", "b")
    found = leader.fetch(0, version=version)
    assert (found.error_code, values(found)) == (0, {0: "a", 1: "b"})
    assert (found.high_watermark, found.last_stable_offset) == (2, 2)


@pytest.mark.parametrize("version", range(3, 14))
def test_every_version_of_produce_appends_the_records(leader: Leader, version: int) -> None:
    records = write_batch(produced([Record(None, b"v", (), TIME_MS)]))
    for offset in range(2):
        done = leader.produce(records, version=version)
        assert (done.error_code, done.base_offset, done.log_append_time_ms) == (0, offset, -1)


def test_a_forged_retry_does_not_change_what_consumers_read(leader: Leader) -> None:
    original = b"pay anna 10 euro"
    # A difference that is a multiple of the checksum's polynomial does not change the checksum.
    polynomial = int(f"{0x11EDC6F41:033b}"[::-1], 2)
    forged = (int.from_bytes(original, "little") ^ polynomial).to_bytes(len(original), "little")
    assert forged != original
    assert crc32c(forged) == crc32c(original)
    for value in (original, forged):
        batch = produced([Record(b"key", value, (), TIME_MS)], producer_id=7, producer_epoch=0, base_sequence=0)
        done = leader.produce(write_batch(batch))
        assert (done.error_code, done.base_offset) == (0, 0)
        (view,) = read_batches(memoryview(bytes(leader.fetch(0).records or b"")))
        assert [record.value for record in read_batch(bytes(view.data)).records] == [original]


def test_a_retry_gets_the_append_time_of_its_batch(new_leader: Callable[..., Leader]) -> None:
    leader = new_leader(message_timestamp_type="LogAppendTime")
    idempotent: dict[str, Any] = {"producer_id": 7, "producer_epoch": 0}
    before_ms = int(time.time() * 1000)
    first = leader.write("a", base_sequence=0, **idempotent)
    assert before_ms <= first.log_append_time_ms <= time.time() * 1000
    while time.time() * 1000 < first.log_append_time_ms + 2:
        pass
    retried = leader.write("a", base_sequence=0, **idempotent)
    assert (retried.base_offset, retried.log_append_time_ms) == (0, first.log_append_time_ms)
    leader.write("b", base_sequence=1, **idempotent)
    retried = leader.write("a", base_sequence=0, **idempotent)
    assert (retried.error_code, retried.base_offset, retried.log_append_time_ms) == (0, 0, -1)


def test_small_limits_return_at_least_one_record(leader: Leader) -> None:
    leader.write(*(f"{number:04}" * 50 for number in range(100)))
    for found in (leader.fetch(7, max_bytes=1), leader.fetch(7, partition_max_bytes=1), leader.fetch(7, max_bytes=0)):
        assert list(values(found)) == [7]
    offset, sizes = 0, []
    while offset < 100:
        found = leader.fetch(offset, partition_max_bytes=3000)
        sizes.append(len(bytes(found.records or b"")))
        offset = max(values(found)) + 1
    assert max(sizes) <= 3000
    assert len(sizes) < 20


def test_a_fetch_at_the_end_waits_for_records(leader: Leader) -> None:
    leader.write("a")
    found = leader.fetch(1, max_wait_ms=50)
    assert (found.error_code, values(found), found.high_watermark) == (0, {}, 1)
    assert values(leader.fetch(1, max_wait_ms=60_000, min_bytes=0)) == {}


def test_offsets_outside_the_log_are_out_of_range(leader: Leader) -> None:
    leader.write("a", "b")
    for offset in (-1, 3):
        found = leader.fetch(offset, max_wait_ms=60_000)
        assert found.error_code == ErrorCode.OFFSET_OUT_OF_RANGE
    assert found.log_start_offset == 0


def test_leader_epochs_are_fenced(leader: Leader) -> None:
    leader.write("a")
    for epoch, code in (
        (leader.epoch, ErrorCode.NONE),
        (leader.epoch + 1, ErrorCode.UNKNOWN_LEADER_EPOCH),
    ):
        assert leader.fetch(0, current_leader_epoch=epoch).error_code == code
        assert leader.find(LATEST, current_leader_epoch=epoch).error_code == code
    diverging = leader.fetch(1, last_fetched_epoch=leader.epoch).diverging_epoch
    assert (diverging.epoch, diverging.end_offset) == (-1, -1), "the epoch of the last record is right"


def test_a_listed_offset_has_the_epoch_of_its_record(
    cluster: ProcessCluster, new_leader: Callable[..., Leader]
) -> None:
    leader = new_leader()
    first = leader.epoch
    assert [leader.find(at).leader_epoch for at in (EARLIEST, LATEST)] == [first, first], "the log is empty"
    leader.write("a")
    with SettledAdmin(cluster.bootstrap) as admin:
        moved = [1 - leader.leader, leader.leader]
        admin.reassign({TopicPartition(leader.topic, 0): moved})
        wait_until(lambda: metadata_of(cluster, leader.topic)[0].replicas == tuple(moved), "the new order")
        assert not admin.elect_leaders([TopicPartition(leader.topic, 0)])
    wait_until(lambda: metadata_of(cluster, leader.topic)[0].leader == moved[0], "the other leader")
    leader.calls, leader.other = leader.other, leader.calls
    second = metadata_of(cluster, leader.topic)[0].leader_epoch
    assert second > first
    wait_until(lambda: leader.write("b", times=(TIME_MS + 5,)).error_code == 0, "a write to the new leader")
    found = {at: leader.find(at).leader_epoch for at in (EARLIEST, TIME_MS, TIME_MS + 1, GREATEST_TIME, LATEST)}
    assert found == {EARLIEST: first, TIME_MS: first, TIME_MS + 1: second, GREATEST_TIME: second, LATEST: second}


def test_another_broker_names_the_leader(cluster: ProcessCluster, leader: Leader) -> None:
    found = leader.fetch(0, version=16, calls=leader.other, whole=True)
    data = found.responses[0].partitions[0]
    assert data.error_code == ErrorCode.NOT_LEADER_OR_FOLLOWER
    assert (data.current_leader.leader_id, data.current_leader.leader_epoch) == (leader.leader, leader.epoch)
    address = cluster.slots[leader.leader].kafka_address
    assert [f"{node.host}:{node.port}" for node in found.node_endpoints] == [address]
    done = leader.produce(write_batch(produced([Record(None, b"v", (), TIME_MS)])), version=10, calls=leader.other)
    assert done.error_code == ErrorCode.NOT_LEADER_OR_FOLLOWER
    assert (done.current_leader.leader_id, done.current_leader.leader_epoch) == (leader.leader, leader.epoch)


def test_unknown_topics_and_ids_are_errors_of_their_partitions(leader: Leader) -> None:
    records = write_batch(produced([Record(None, b"v", (), TIME_MS)]))
    assert leader.produce(records, name="none").error_code == ErrorCode.UNKNOWN_TOPIC_OR_PARTITION
    leader.topic_id = bytes(range(16))
    assert leader.produce(records, version=13).error_code == ErrorCode.UNKNOWN_TOPIC_ID
    assert leader.fetch(0, version=13, max_wait_ms=60_000).error_code == ErrorCode.UNKNOWN_TOPIC_ID


def test_fetch_sessions_are_refused(leader: Leader) -> None:
    leader.write("a")
    assert leader.fetch(0, session_id=5, session_epoch=1, whole=True).error_code == (
        ErrorCode.FETCH_SESSION_ID_NOT_FOUND
    )
    found = leader.fetch(0, session_id=0, session_epoch=0, whole=True)
    assert (found.error_code, found.session_id) == (0, 0)
    assert values(found.responses[0].partitions[0]) == {0: "a"}


@pytest.mark.parametrize("acks", [2, -2])
def test_other_acks_are_refused(leader: Leader, acks: int) -> None:
    records = write_batch(produced([Record(None, b"v", (), TIME_MS)]))
    assert leader.produce(records, acks=acks).error_code == ErrorCode.INVALID_REQUIRED_ACKS


def test_broken_batches_are_refused(leader: Leader) -> None:
    good = write_batch(produced([Record(None, b"v", (), TIME_MS)]))
    flipped = good[:-1] + bytes([good[-1] ^ 1])
    control = write_batch(produced([Record(None, b"v", (), TIME_MS)], attributes=0x20))
    for records, code in (
        (None, ErrorCode.INVALID_RECORD),
        (b"", ErrorCode.INVALID_RECORD),
        (good + good, ErrorCode.INVALID_RECORD),
        (control, ErrorCode.INVALID_RECORD),
        (flipped, ErrorCode.CORRUPT_MESSAGE),
        (good[:-1], ErrorCode.CORRUPT_MESSAGE),
    ):
        done = leader.produce(records)
        assert (done.error_code, done.base_offset) == (code, -1)
    assert leader.produce(good).base_offset == 0


def test_record_errors_name_the_records_without_key(new_leader: Callable[..., Leader]) -> None:
    leader = new_leader(cleanup_policy="compact")
    records = [Record(b"k" if number % 2 else None, b"v", (), TIME_MS) for number in range(4)]
    done = leader.produce(write_batch(produced(records)))
    assert done.error_code == ErrorCode.INVALID_RECORD
    assert [fault.batch_index for fault in done.record_errors] == [0, 2]
    assert leader.find(LATEST).offset == 0, "nothing was appended"


def test_batches_above_the_limit_are_too_large(new_leader: Callable[..., Leader]) -> None:
    leader = new_leader(max_message_bytes="5000")
    assert leader.write("v" * 4000).error_code == 0
    assert leader.write("v" * 6000).error_code == ErrorCode.MESSAGE_TOO_LARGE


def test_sequences_are_those_of_kafka(leader: Leader) -> None:
    given = leader.calls.ask(ApiKey.INIT_PRODUCER_ID, 4, InitProducerIdRequest(transactional_id=None))
    assert (given.error_code, given.producer_epoch) == (0, 0)

    def write(sequence: int, epoch: int = 0) -> tuple[int, int]:
        done = leader.write("a", "b", producer_id=given.producer_id, producer_epoch=epoch, base_sequence=sequence)
        return done.error_code, done.base_offset

    assert write(10) == (0, 0), "an unknown producer may begin at any sequence"
    assert write(12) == (0, 2)
    assert write(10) == (0, 0), "a duplicate gets its first offset"
    assert write(15) == (ErrorCode.OUT_OF_ORDER_SEQUENCE_NUMBER, -1)
    assert write(0, epoch=1) == (0, 4)
    assert write(14) == (ErrorCode.INVALID_PRODUCER_EPOCH, -1)
    for sequence in range(2, 14, 2):
        assert write(sequence, epoch=1)[0] == 0
    assert write(0, epoch=1) == (ErrorCode.DUPLICATE_SEQUENCE_NUMBER, -1), "never out of order for a duplicate"


def test_offsets_are_listed_for_all_kinds_of_times(leader: Leader) -> None:
    assert leader.find(GREATEST_TIME).offset == -1
    leader.write("a", "b", "c", times=(TIME_MS + 5, TIME_MS, TIME_MS + 9))
    leader.write("d", "e", times=(TIME_MS + 9, TIME_MS + 7))
    leader.write("f", times=(-1,))
    for timestamp, expected in (
        (EARLIEST, (0, -1)),
        (EARLIEST_LOCAL, (0, -1)),
        (LATEST, (6, -1)),
        (LATEST_TIERED, (-1, -1)),
        (GREATEST_TIME, (2, TIME_MS + 9)),
        (TIME_MS, (0, TIME_MS + 5)),
        (TIME_MS + 6, (2, TIME_MS + 9)),
        (TIME_MS + 10, (-1, -1)),
        (2**62, (-1, -1)),
    ):
        found = leader.find(timestamp)
        assert (found.error_code, found.offset, found.timestamp) == (0, *expected), timestamp
    for version in range(1, 11):
        assert leader.find(EARLIEST, version=version).offset == 0


def test_end_offsets_of_leader_epochs_are_found(leader: Leader) -> None:
    leader.write("a", "b")
    for epoch, expected in ((leader.epoch, (leader.epoch, 2)), (leader.epoch + 1, (-1, -1))):
        wanted = OffsetForLeaderPartition(partition=0, leader_epoch=epoch)
        request = OffsetForLeaderEpochRequest(topics=[OffsetForLeaderTopic(topic=leader.topic, partitions=[wanted])])
        found = leader.calls.ask(ApiKey.OFFSET_FOR_LEADER_EPOCH, 4, request).topics[0].partitions[0]
        assert (found.error_code, found.leader_epoch, found.end_offset) == (0, *expected)
