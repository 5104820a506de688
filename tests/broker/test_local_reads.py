"""Tests of reads from a replica's files on the same host: they equal fetches, whatever happens to the files
meanwhile."""

from __future__ import annotations

import os
import random
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import msgspec
import numpy as np
import pyarrow as pa
import pytest

from sparklog.client.admin.admin import Admin
from sparklog.client.cluster.replica_selector import LocalReadMode
from sparklog.client.consumer.partition_reader import PartitionReader
from sparklog.client.errors import LocalReadUnavailable, LogTruncated
from sparklog.client.producer.producer import Producer
from sparklog.errors import BrokerError, ConfigError, ErrorCode
from sparklog.model import TopicPartition
from sparklog.net.descriptors import DescriptorClient
from sparklog.protocol.local_reads import FORMAT_VERSION, OpenSegment, decode_reply, encode
from sparklog.testing.process_cluster import ProcessCluster, wait_until
from sparklog.testing.settled_admin import SettledAdmin
from tests.broker.topics import create_topic, leader, replica, wait_equal

pytestmark = pytest.mark.integration

NAMES = ["a", "b", "c"]
SMALL_SEGMENTS = {"segment.bytes": "65536"}


@pytest.fixture
def admin(cluster: ProcessCluster) -> Iterator[Admin]:
    with SettledAdmin(cluster.bootstrap) as client:
        yield client


def table(rows: int, seed: int = 0) -> pa.Table:
    dice = random.Random(seed)
    return pa.table({name: [dice.randbytes(100) for _ in range(rows)] for name in NAMES})


def make(
    cluster: ProcessCluster, admin: Admin, name: str, rows: int, *, config: dict[str, str] | None = None
) -> pa.Table:
    """Create a topic of several segments, with batches of each compression."""
    schema = pa.schema([(column, pa.binary()) for column in NAMES])
    admin.create_topic(name, partitions=1, replication_factor=3, schema=schema, config=config or SMALL_SEGMENTS)
    content = table(rows)
    for number, compression in enumerate(("none", "lz4", "zstd")):
        with Producer(cluster.bootstrap, compression=compression, batch_bytes=8192) as producer:
            third = -(-rows // 3)
            producer.write(name, content.slice(number * third, third)).result(30)
    return content


def read(
    cluster: ProcessCluster,
    name: str,
    start: int,
    end: int,
    *,
    local: LocalReadMode = "require",
    columns: list[str] | None = None,
    max_bytes: int = 20_000,
) -> tuple[pa.Table, PartitionReader]:
    tp = TopicPartition(name, 0)
    with PartitionReader(
        cluster.bootstrap, tp, start, end, local=local, columns=columns, max_bytes=max_bytes, timeout_s=20
    ) as reader:
        batches = [batch for _, batch in reader]
    return pa.Table.from_batches(batches), reader


def test_a_local_read_equals_a_fetch(cluster: ProcessCluster, admin: Admin) -> None:
    content = make(cluster, admin, "near", 900)
    before = dict(cluster.describe(leader(cluster, "near")).counters)
    found, reader = read(cluster, "near", 0, 900)
    assert found.equals(content)
    counters = reader.counters
    assert (counters.fetches, counters.local_fallbacks) == (0, 0)
    assert counters.local_batches == counters.decoded_batches > 20
    after = cluster.describe(leader(cluster, "near")).counters
    # one response for each segment, with all its batches
    segments = len(list(Path(replica(cluster, leader(cluster, "near"), "near").directory).glob("*.arrow")))
    assert segments > 2
    assert after["local.segments"] - before.get("local.segments", 0) == segments
    assert after["local.batches"] - before.get("local.batches", 0) == counters.local_batches
    fetched, far = read(cluster, "near", 0, 900, local="never")
    assert fetched.equals(content) and far.counters.local_batches == 0
    assert counters.local_bytes == far.counters.fetched_bytes
    for columns, most in ((["b"], 0.4), (["c", "a"], 0.72)):
        found_columns, projecting = read(cluster, "near", 13, 877, columns=columns)
        assert found_columns.equals(content.slice(13, 864).select(columns))
        assert 0 < projecting.counters.local_bytes < most * counters.local_bytes
    with PartitionReader(cluster.bootstrap, TopicPartition("near", 0), 13, 877, columns=[], local="require") as headers:
        assert sum(batch.num_rows for _, batch in headers) == 864
        assert headers.counters.local_bytes == 0
    # batches that a reader keeps survive the reader and the files
    admin.delete_topic("near")
    assert found.equals(content)


def test_only_the_bytes_of_the_columns_are_read(cluster: ProcessCluster, admin: Admin) -> None:
    """One column of the file is damaged meanwhile. A reader of it or of whole batches gets an error or sees the
    damage, and no process dies. A reader of other columns does not touch it."""
    schema = pa.schema([(name, pa.binary()) for name in NAMES])
    admin.create_topic("holed", partitions=1, replication_factor=1, schema=schema)
    contents = {name: bytes([number + 65]) * 100 for number, name in enumerate(NAMES)}
    content = pa.table({name: [value] * 60 for name, value in contents.items()})
    with Producer(cluster.bootstrap) as producer:
        producer.write("holed", content).result(30)
    path = Path(replica(cluster, leader(cluster, "holed"), "holed").directory, f"{0:020d}.arrow")
    stored = path.read_bytes()
    values = stored.index(contents["b"] * 60)
    offsets = stored.index(np.arange(0, 6001, 100, dtype=np.int32).tobytes(), stored.index(contents["a"] * 60))
    assert offsets < values
    with path.open("r+b", buffering=0) as file:
        file.seek(offsets + 40)
        file.write(b"\xff\xff\xff\x7f")
        for columns in (["a"], ["c"], ["c", "a"]):
            assert read(cluster, "holed", 0, 60, columns=columns)[0].equals(content.select(columns))
        for damaged in (["b"], ["a", "b"], None, NAMES):
            with pytest.raises(BrokerError) as caught:
                read(cluster, "holed", 0, 60, columns=damaged)
            assert caught.value.code is ErrorCode.CORRUPT_MESSAGE
        file.seek(offsets)
        file.write(stored[offsets:values])
        assert read(cluster, "holed", 0, 60)[0].equals(content)


def test_a_local_read_works_while_segments_are_sealed(cluster: ProcessCluster, admin: Admin) -> None:
    schema = pa.schema([(column, pa.binary()) for column in NAMES])
    admin.create_topic("flow", partitions=1, replication_factor=3, schema=schema, config=SMALL_SEGMENTS)
    pieces = [table(50, seed) for seed in range(30)]

    def write() -> None:
        with Producer(cluster.bootstrap) as producer:
            for piece in pieces:
                producer.write("flow", piece).result(30)

    writer = threading.Thread(target=write)
    writer.start()
    modes: tuple[LocalReadMode, ...] = ("require", "auto")
    try:
        for mode in modes:
            found, reader = read(cluster, "flow", 0, 1500, local=mode)
            assert found.equals(pa.concat_tables(pieces))
            assert reader.counters.local_batches > 0 and reader.counters.local_fallbacks == 0
            assert mode == "auto" or reader.counters.fetches == 0
    finally:
        writer.join()


def test_local_reads_obey_transactions(cluster: ProcessCluster, admin: Admin) -> None:
    admin.create_topic("torn-near", partitions=1, replication_factor=3, schema="x int, y string")
    tp = TopicPartition("torn-near", 0)
    with Producer(cluster.bootstrap, transactional_id="torn-near") as producer:
        for number in range(4):
            producer.begin()
            producer.write("torn-near", pa.table({"x": pa.array([number], pa.int32())}))
            producer.flush()
            producer.commit() if number % 2 else producer.abort()
        assert read(cluster, "torn-near", 0, 8)[0].column("x").to_pylist() == [1, 3]
        for columns in (["x"], []):  # only headers show an aborted transaction
            with PartitionReader(cluster.bootstrap, tp, 0, 8, columns=columns, local="require") as some:
                found = [(one.first_offset, one.batch.to_pylist()) for one in some.fetched()]
            assert found == [(2, [{"x": 1} if columns else {}]), (6, [{"x": 3} if columns else {}])]
        producer.begin()
        producer.write("torn-near", pa.table({"x": pa.array([9], pa.int32())}))
        producer.flush()
        wait_until(lambda: admin.list_offsets([tp], isolation="read_uncommitted")[tp] == 9, 15, "the open transaction")
        # the file has the records, but not for readers of committed records
        with Local(cluster, "torn-near") as near:
            assert near.ask(8, isolation=1) == (0, 0)
            assert near.ask(8, isolation=0) == (0, 1)
            assert near.ask(0, isolation=1) == (0, 8)
        producer.abort()
    reader = PartitionReader(cluster.bootstrap, tp, 0, 9, isolation="read_uncommitted", local="require")
    with reader:
        assert [row["x"] for _, batch in reader for row in batch.to_pylist()] == [0, 1, 2, 3, 9]


class Local:
    """A direct connection to the Unix socket of the broker that leads a topic."""

    def __init__(self, cluster: ProcessCluster, name: str, broker_id: int | None = None) -> None:
        self._name = name
        with cluster.connect(leader(cluster, name) if broker_id is None else broker_id) as connection:
            self.path = connection.hello.local_socket

    def __enter__(self) -> Local:
        self._client = DescriptorClient(self.path, timeout_s=5)
        return self

    def __exit__(self, *_: object) -> None:
        self._client.close()

    def ask(self, offset: int, *, isolation: int = 0, epoch: int = -1, topic_id: str = "") -> tuple[int, int]:
        """Return the code, and the number of batches."""
        request = OpenSegment(FORMAT_VERSION, self._name, 0, topic_id, epoch, -1, offset, isolation)
        return self.send(encode(request))

    def request(self, request: OpenSegment) -> tuple[bytes, list[int]]:
        return self._client.request(encode(request))

    def send(self, packet: bytes) -> tuple[int, int]:
        payload, descriptors = self._client.request(packet)
        for descriptor in descriptors:
            with pytest.raises(OSError, match="Bad file descriptor"):
                os.write(descriptor, b"x")  # opened for reading only
            os.close(descriptor)
        reply = decode_reply(payload)
        assert len(descriptors) == (2 if reply.batch_count else 0)
        return reply.code, reply.batch_count


def test_a_broker_responds_to_valid_and_invalid_local_reads(cluster: ProcessCluster, admin: Admin) -> None:
    make(cluster, admin, "asked", 60)
    leads = leader(cluster, "asked")
    with Local(cluster, "asked") as near:
        assert near.ask(0)[0] == 0
        assert near.ask(61)[0] == ErrorCode.OFFSET_OUT_OF_RANGE
        assert near.ask(0, epoch=99)[0] == ErrorCode.UNKNOWN_LEADER_EPOCH
        assert near.ask(0, topic_id="x")[0] == ErrorCode.INCONSISTENT_TOPIC_ID
        assert near.ask(0, isolation=7)[0] == ErrorCode.INVALID_REQUEST
        assert near.send(b"nonsense")[0] == ErrorCode.INVALID_REQUEST
        newer = OpenSegment(FORMAT_VERSION + 1, "asked", 0, "", -1, -1, 0, 0)
        assert near.send(encode(newer))[0] == ErrorCode.UNSUPPORTED_VERSION
        # and continues
        assert near.ask(0)[0] == 0
        assert Path(near.path).stat().st_mode & 0o077 == 0
    # a client that sends and never reads is disconnected, and delays no other
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as deaf:
        deaf.settimeout(5)
        deaf.connect(near.path)
        packet = msgspec.msgpack.encode(OpenSegment(FORMAT_VERSION, "asked", 0, "", -1, -1, 0, 0))
        with pytest.raises(OSError):  # EPIPE or ECONNRESET
            for _ in range(100_000):
                deaf.send(packet)
    # a follower in sync serves as well
    follower = next(broker_id for broker_id in cluster.slots if broker_id != leads)
    wait_equal(cluster, "asked", 60)
    with Local(cluster, "asked", follower) as near:
        assert near.ask(0)[0] == 0


def test_files_may_be_deleted_during_a_local_read(cluster: ProcessCluster, admin: Admin) -> None:
    content = make(cluster, admin, "gone", 600)
    tp = TopicPartition("gone", 0)
    with PartitionReader(cluster.bootstrap, tp, 0, 600, local="require", max_bytes=9000) as reader:
        batches = reader.fetched()
        first = next(batches)
        segment = Path(replica(cluster, leader(cluster, "gone"), "gone").directory, f"{0:020d}.arrow")
        assert segment.exists()
        admin.delete_topic("gone")
        wait_until(lambda: not segment.exists(), 15, "the files to be gone")
        found = [first.batch]
        with pytest.raises(LocalReadUnavailable) as caught:
            for one in batches:
                found.append(one.batch)  # noqa: PERF401 - it raises in the end
        assert caught.value.code in {ErrorCode.UNKNOWN_TOPIC_OR_PARTITION, ErrorCode.INCONSISTENT_TOPIC_ID}
    # the whole segment that was open
    taken = pa.Table.from_batches(found)
    assert 100 < taken.num_rows < 600
    assert taken.equals(content.slice(0, taken.num_rows))


def test_a_local_read_of_expired_records_is_out_of_range(cluster: ProcessCluster, admin: Admin) -> None:
    content = make(cluster, admin, "aged", 900, config={**SMALL_SEGMENTS, "retention.bytes": "70000"})
    tp = TopicPartition("aged", 0)
    reader = PartitionReader(cluster.bootstrap, tp, 0, 900, max_bytes=9000)
    with reader:
        wait_until(lambda: admin.list_offsets([tp], at="earliest")[tp] > 0, 15, "retention to take records")
        with pytest.raises(BrokerError) as caught:
            list(reader)
        assert caught.value.code is ErrorCode.OFFSET_OUT_OF_RANGE
        assert reader.counters.local_fallbacks == 1  # a fetch decides in the end
    start = admin.list_offsets([tp], at="earliest")[tp]
    assert read(cluster, "aged", start, 900)[0].equals(content.slice(start))


def test_a_broker_is_killed_during_a_local_read(cluster: ProcessCluster, admin: Admin) -> None:
    content = make(cluster, admin, "killed", 900)
    tp = TopicPartition("killed", 0)
    leads = leader(cluster, "killed")
    wait_equal(cluster, "killed", 900)
    with (
        PartitionReader(cluster.bootstrap, tp, 0, 900, max_bytes=9000, timeout_s=40) as auto,
        PartitionReader(cluster.bootstrap, tp, 0, 900, max_bytes=9000, local="require") as only,
    ):
        batches, strict = auto.fetched(), only.fetched()
        found = [next(batches).batch]
        next(strict)
        cluster.kill(leads)
        found += [one.batch for one in batches]
        assert pa.Table.from_batches(found).equals(content)
        assert auto.counters.local_fallbacks == 1
        assert auto.counters.local_batches > 1 and auto.counters.fetched_batches > 1
        with pytest.raises(LocalReadUnavailable):
            list(strict)
    cluster.start_broker(leads)


def test_a_reader_without_access_to_the_socket_fetches(cluster: ProcessCluster, admin: Admin) -> None:
    content = make(cluster, admin, "barred", 60)
    with Local(cluster, "barred") as near:
        away = Path(near.path).rename(near.path + ".away")
    try:
        found, reader = read(cluster, "barred", 0, 60, local="auto")
        assert found.equals(content)
        assert (reader.counters.local_fallbacks, reader.counters.local_batches) == (1, 0)
        with pytest.raises(LocalReadUnavailable) as caught:
            read(cluster, "barred", 0, 60)
        assert caught.value.code is ErrorCode.REPLICA_NOT_AVAILABLE
    finally:
        away.rename(near.path)
    with pytest.raises(ConfigError):
        PartitionReader(cluster.bootstrap, TopicPartition("barred", 0), 0, 1, local="always")  # type: ignore[arg-type]


def test_a_broker_configured_without_local_reads_offers_none(cluster: ProcessCluster, admin: Admin) -> None:
    create_topic(cluster, "unlent", assignment=((0,),))
    with Producer(cluster.bootstrap) as producer:
        producer.send("unlent", b"x").result(30)
    with Local(cluster, "unlent") as near:
        path = Path(near.path)
    cluster.settings["local.reads.enable"] = "false"
    try:
        cluster.restart(0)
        assert leader(cluster, "unlent") == 0
        assert not path.exists()
        found, reader = read(cluster, "unlent", 0, 1, local="auto")
        assert (found.num_rows, reader.counters.local_fallbacks, reader.counters.local_batches) == (1, 1, 0)
        with pytest.raises(LocalReadUnavailable, match="provides files on this host"):
            read(cluster, "unlent", 0, 1)
    finally:
        del cluster.settings["local.reads.enable"]
        cluster.restart(0)
    assert leader(cluster, "unlent") == 0
    assert read(cluster, "unlent", 0, 1)[1].counters.local_batches == 1


def _in_sync(cluster: ProcessCluster, broker_id: int) -> set[int]:
    """Return the in-sync replicas, as this broker's metadata names them."""
    return set(cluster.metadata(broker_id, "near").topics[0].partitions[0].isr)


def test_a_reader_fetches_from_the_nearest_follower(
    cluster: ProcessCluster, admin: Admin, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All brokers are on this host, so the test says which one counts as near."""
    content = make(cluster, admin, "near", 120)
    leads = leader(cluster, "near")
    follower = next(broker_id for broker_id in cluster.slots if broker_id != leads)

    def near(leader: int, in_sync: list[int], *_: object, **__: object) -> int:
        return follower if follower in in_sync else leader

    monkeypatch.setattr("sparklog.client.consumer.fetcher.nearest", near)
    found, reader = read(cluster, "near", 0, 120, local="never")
    assert found.equals(content)
    assert reader.counters.follower_batches == reader.counters.fetched_batches > 0

    tp = TopicPartition("near", 0)
    with PartitionReader(cluster.bootstrap, tp, 0, 120, local="never", max_bytes=20_000) as reader:
        batches = reader.fetched()
        seen = next(batches).batch.num_rows
        cluster.kill(follower)
        assert seen + sum(found.batch.num_rows for found in batches) == 120
        assert 0 < reader.counters.follower_batches < reader.counters.fetched_batches
    cluster.start_broker(follower)

    # The leader confirms that the records read before are still in the log, and so does a follower that serves files.
    cluster.restart(leads)
    # The follower must be neither the present leader nor the last one, which may lead again: it has to stay a follower.
    follower = next(broker_id for broker_id in cluster.slots if broker_id not in {leads, leader(cluster, "near")})
    with Producer(cluster.bootstrap) as producer:
        producer.write("near", table(30)).result(30)
    wait_until(lambda: replica(cluster, follower, "near").high_watermark == 150, 60, "the follower to be level")
    # A broker that has just returned learns that it is in sync a moment after its leader.
    wait_until(lambda: all(_in_sync(cluster, asked) == set(cluster.slots) for asked in cluster.slots), 60, "full ISRs")
    with PartitionReader(cluster.bootstrap, tp, 60, 150, local="never", max_bytes=20_000, last_epoch=0) as reader:
        assert sum(batch.num_rows for _, batch in reader) == 90
        assert 0 < reader.counters.follower_batches < reader.counters.fetched_batches
    with (
        PartitionReader(cluster.bootstrap, tp, 130, 150, local="never", last_epoch=0) as reader,
        pytest.raises(LogTruncated),
    ):
        list(reader)
    for broker_id in cluster.slots:
        with Local(cluster, "near", broker_id) as socket_of:
            payload, _ = socket_of.request(OpenSegment(FORMAT_VERSION, "near", 0, "", -1, 0, 130, 0))
            assert decode_reply(payload).diverging == (0, 120)


def test_a_log_is_truncated_under_a_local_reader(cluster: ProcessCluster, admin: Admin) -> None:
    """After an unclean election the old leader returns, and truncates records that only it had and has shown."""
    config = {"min.insync.replicas": "1", "unclean.leader.election.enable": "true"}
    create_topic(cluster, "cut", assignment=((0, 1),), config=config)
    tp = TopicPartition("cut", 0)
    value = b"x" * 2000
    with Producer(cluster.bootstrap, batch_bytes=4096) as producer:
        for number in range(20):
            producer.send("cut", b"%d" % number + value).result(30)
        wait_until(lambda: replica(cluster, 1, "cut").log_end_offset == 20, 15, "the follower to be level")
        cluster.kill(1)
        for number in range(20, 60):
            producer.send("cut", b"%d" % number + value).result(30)
    reader = PartitionReader(cluster.bootstrap, tp, 0, 80, max_bytes=8192, timeout_s=40)
    with reader:
        batches = reader.fetched()
        seen = next(batches).batch.num_rows
        assert reader.counters.local_batches
        path = Path(replica(cluster, 0, "cut").directory, f"{0:020d}.arrow")
        before = path.stat()
        cluster.kill(0)
        cluster.start_broker(1)
        assert leader(cluster, "cut") == 1
        with Producer(cluster.bootstrap) as producer:
            producer.send("cut", b"another history").result(30)
        cluster.start_broker(0)
        wait_until(lambda: replica(cluster, 0, "cut").high_watermark == 21, 15, "the old leader to follow")
        after = path.stat()
        assert after.st_size < before.st_size and after.st_ino != before.st_ino  # truncated by copy and rename
        # the reader can still read the shown records, and then gets the error that they are no longer in the log
        with pytest.raises(LogTruncated):
            for one in batches:
                assert one.batch.column("value")[0].as_py() == b"%d" % one.first_offset + value
                seen += one.batch.num_rows
        assert seen == 60
