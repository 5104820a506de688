"""Tests of hostile or broken peers: for any input the broker gives a typed response, and serves all other clients."""

from __future__ import annotations

import contextlib
import socket
import struct
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pyarrow as pa
import pytest

from sparklog.errors import BrokerError, ErrorCode
from sparklog.model import BrokerEndpoint, LeaderAndIsr, TopicSchema
from sparklog.net.blocking import BlockingConnection
from sparklog.protocol.connection import hello
from sparklog.protocol.fields import MAX_PLAIN
from sparklog.protocol.frames import encode_frame
from sparklog.protocol.messages import (
    CONSUMER,
    MAX_ENTRIES,
    Ack,
    ControlUpdate,
    ControlUpdateReply,
    CreateTopic,
    CreateTopicReply,
    DeleteTopic,
    ErrorReply,
    Fetch,
    FetchPartition,
    FetchReply,
    HelloReply,
    ListOffsets,
    ListOffsetsPartition,
    Metadata,
    MetadataReply,
    PartitionDecision,
    Produce,
    ProducePartition,
    ProduceReply,
    Request,
    TopicChange,
    encode_message,
)
from sparklog.protocol.proof import Identity
from sparklog.protocol.senders import SenderKind
from sparklog.record.header import HEADER_BYTES
from sparklog.record.schema import DEFAULT_SCHEMA, schema_message
from sparklog.testing.process_cluster import ProcessCluster, wait_until
from tests.broker.support import encoded, produce, produce_request, read_all
from tests.broker.topics import PATIENCE_S, create_topic, leader, replica, wait_equal

pytestmark = pytest.mark.integration
TOPIC = "besieged"
VALUES = [b"v0", b"v1", b"v2"]
NUMBERS = (-(2**63), -1, 2**31, 2**62, 2**63 - 1, 2**64 - 1)


@pytest.fixture(scope="module")
def leading(running_cluster: ProcessCluster) -> int:
    """Return the leader of a topic with one good batch of three records."""
    create_topic(running_cluster, TOPIC)
    found = leader(running_cluster, TOPIC)
    with running_cluster.connect(found) as connection:
        assert produce(connection, TOPIC, encoded(3)).base_offset == 0
    wait_equal(running_cluster, TOPIC, 3)
    return found


@pytest.fixture
def victim(cluster: ProcessCluster, leading: int) -> Iterator[int]:
    """Return the attacked broker. Afterwards its process, error counters, log and reads must be unchanged."""
    before = cluster.describe(leading)
    with cluster.connect(leading) as bystander:
        yield leading
        assert read_all(bystander, TOPIC) == VALUES
        after = cluster.describe(leading)
    assert after.pid == before.pid
    for counter in ("requests.failed", "tasks.failed", "log.failures"):
        assert after.counters.get(counter, 0) == before.counters.get(counter, 0), counter
    assert replica(cluster, leading, TOPIC).log_end_offset == len(VALUES)
    assert leader(cluster, TOPIC) == leading


@pytest.fixture
def connection(cluster: ProcessCluster, victim: int) -> Iterator[BlockingConnection]:
    """Yield a connection that must be usable after each attack."""
    with cluster.connect(victim) as opened:
        yield opened
        assert isinstance(opened.request(Metadata(0, ()))[0], MetadataReply)


def refused(connection: BlockingConnection, request: Request, body: list[bytes] | None = None) -> BrokerError:
    with pytest.raises(BrokerError) as caught:
        connection.request(request, body or [])
    return caught.value


def send_header(connection: BlockingConnection, header: bytes) -> ErrorReply | HelloReply:
    """Send a frame unchanged. Return the response."""
    connection._socket.sendall(b"".join(encode_frame(header)))
    reply = connection._next().reply
    assert isinstance(reply, ErrorReply | HelloReply)
    return reply


# --- messages ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("header", "cid"),
    [
        (b"\x97\xa8metadata\x07\xc0\xc3\xc2\xc0" + b"\x91" * 50_000 + b"\xc0", -1),  # in an unknown field
        (b"\x93\xa8metadata\x07\x91\xa2\xff\xfe", 7),
        (b"\x92\xa2\xff\xfe\x07", -1),
        (b"\x93\xa8metadata\x07\x91\xdb\xff\xff\xff\xff", -1),
        (b"", -1),
    ],
    ids=["nested without end", "text that is none", "a tag that is none", "text of 4 GB", "nothing"],
)
def test_headers_that_break_a_decoder_are_refused(connection: BlockingConnection, header: bytes, cid: int) -> None:
    reply = send_header(connection, header)
    assert isinstance(reply, ErrorReply)
    assert (reply.code, reply.cid) == (ErrorCode.MALFORMED_FRAME, cid)
    assert "not a message" in reply.detail


def test_an_error_quotes_only_part_of_the_request(connection: BlockingConnection) -> None:
    reply = send_header(connection, msgspec.msgpack.encode(["x" * 500_000, 7]))
    assert isinstance(reply, ErrorReply)
    assert (reply.code, reply.cid) == (ErrorCode.UNKNOWN_API, 7)
    assert len(reply.detail) < 2000
    for config in ({"retention" * 20_000: "1"}, {"retention.ms": "1" * 200_000}):
        error = refused(connection, CreateTopic(0, "odd", 1, 1, 1000, config=config))
        assert error.code is ErrorCode.INVALID_CONFIG
        assert len(error.detail) < 2000


def test_a_second_hello_changes_nothing(connection: BlockingConnection) -> None:
    for _ in range(3):
        reply = send_header(connection, encode_message(msgspec.structs.replace(hello("other"), cid=9)))
        assert isinstance(reply, ErrorReply)
        assert (reply.code, reply.cid) == (ErrorCode.INVALID_REQUEST, 9)
        assert "Hello found" in reply.detail and "version 1" in reply.detail


@pytest.mark.parametrize(
    "request_",
    [
        Metadata(7, ("t",) * (MAX_PLAIN + 1), False),
        ListOffsets(7, 0, (ListOffsetsPartition("", 0, -1),) * (MAX_ENTRIES + 1)),
        Fetch(7, CONSUMER, -1, 0, 1, 1, 0, 0, -1, (FetchPartition("", 0, "", -1, 0, 1),) * (MAX_ENTRIES + 1)),
        Fetch(7, CONSUMER, -1, 0, 1, 1, 0, 0, 0, (), (("", 0),) * (MAX_ENTRIES + 1)),
        Produce(7, 1, 0, (ProducePartition("", 0, "", 0, 0),) * (MAX_ENTRIES + 1)),
        CreateTopic(7, "many", 1, 1, 1, assignment=((0,),) * (MAX_ENTRIES + 1)),
    ],
    ids=lambda request: type(request).__name__,
)
def test_more_entries_than_a_request_may_have_are_refused(connection: BlockingConnection, request_: Request) -> None:
    reply = send_header(connection, encode_message(request_))
    assert isinstance(reply, ErrorReply)
    assert (reply.code, reply.cid) == (ErrorCode.INVALID_REQUEST, 7) or reply.code == ErrorCode.FRAME_TOO_LARGE
    assert str(MAX_ENTRIES) in reply.detail or "1048576" in reply.detail


def test_a_topic_named_many_times_is_described_once(connection: BlockingConnection) -> None:
    reply, _ = connection.request(Metadata(0, (TOPIC,) * 50_000))
    assert isinstance(reply, MetadataReply)
    assert [topic.name for topic in reply.topics] == [TOPIC]


def test_a_correlation_id_used_twice_is_refused(connection: BlockingConnection) -> None:
    wanted = (FetchPartition(TOPIC, 0, "", -1, len(VALUES), 1000),)
    waiting = encode_message(Fetch(77, CONSUMER, -1, 300, 1, 1000, 0, 0, -1, wanted))
    connection._socket.sendall(b"".join(encode_frame(waiting) * 3))
    replies = [connection._next().reply for _ in range(3)]
    for reply in replies[:2]:
        assert isinstance(reply, ErrorReply)
        assert (reply.code, reply.cid) == (ErrorCode.INVALID_REQUEST, 77) and "77" in reply.detail
    assert isinstance(replies[2], FetchReply)


# --- numbers ----------------------------------------------------------------------------------------------------


def fetch_request(**changes: object) -> Fetch:
    wanted = FetchPartition(TOPIC, 0, "", -1, 0, 1 << 20)
    at = {name: changes.pop(name) for name in list(changes) if name.startswith("partition_")}
    wanted = msgspec.structs.replace(wanted, **{name.removeprefix("partition_"): value for name, value in at.items()})
    request = Fetch(0, CONSUMER, -1, 0, 1, 1 << 20, 0, 0, -1, (wanted,))
    return msgspec.structs.replace(request, **changes)


@pytest.mark.parametrize("offset", [len(VALUES), len(VALUES) + 1])
def test_a_deposed_leader_refuses_a_consumer_of_its_successor(connection: BlockingConnection, offset: int) -> None:
    """The consumer knows that this leader is deposed, so it must not use this log's records or end."""
    reply, _ = connection.request(fetch_request(partition_fetch_offset=offset, partition_last_epoch=1000))
    assert isinstance(reply, FetchReply)
    (answer,) = reply.partitions
    assert (answer.code, answer.diverging) == (ErrorCode.UNKNOWN_LEADER_EPOCH, None), answer


@pytest.mark.parametrize("number", NUMBERS)
def test_impossible_numbers_in_a_fetch_are_refused(connection: BlockingConnection, number: int) -> None:
    def code_of(request: Fetch) -> int:
        reply, body = connection.request(request)
        assert isinstance(reply, FetchReply)
        assert reply.code or len(reply.partitions) == 1
        assert len(body) < 10_000
        return reply.code or reply.partitions[0].code

    assert code_of(fetch_request(partition_fetch_offset=number)) == ErrorCode.OFFSET_OUT_OF_RANGE
    assert code_of(fetch_request(partition_partition=number)) == ErrorCode.UNKNOWN_TOPIC_OR_PARTITION
    assert code_of(fetch_request(partition_max_bytes=number)) == ErrorCode.NONE
    assert code_of(fetch_request(min_bytes=number, max_wait_ms=20)) == ErrorCode.NONE
    assert code_of(fetch_request(max_wait_ms=number)) == ErrorCode.NONE
    if number != -1:
        assert code_of(fetch_request(partition_leader_epoch=number)) != ErrorCode.NONE
        assert code_of(fetch_request(session_epoch=number)) == ErrorCode.FETCH_SESSION_ID_NOT_FOUND
        assert refused(connection, fetch_request(isolation=number)).code is ErrorCode.INVALID_REQUEST
        # The client pretends to be a follower with a position: a broker without a replica must not count.
        strange = fetch_request(replica_id=number, incarnation=1, partition_leader_epoch=0)
        assert refused(connection, strange).code is ErrorCode.CLUSTER_AUTHORIZATION_FAILED
        assert refused(connection, fetch_request(replica_id=1, incarnation=number)).code is ErrorCode.INVALID_REQUEST
    if number > 0:
        assert code_of(fetch_request(max_bytes=number)) == ErrorCode.NONE
    else:
        error = refused(connection, fetch_request(max_bytes=number))
        assert (
            error.code is ErrorCode.INVALID_REQUEST
            and f"max_bytes: expected at least 1, found {number}" in error.detail
        )


@pytest.mark.parametrize("number", NUMBERS)
def test_a_follower_beyond_the_end_of_the_log_is_refused(
    cluster: ProcessCluster, victim: int, leading: int, number: int
) -> None:
    """The follower's position would become the high watermark of all."""
    epoch = cluster.metadata(leading, TOPIC).topics[0].partitions[0].leader_epoch
    follower = next(broker for broker in cluster.metadata(leading).brokers if broker.broker_id != leading)
    for last_epoch in (-1, epoch, number):
        request = fetch_request(
            replica_id=follower.broker_id,
            incarnation=follower.incarnation,
            partition_leader_epoch=epoch,
            partition_fetch_offset=number,
            partition_last_epoch=last_epoch,
        )
        with cluster.connect(victim, identity=cluster.as_broker(follower.broker_id)) as connection:
            reply, body = connection.request(request)
        assert isinstance(reply, FetchReply)
        answer = reply.partitions[0]
        assert answer.code == ErrorCode.OFFSET_OUT_OF_RANGE or answer.diverging is not None
        assert (answer.high_watermark, len(body)) == (len(VALUES), 0)


@pytest.mark.parametrize("number", NUMBERS)
def test_impossible_numbers_elsewhere_are_refused(connection: BlockingConnection, number: int) -> None:
    wanted = tuple(
        ListOffsetsPartition(TOPIC, *place) for place in ((0, number), (number, -1), (0, -1, number), (0, -2, number))
    )
    reply, _ = connection.request(ListOffsets(0, 0, wanted))
    assert len(reply.results) == 4  # type: ignore[union-attr]
    results = [
        CreateTopic(0, "odd", number, 1, number) if number != -1 else CreateTopic(0, "odd", 0, 1, number),
        CreateTopic(0, "odd", 1, number if number != -1 else 0, number),
        CreateTopic(0, "odd", 1, 1, number, assignment=((number,),)),
    ]
    codes = {refused(connection, request).code for request in results}
    assert codes == {
        ErrorCode.INVALID_PARTITIONS,
        ErrorCode.INVALID_REPLICATION_FACTOR,
        ErrorCode.INVALID_REPLICA_ASSIGNMENT,
    }
    for place in (ProducePartition(TOPIC, 0, "", number, 0), ProducePartition(TOPIC, 0, "", 1, number)):
        error = refused(connection, Produce(0, 1, number, (place,)))
        assert error.code is ErrorCode.INVALID_REQUEST
        assert str(number) in error.detail or "announced" in error.detail


def test_a_request_larger_than_a_zookeeper_node_is_refused(connection: BlockingConnection) -> None:
    wide = pa.schema([(f"{number:04}" * 25, pa.int64()) for number in range(1000)]).serialize().to_pybytes()
    error = refused(connection, CreateTopic(0, "vast", 100_000, 3, 1000, schema=wide))
    assert error.code is ErrorCode.INVALID_PARTITIONS and "100000" in error.detail
    error = refused(connection, CreateTopic(0, "vast", 1, 1, 1000, schema=bytes(900_000)))
    assert error.code is ErrorCode.CORRUPT_MESSAGE and "900000" in error.detail


def test_a_topic_of_very_many_partitions_does_not_block_a_broker(
    cluster: ProcessCluster, connection: BlockingConnection, victim: int
) -> None:
    """The broker creates the topic's replicas in slices, and serves others between them."""
    before = cluster.describe(victim).counters["control.slices"]
    with cluster.connect(victim) as other:
        other.send(CreateTopic(0, "thousandfold", 1000, 3, 30_000))
        while not any(found.topic == "thousandfold" for found in cluster.describe(victim).replicas):
            pass
        reply, _ = other.receive()
        assert isinstance(reply, CreateTopicReply)
    assert cluster.describe(victim).counters["control.slices"] >= before + 10
    assert connection.request(DeleteTopic(0, "thousandfold", 30_000))[0] == Ack(2)


# --- bodies -----------------------------------------------------------------------------------------------------


def test_wrong_counts_and_lengths_with_a_right_sum_are_refused(connection: BlockingConnection) -> None:
    """The sum is right, and each part is wrong."""
    _, body = produce_request(TOPIC, [encoded(3)])
    total = sum(map(len, body))
    for parts in (
        [(0, 8), (1, total - HEADER_BYTES - 8)],
        [(2, 0), (0, total - 2 * HEADER_BYTES)],
        [(total // HEADER_BYTES, total % HEADER_BYTES)],
    ):
        partitions = tuple(ProducePartition(TOPIC, 0, "", count, length) for count, length in parts)
        reply, _ = connection.request(Produce(0, -1, 1000, partitions), body)
        assert isinstance(reply, ProduceReply)
        codes = {result.code for result in reply.results}
        assert codes <= {ErrorCode.CORRUPT_MESSAGE, ErrorCode.INVALID_RECORD}, reply


def test_a_response_is_bounded_for_any_requested_size(cluster: ProcessCluster, connection: BlockingConnection) -> None:
    """The bound is ``fetch.max.bytes``. One batch is always returned, or no reader would make progress."""
    first = leader(cluster, TOPIC)
    create_topic(cluster, "much", assignment=((first, *({0, 1, 2} - {first})),))
    for _ in range(4):
        assert produce(connection, "much", encoded(1, "x" * 300_000)).code == ErrorCode.NONE
    greedy = FetchPartition("much", 0, "", -1, 0, 2**40)
    reply, body = connection.request(Fetch(0, CONSUMER, -1, 0, 1, 2**40, 0, 0, -1, (greedy,)))
    assert isinstance(reply, FetchReply)
    assert reply.partitions[0].batch_count == 1 and 300_000 < len(body) < 400_000


def test_a_partition_named_twice_in_one_request_is_refused(connection: BlockingConnection) -> None:
    wanted = FetchPartition(TOPIC, 0, "", -1, 0, 1 << 20)
    reply, body = connection.request(Fetch(0, CONSUMER, -1, 0, 1, 1 << 20, 0, 0, -1, (wanted,) * 1000))
    assert isinstance(reply, FetchReply)
    assert len(reply.partitions) == 1 and len(body) < 10_000
    bad = ProducePartition(TOPIC, 0, "", 0, 0)
    produced, _ = connection.request(Produce(0, -1, 1000, (bad,) * 1000))
    assert isinstance(produced, ProduceReply)
    assert {result.code for result in produced.results} == {ErrorCode.INVALID_RECORD}


def test_a_batch_with_a_wrong_header_and_valid_checksum_is_refused(connection: BlockingConnection) -> None:
    good = encoded(3)
    lies: list[dict[str, int]] = [
        {"length": 2**32 - 8},
        {"length": 0},
        {"record_count": 2**32 - 1, "offset_span": 2**32 - 1},
        {"record_count": 0, "offset_span": 0},
        {"offset_span": 2**32 - 1},
        {"schema_id": -1},
        {"max_timestamp": 2**63 - 1},
        {"flags": 0x0FFF},
        {"offset_array_length": 2**32 - 1},
        {"producer_id": 5, "producer_epoch": 0, "first_sequence": 2**31 - 1},
        {"producer_id": 5, "producer_epoch": -1, "first_sequence": 7},
    ]
    for lie in lies:
        result = produce(connection, TOPIC, (good.header._replace(**lie), good.body))
        assert result.code in {
            ErrorCode.CORRUPT_MESSAGE,
            ErrorCode.INVALID_RECORD,
            ErrorCode.SCHEMA_OUTDATED,
            ErrorCode.OUT_OF_ORDER_SEQUENCE_NUMBER,
        }, (lie, result)
        assert result.base_offset == -1 and result.detail


def test_truncated_frames_do_no_harm(cluster: ProcessCluster, victim: int) -> None:
    request, body = produce_request(TOPIC, [encoded(3)])
    whole = b"".join(bytes(part) for part in encode_frame(encode_message(request), body))
    with contextlib.ExitStack() as stack:
        peers = [
            stack.enter_context(socket.create_connection(("127.0.0.1", cluster.slots[victim].port), timeout=5))
            for _ in range(40)
        ]
        greeting = b"".join(bytes(part) for part in encode_frame(encode_message(hello("half"))))
        for number, peer in enumerate(peers):
            peer.sendall(greeting + whole[: number * len(whole) // 40])
        for peer in peers[:20]:
            # The client closes with a reset, while the broker handles the frame.
            peer.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


# --- control updates --------------------------------------------------------------------------------------------


def update(cluster: ProcessCluster, broker_id: int, **changes: object) -> ControlUpdate:
    """Return an update that the broker would follow: with its own incarnation and the controller's epoch."""
    epoch = cluster.metadata(broker_id).controller_epoch
    told = ControlUpdate(0, "stranger", epoch, cluster.describe(broker_id).incarnation, False, None, (), ())
    return msgspec.structs.replace(told, **changes)


@pytest.mark.parametrize("number", NUMBERS)
def test_epochs_that_zookeeper_cannot_reach_are_refused(
    cluster: ProcessCluster, connection: BlockingConnection, victim: int, number: int
) -> None:
    good = LeaderAndIsr(victim, 1, (victim,), 1)
    for state in (
        msgspec.structs.replace(good, leader_epoch=number),
        msgspec.structs.replace(good, controller_epoch=number),
        msgspec.structs.replace(good, leader=number),
    ):
        if number != -1:
            decision = PartitionDecision("x", "id", 0, state, 1, (victim,))
            error = refused(connection, update(cluster, victim, partitions=(decision,)))
            assert error.code is ErrorCode.INVALID_REQUEST, state
    bad_partition = PartitionDecision("x", "id", number, good, 1, (victim,))
    assert refused(connection, update(cluster, victim, partitions=(bad_partition,))).code is ErrorCode.INVALID_REQUEST
    bad_port = BrokerEndpoint(7, "127.0.0.1", number, 1)
    assert refused(connection, update(cluster, victim, brokers=(bad_port,))).code is ErrorCode.INVALID_REQUEST
    if number == -1:
        with cluster.connect(victim, identity=Identity(SenderKind.CONTROLLER, -1, -1)) as controller:
            reply, _ = controller.request(update(cluster, victim, controller_epoch=-1))
        assert isinstance(reply, ControlUpdateReply) and reply.code == ErrorCode.STALE_CONTROLLER_EPOCH
    else:
        error = refused(connection, update(cluster, victim, controller_epoch=number))
        assert error.code is ErrorCode.INVALID_REQUEST


def test_a_giant_epoch_for_another_incarnation_is_ignored(
    cluster: ProcessCluster, connection: BlockingConnection, victim: int
) -> None:
    told = update(cluster, victim, controller_epoch=2**31 - 1)
    assert refused(connection, told).code is ErrorCode.CLUSTER_AUTHORIZATION_FAILED
    with cluster.connect(victim, identity=Identity(SenderKind.CONTROLLER, -1, 2**31 - 1)) as controller:
        for incarnation in (told.incarnation - 1, told.incarnation + 1):
            reply, _ = controller.request(msgspec.structs.replace(told, incarnation=incarnation))
            assert isinstance(reply, ControlUpdateReply) and reply.code == ErrorCode.STALE_BROKER_EPOCH
    assert cluster.metadata(victim).controller_epoch < 1000


def test_topics_that_cannot_be_hosted_are_refused(
    cluster: ProcessCluster, connection: BlockingConnection, victim: int
) -> None:
    """The invalid topics share an update with a good one, which is hosted nevertheless."""
    state = LeaderAndIsr(victim, 0, (victim,), 1)
    good = schema_message(DEFAULT_SCHEMA)
    topics = {"no-schema": (), "bad-schema": (TopicSchema(0, b"none"),), "good": (TopicSchema(0, good),)}
    changes = tuple(TopicChange(name, "id", schemas, (), None, {}) for name, schemas in topics.items())
    decisions = tuple(PartitionDecision(name, "id", 0, state, 0, (victim,)) for name in topics)
    # The controller is stopped: its updates would count as older ones. Its next term starts new numbers.
    cluster.stop_controller()
    try:
        told = update(cluster, victim, topics=changes, partitions=decisions, sequence=2**40)
        identity = Identity(SenderKind.CONTROLLER, -1, told.controller_epoch)
        with cluster.connect(victim, identity=identity) as controller:
            reply, _ = controller.request(told)
        assert isinstance(reply, ControlUpdateReply)
        assert {(name, code) for name, _, code, _ in reply.failed} == {
            ("no-schema", ErrorCode.INVALID_REQUEST),
            ("bad-schema", ErrorCode.CORRUPT_MESSAGE),
        }
        directory = Path(replica(cluster, victim, "good").directory)
        assert produce(connection, "good", encoded(1)).code == ErrorCode.NONE
        assert directory.exists()
        assert not [found for found in directory.parent.iterdir() if "schema" in found.name]
        escaping = TopicChange("../escaped", "id", (TopicSchema(0, good),), (), None, {})
        decision = PartitionDecision("../escaped", "id", 0, state, 0, (victim,))
        with cluster.connect(victim, identity=identity) as controller:
            reply, _ = controller.request(msgspec.structs.replace(told, topics=(escaping,), partitions=(decision,)))
        assert isinstance(reply, ControlUpdateReply)
        assert reply.code == ErrorCode.INVALID_TOPIC_EXCEPTION and "../escaped" in reply.detail
        assert not list(cluster.base_dir.rglob("escaped*"))
    finally:
        cluster.start_controller()
    wait_until(lambda: not directory.exists(), PATIENCE_S, "the next controller to have its way")


# --- connections ------------------------------------------------------------------------------------------------


def test_connections_above_the_limit_get_an_error_and_are_closed(cluster: ProcessCluster, victim: int) -> None:
    """Each connection uses a file descriptor, which a log would lack in the end."""
    with contextlib.ExitStack() as stack, pytest.raises(BrokerError) as caught:
        for _ in range(250):
            stack.enter_context(cluster.connect(victim))
    assert caught.value.code is ErrorCode.THROTTLING_QUOTA_EXCEEDED
    assert "180 connections" in caught.value.detail
