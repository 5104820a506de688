"""Tests of invalid input: a typed error names the found and the expected value, nothing is written, and the broker
continues."""

from __future__ import annotations

import contextlib
import random
import socket
import struct
from collections import Counter
from collections.abc import Iterator

import msgspec
import pyarrow as pa
import pytest

from sparklog.errors import BrokerError, ErrorCode
from sparklog.net.blocking import BlockingConnection
from sparklog.protocol.connection import ClientEnd, hello
from sparklog.protocol.frames import PREFIX, encode_frame
from sparklog.protocol.messages import (
    LATEST,
    AlterTopic,
    CreatePartitions,
    CreateTopic,
    DeleteTopic,
    ErrorReply,
    Metadata,
    MetadataReply,
    Produce,
    ProducePartition,
    Request,
    decode_reply,
)
from sparklog.record.codec import EncodedBatch, encode_batch
from sparklog.record.header import HEADER_BYTES, unpack_headers
from sparklog.record.message import read_batch_message
from sparklog.record.schema import DEFAULT_SCHEMA
from sparklog.testing.process_cluster import ProcessCluster
from tests.broker.support import encoded, fetch, list_offset, produce, produce_request, read_all
from tests.broker.topics import create_topic, leader, replica, wait_equal
from tests.record import batches
from tests.record import fuzz_batches as fuzz
from tests.record.batches import resealed

pytestmark = pytest.mark.integration
TOPIC = "bad-input"


@pytest.fixture(scope="module")
def leading(running_cluster: ProcessCluster) -> int:
    """Return the leader of a topic with one good batch of three records."""
    topic_id = create_topic(running_cluster, TOPIC, config={"max.message.bytes": "65536"})
    assert topic_id
    found = leader(running_cluster, TOPIC)
    with running_cluster.connect(found) as connection:
        assert produce(connection, TOPIC, encoded(3)).base_offset == 0
    return found


@pytest.fixture
def connection(cluster: ProcessCluster, leading: int) -> Iterator[BlockingConnection]:
    """Yield a connection that must still work at the end, to a broker whose log must be unchanged."""
    pid = cluster.pid(leading)
    with cluster.connect(leading) as opened:
        before = replica(cluster, leading, TOPIC)
        yield opened
        assert list_offset(opened, TOPIC, LATEST).offset == 3
        assert read_all(opened, TOPIC) == [b"v0", b"v1", b"v2"]
    assert replica(cluster, leading, TOPIC) == before
    assert cluster.pid(leading) == pid


def refused(connection: BlockingConnection, request: Request, body: list[bytes] | None = None) -> BrokerError:
    with pytest.raises(BrokerError) as caught:
        connection.request(request, body or [])
    return caught.value


# --- frames -----------------------------------------------------------------------------------------------------


def test_a_frame_over_the_limit_is_skipped_and_named(connection: BlockingConnection) -> None:
    request, _ = produce_request(TOPIC, [encoded(1)])
    error = refused(connection, request, [bytes(2_000_000)])
    assert error.code is ErrorCode.FRAME_TOO_LARGE
    assert "2000" in error.detail and "1048576" in error.detail


def raw(cluster: ProcessCluster, broker_id: int, *frames: bytes, greet: bool = True) -> tuple[list[ErrorReply], bool]:
    """Send bytes unchanged. Return the received errors, and whether the broker closed the connection."""
    address = ("127.0.0.1", cluster.slots[broker_id].port)
    with socket.create_connection(address, timeout=5) as peer, peer.makefile("rb") as replies:
        if greet:
            peer.sendall(b"".join(bytes(part) for part in ClientEnd().encode(hello("raw"))[1]))
        peer.sendall(b"".join(frames))
        # This request always gets a response: when it arrives, all earlier errors have arrived.
        peer.sendall(b"".join(bytes(part) for part in ClientEnd().encode(Metadata(0, ("no-such-topic",)))[1]))
        errors: list[ErrorReply] = []
        with contextlib.suppress(ConnectionResetError):  # the broker closed the connection before it had read all bytes
            while prefix := replies.read(PREFIX.size):
                length, header_length = PREFIX.unpack(prefix)
                reply = decode_reply(replies.read(length + 4 - PREFIX.size)[:header_length])
                if isinstance(reply, ErrorReply):
                    errors.append(reply)
                if isinstance(reply, MetadataReply) or "Hello expected" in getattr(reply, "detail", ""):
                    return errors, False
        return errors, True


def frame(header: bytes) -> bytes:
    return b"".join(bytes(part) for part in encode_frame(header))


@pytest.mark.usefixtures("connection")
@pytest.mark.parametrize(
    ("sent", "code", "closed"),
    [
        (b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", ErrorCode.MALFORMED_FRAME, True),
        (struct.pack("<II", 10, 4_000_000_000) + bytes(6), ErrorCode.MALFORMED_FRAME, True),
        (frame(b"\xc1\xff\x00 no messagepack"), ErrorCode.MALFORMED_FRAME, False),
        (frame(msgspec.msgpack.encode(["make_coffee", 7, "black"])), ErrorCode.UNKNOWN_API, False),
        (frame(msgspec.msgpack.encode(["produce", 7, "all"])), ErrorCode.INVALID_REQUEST, False),
        (frame(msgspec.msgpack.encode(["hello", 7, 900, 901, "future", ""])), ErrorCode.UNSUPPORTED_VERSION, True),
    ],
    ids=["http", "lengths that contradict", "no message", "unknown api", "wrong types", "unknown version"],
)
def test_malformed_requests_are_refused(
    cluster: ProcessCluster, leading: int, sent: bytes, code: ErrorCode, closed: bool
) -> None:
    errors, ended = raw(cluster, leading, sent, greet=code is not ErrorCode.UNSUPPORTED_VERSION)
    assert [error.code for error in errors] == [code]
    assert errors[0].detail
    assert ended is closed


@pytest.mark.usefixtures("connection")
def test_a_request_before_hello_is_refused(cluster: ProcessCluster, leading: int) -> None:
    errors, _ = raw(cluster, leading, greet=False)
    assert errors and errors[0].code == ErrorCode.INVALID_REQUEST and "Hello expected" in errors[0].detail


def test_a_client_of_another_cluster_is_refused(cluster: ProcessCluster, leading: int) -> None:
    with pytest.raises(BrokerError) as caught, cluster.connect(leading, cluster_id="another"):
        pass
    assert "another" in caught.value.detail and cluster.cluster_id in caught.value.detail


# --- batches ----------------------------------------------------------------------------------------------------


def broken(kind: str) -> EncodedBatch:
    good = encoded(3)
    body = bytearray(good.body)
    if kind == "bit flip":
        body[-9] ^= 1
        return EncodedBatch(good.header, bytes(body))
    if kind == "row count":
        return EncodedBatch(good.header._replace(record_count=4, offset_span=4), bytes(body))
    if kind == "other columns":
        other = pa.RecordBatch.from_pydict({"n": [1, 2, 3]})
        return encode_batch(other, schema_id=0, compression=None, event_time=None)
    if kind == "unknown schema id":
        return EncodedBatch(good.header._replace(schema_id=7), bytes(body))
    if kind == "offsets out of range":
        message = read_batch_message(memoryview(good.body))
        at = message.metadata_length + message.buffers[4][0]
        struct.pack_into("<4i", body, at, 0, 2, 4, 2**30)
        return resealed(good, bytes(body))
    if kind == "truncated buffers":
        return resealed(good, bytes(body[:-16]))
    if kind == "too large":
        return encoded(1, "x" * 70_000)
    if kind == "a bomb":
        values = [bytes(200_000)] * 100
        table = {"key": [None] * 100, "value": values, "headers": [None] * 100, "timestamp": [None] * 100}
        batch = pa.RecordBatch.from_pydict(table, schema=DEFAULT_SCHEMA)
        return encode_batch(batch, schema_id=0, compression="zstd", event_time="timestamp")
    raise AssertionError(kind)


@pytest.mark.parametrize(
    ("kind", "code", "named"),
    [
        ("bit flip", ErrorCode.CORRUPT_MESSAGE, "CRC"),
        ("row count", ErrorCode.CORRUPT_MESSAGE, "4"),
        ("other columns", ErrorCode.SCHEMA_MISMATCH, "expected"),
        ("unknown schema id", ErrorCode.SCHEMA_OUTDATED, "7"),
        ("offsets out of range", ErrorCode.CORRUPT_MESSAGE, "1073741824"),
        ("truncated buffers", ErrorCode.CORRUPT_MESSAGE, "in 584 bytes"),
        ("too large", ErrorCode.MESSAGE_TOO_LARGE, "65536"),
        ("a bomb", ErrorCode.MESSAGE_TOO_LARGE, "65536"),
    ],
)
def test_a_bad_batch_is_refused(connection: BlockingConnection, kind: str, code: ErrorCode, named: str) -> None:
    for acks in (-1, 1):
        result = produce(connection, TOPIC, broken(kind), acks=acks)
        assert result.code == code, result.detail
        assert result.base_offset == -1
        assert TOPIC in result.detail and named in result.detail


def test_no_reader_ever_sees_a_malformed_batch(cluster: ProcessCluster, leading: int) -> None:
    """Batches are damaged at random, with matching checksums: each is refused, or good for every reader on every
    replica."""
    create_topic(cluster, "malformed", assignment=((0, 1, 2),))
    dice = random.Random(11)
    good = [batches.encoded(batches.default_batch(), compression) for compression in (None, "lz4", "zstd")]
    codes: Counter[ErrorCode] = Counter()
    pids = [cluster.pid(broker_id) for broker_id in cluster.slots]
    end = 0
    with cluster.connect(0) as connection:
        for _ in range(600):
            batch = dice.choice(good)
            sent = resealed(batch, fuzz.mutated(batch.body.to_pybytes(), dice))
            result = produce(connection, "malformed", sent, acks=1)
            codes[ErrorCode(result.code)] += 1
            if result.code == ErrorCode.NONE:
                assert result.base_offset == end
                end += sent.header.offset_span
            else:
                assert result.base_offset == -1 and "malformed-0" in result.detail
        assert codes[ErrorCode.CORRUPT_MESSAGE] > 100 and codes[ErrorCode.NONE] > 10, codes
        assert ErrorCode.UNKNOWN_SERVER_ERROR not in codes
        wait_equal(cluster, "malformed", end)
    for broker_id in cluster.slots:
        with cluster.connect(broker_id) as connection:
            seen = 0
            while seen < end:
                fetched, body = fetch(connection, "malformed", seen)
                at = fetched.batch_count * HEADER_BYTES
                for header in unpack_headers(body[:at]):
                    taken = EncodedBatch(header, pa.py_buffer(body[at : at + header.length]))
                    fuzz.read_everything(taken, DEFAULT_SCHEMA)
                    at += header.stored_bytes
                    seen = header.next_offset
    assert [cluster.pid(broker_id) for broker_id in cluster.slots] == pids


def test_a_bad_batch_rejects_all_batches_of_its_partition(connection: BlockingConnection) -> None:
    result = produce(connection, TOPIC, encoded(2), broken("bit flip"))
    assert result.code == ErrorCode.CORRUPT_MESSAGE


def test_lengths_that_do_not_add_up_are_refused(connection: BlockingConnection) -> None:
    request, body = produce_request(TOPIC, [encoded(3)])
    assert refused(connection, request, [*body, bytes(8)]).code is ErrorCode.INVALID_REQUEST
    wanted = request.partitions[0]
    negative = ProducePartition(TOPIC, 0, "", -1, wanted.body_bytes)
    assert refused(connection, Produce(0, -1, 1000, (negative,)), body).code is ErrorCode.INVALID_REQUEST
    short = [body[0], body[1][:-8]]
    fewer = ProducePartition(TOPIC, 0, "", 1, wanted.body_bytes - 8)
    reply, _ = connection.request(Produce(0, -1, 1000, (fewer,)), short)
    assert reply.results[0].code == ErrorCode.CORRUPT_MESSAGE  # type: ignore[union-attr]


def test_unknown_acks_are_refused(connection: BlockingConnection) -> None:
    request, body = produce_request(TOPIC, [encoded(1)], acks=2)
    error = refused(connection, request, body)
    assert error.code is ErrorCode.INVALID_REQUIRED_ACKS and "found 2" in error.detail


# --- names and offsets ------------------------------------------------------------------------------------------


def test_unknown_topics_partitions_and_ids_are_refused(connection: BlockingConnection) -> None:
    unknown = ErrorCode.UNKNOWN_TOPIC_OR_PARTITION
    for topic, number in (("no-such-topic", 0), (TOPIC, 99), (TOPIC, -1)):
        assert produce(connection, topic, encoded(1), partition=number).code == unknown
        fetched, _ = fetch(connection, topic, 0, partition=number)
        assert fetched.code == unknown and topic in fetched.detail
        assert list_offset(connection, topic, LATEST, partition=number).code == unknown
    wrong_id = produce(connection, TOPIC, encoded(1), topic_id="of-a-deleted-topic")
    assert wrong_id.code == ErrorCode.INCONSISTENT_TOPIC_ID and "of-a-deleted-topic" in wrong_id.detail


def test_offsets_out_of_range_are_refused(connection: BlockingConnection) -> None:
    for offset in (-5, 4, 10**9):
        fetched, body = fetch(connection, TOPIC, offset)
        assert fetched.code == ErrorCode.OFFSET_OUT_OF_RANGE
        assert str(offset) in fetched.detail and "[0, 3)" in fetched.detail
        assert (fetched.log_start_offset, fetched.high_watermark, len(body)) == (0, 3, 0)


def test_wrong_leader_epochs_are_refused(connection: BlockingConnection) -> None:
    assert fetch(connection, TOPIC, 0, leader_epoch=999)[0].code == ErrorCode.UNKNOWN_LEADER_EPOCH


@pytest.mark.parametrize(
    ("request_", "code", "named"),
    [
        (CreateTopic(0, "a/b", 1, 1, 1000), ErrorCode.INVALID_TOPIC_EXCEPTION, "a/b"),
        (CreateTopic(0, "x" * 250, 1, 1, 1000), ErrorCode.INVALID_TOPIC_EXCEPTION, "250"),
        (CreateTopic(0, "many", 1, 4, 1000), ErrorCode.INVALID_REPLICATION_FACTOR, "factor 4; expected 1 to 3"),
        (CreateTopic(0, "none", 0, 1, 1000), ErrorCode.INVALID_PARTITIONS, "0"),
        (CreateTopic(0, "odd", 1, 1, 1000, config={"retention.hours": "1"}), ErrorCode.INVALID_CONFIG, "retention"),
        (CreateTopic(0, "odd", 1, 1, 1000, config={"retention.ms": "-9"}), ErrorCode.INVALID_CONFIG, "-1 to"),
        (CreateTopic(0, "odd", 1, 1, 1000, schema=b"no schema"), ErrorCode.CORRUPT_MESSAGE, "Arrow"),
        (
            CreateTopic(
                0, "odd", 1, 1, 1000, schema=pa.schema([("a", pa.int64())]).serialize().to_pybytes(), key_columns=("b",)
            ),
            ErrorCode.SCHEMA_MISMATCH,
            "'b'",
        ),
        (
            CreateTopic(0, "odd", 1, 2, 1000, assignment=((0, 9),)),
            ErrorCode.INVALID_REPLICA_ASSIGNMENT,
            "9",
        ),
        (CreateTopic(0, TOPIC, 1, 1, 1000), ErrorCode.TOPIC_ALREADY_EXISTS, TOPIC),
        (DeleteTopic(0, "no-such-topic", 1000), ErrorCode.UNKNOWN_TOPIC_OR_PARTITION, "no-such-topic"),
        (AlterTopic(0, f"{TOPIC}/partitions", {}, (), 1000), ErrorCode.UNKNOWN_TOPIC_OR_PARTITION, "partitions"),
        (CreatePartitions(0, f"../{TOPIC}", 2, 1000), ErrorCode.UNKNOWN_TOPIC_OR_PARTITION, TOPIC),
    ],
)
def test_impossible_topics_are_refused(
    connection: BlockingConnection, request_: Request, code: ErrorCode, named: str
) -> None:
    error = refused(connection, request_)
    assert error.code is code, error
    assert named in error.detail
