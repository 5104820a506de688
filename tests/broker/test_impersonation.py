"""Tests that a peer with only the protocol cannot be a controller, a follower or a coordinator, and that a proof is
valid for its own connection only."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import msgspec
import pytest

from sparklog.broker.lifecycle.secret_file import new_secret
from sparklog.errors import BrokerError, ErrorCode
from sparklog.net.blocking import BlockingConnection
from sparklog.net.greeting import Credentials
from sparklog.protocol.connection import hello
from sparklog.protocol.frames import encode_frame
from sparklog.protocol.messages import (
    Ack,
    CommitOffsets,
    CommitOffsetsReply,
    ControlUpdate,
    ControlUpdateReply,
    ErrorReply,
    Fetch,
    FetchPartition,
    FetchReply,
    GroupOffset,
    HelloReply,
    ListParticipants,
    Prove,
    Reply,
    Request,
    TransactionMarker,
    VerifyTransaction,
    WriteMarkers,
    decode_reply,
    encode_message,
)
from sparklog.protocol.proof import Identity, KeyRing, check, offer
from sparklog.protocol.senders import SenderKind
from sparklog.testing.process_cluster import ProcessCluster, wait_until
from tests.broker.support import encoded, fetch, produce
from tests.broker.topics import create_topic, leader, wait_isr

PATIENCE_S = 60.0
NOT_AUTHORIZED = ErrorCode.CLUSTER_AUTHORIZATION_FAILED


def refused(connection: BlockingConnection, request: Request) -> ErrorCode:
    with pytest.raises(BrokerError) as error:
        reply, _ = connection.request(request)
        pytest.fail(f"{request} was answered with {reply}")
    return error.value.code


@pytest.fixture
def topic(cluster: ProcessCluster, request: pytest.FixtureRequest) -> Iterator[str]:
    name = f"impersonation-{request.node.name.translate({ord('['): '-', ord(']'): '-'})}"
    create_topic(cluster, name, assignment=((0, 1, 2),))
    wait_isr(cluster, name, {0, 1, 2})
    yield name


def follower_fetch(
    cluster: ProcessCluster, topic: str, replica_id: int, offset: int, *, incarnation: int | None = None
) -> Fetch:
    """Return the fetch by which that follower would claim everything below ``offset``."""
    told = cluster.metadata(0, topic)
    (found,) = told.topics
    epoch = found.partitions[0].leader_epoch
    known = next(broker.incarnation for broker in told.brokers if broker.broker_id == replica_id)
    wanted = FetchPartition(topic, 0, found.topic_id, epoch, offset, 1 << 20, last_epoch=epoch)
    return Fetch(0, replica_id, known if incarnation is None else incarnation, 0, 1, 1 << 20, 0, 0, -1, (wanted,))


# --- a controller ----------------------------------------------------------------------------------------------------


def test_a_stranger_cannot_be_a_controller(cluster: ProcessCluster, topic: str) -> None:
    """After an empty full update every log of the broker would belong to no replica."""
    for broker_id, slot in cluster.slots.items():
        with cluster.connect(broker_id) as connection:
            for epoch in (2**31 - 1, cluster.metadata(broker_id).controller_epoch):
                told = ControlUpdate(0, "stranger", epoch, connection.hello.incarnation, True, None, (), ())
                assert refused(connection, told) is NOT_AUTHORIZED
            deletes = msgspec.structs.replace(told, deleted=((topic, cluster.metadata(0, topic).topics[0].topic_id),))
            assert refused(connection, deletes) is NOT_AUTHORIZED
            assert produce_one(cluster, topic) == ErrorCode.NONE
        assert slot.log_dir.joinpath(f"{topic}-0").is_dir()
    assert {found.name for found in cluster.metadata(1).topics} >= {topic}


def produce_one(cluster: ProcessCluster, topic: str) -> int:
    with cluster.connect(leader(cluster, topic)) as connection:
        return produce(connection, topic, encoded(1)).code


def test_a_broker_cannot_act_as_controller_nor_with_another_epoch(cluster: ProcessCluster, topic: str) -> None:
    epoch = cluster.metadata(0).controller_epoch
    told = ControlUpdate(0, "c", epoch, cluster.describe(0).incarnation, True, None, (), ())
    with cluster.connect(0, identity=cluster.as_broker(1)) as connection:
        assert refused(connection, told) is NOT_AUTHORIZED
    with cluster.connect(0, identity=Identity(SenderKind.CONTROLLER, -1, epoch)) as connection:
        assert refused(connection, msgspec.structs.replace(told, controller_epoch=2**31 - 1)) is NOT_AUTHORIZED
        stale = msgspec.structs.replace(told, incarnation=told.incarnation + 7)
        reply, _ = connection.request(stale)
        assert isinstance(reply, ControlUpdateReply), "the broker must follow the controller itself"
        assert reply.code == ErrorCode.STALE_BROKER_EPOCH


# --- a follower ------------------------------------------------------------------------------------------------------


def test_a_client_cannot_acknowledge_records_as_a_follower(cluster: ProcessCluster, topic: str) -> None:
    """The followers are away: the leader's own records must not become committed."""
    assert produce_one(cluster, topic) == ErrorCode.NONE
    wait_until(lambda: high_watermark(cluster, topic) == 1, PATIENCE_S, "the first record to be committed")
    for broker_id in (1, 2):
        cluster.kill(broker_id)
    try:
        with cluster.connect(0) as connection:
            assert produce(connection, topic, encoded(1, "alone"), acks=1).code == ErrorCode.NONE
            for broker_id in (1, 2):
                assert refused(connection, follower_fetch_of(cluster, topic, broker_id, 2)) is NOT_AUTHORIZED
            with cluster.connect(0, identity=Identity(SenderKind.BROKER, 1, 2**31 - 1)) as other:
                assert refused(other, follower_fetch_of(cluster, topic, 2, 2)) is NOT_AUTHORIZED
            answer, _ = fetch(connection, topic, 1)
            assert (answer.code, answer.high_watermark, answer.batch_count) == (ErrorCode.NONE, 1, 0) or (
                set(cluster.metadata(0, topic).topics[0].partitions[0].isr) == {0}
            ), "the leader alone may commit only when it is the whole ISR"
    finally:
        cluster.start_brokers()
        wait_isr(cluster, topic, {0, 1, 2})


def follower_fetch_of(cluster: ProcessCluster, topic: str, replica_id: int, offset: int) -> Fetch:
    (found,) = cluster.metadata(0, topic).topics
    epoch = found.partitions[0].leader_epoch
    wanted = FetchPartition(topic, 0, found.topic_id, epoch, offset, 1 << 20, last_epoch=epoch)
    return Fetch(0, replica_id, 2**31 - 1, 0, 1, 1 << 20, 0, 0, -1, (wanted,))


def high_watermark(cluster: ProcessCluster, topic: str) -> int:
    with cluster.connect(0) as connection:
        return fetch(connection, topic, 0)[0].high_watermark


def test_an_invented_incarnation_does_not_exclude_the_real_follower(cluster: ProcessCluster, topic: str) -> None:
    with cluster.connect(0) as connection:
        for incarnation in (2**31 - 1, None):
            request = follower_fetch(cluster, topic, 1, 0, incarnation=incarnation)
            assert refused(connection, request) is NOT_AUTHORIZED
        assert refused(connection, follower_fetch(cluster, topic, 1, 0, incarnation=2**62)) is ErrorCode.INVALID_REQUEST
    assert produce_one(cluster, topic) == ErrorCode.NONE, "all in-sync replicas have the record"
    assert set(cluster.metadata(0, topic).topics[0].partitions[0].isr) == {0, 1, 2}


def test_all_replication_is_authenticated(cluster: ProcessCluster, topic: str) -> None:
    assert produce_one(cluster, topic) == ErrorCode.NONE
    for broker_id in cluster.slots:
        assert all(broker.proves for broker in cluster.metadata(broker_id).brokers)
        assert "requests.unproven" not in cluster.describe(broker_id).counters


# --- a coordinator ---------------------------------------------------------------------------------------------------


def test_a_stranger_cannot_be_a_coordinator(cluster: ProcessCluster, topic: str) -> None:
    markers = tuple(TransactionMarker(topic, 0, (), ((7, 0),), "", number, 2**31 - 1) for number in range(50))
    handed_over = CommitOffsets(0, "impersonated", (GroupOffset(topic, 0, 0),), ("key", 1))
    requests: list[Request] = [
        WriteMarkers(0, markers),
        handed_over,
        VerifyTransaction(0, "key", 7, 0, topic, 0),
        ListParticipants(0, (7,)),
    ]
    with cluster.connect(0) as connection:
        for request in requests:
            assert refused(connection, request) is NOT_AUTHORIZED, request
        for epoch in (2**31, 2**62):
            beyond = msgspec.structs.replace(markers[0], coordinator_epoch=epoch)
            assert refused(connection, WriteMarkers(0, (beyond,))) is ErrorCode.INVALID_REQUEST


def test_a_members_commit_needs_no_proof(cluster: ProcessCluster, topic: str) -> None:
    from tests.broker.transactions import find_coordinator

    wait_until(lambda: find_coordinator(cluster, "group", "plain") >= 0, PATIENCE_S, "a coordinator")

    def committed() -> bool:
        with cluster.connect(find_coordinator(cluster, "group", "plain")) as connection:
            try:
                reply, _ = connection.request(CommitOffsets(0, "plain", (GroupOffset(topic, 0, 0),)))
            except BrokerError as error:
                assert error.retriable, error
                return False
        assert isinstance(reply, CommitOffsetsReply)
        return reply.results[0].code == ErrorCode.NONE

    wait_until(committed, PATIENCE_S, "the offset to be committed")


# --- the handshake, byte by byte -------------------------------------------------------------------------------------


class Peer:
    """A bare connection on which a test sends any bytes."""

    def __init__(self, cluster: ProcessCluster, broker_id: int) -> None:
        self._socket = socket.create_connection(("127.0.0.1", cluster.slots[broker_id].port), timeout=30)
        self._stream = self._socket.makefile("rb")

    def ask(self, request: Request) -> Reply | None:
        """Return the response, or None if the broker closes the connection."""
        self._socket.sendall(
            b"".join(map(bytes, encode_frame(encode_message(msgspec.structs.replace(request, cid=9)))))
        )
        prefix = self._stream.read(8)
        if len(prefix) < 8:
            return None
        frame_bytes, header_bytes = int.from_bytes(prefix[:4], "little"), int.from_bytes(prefix[4:], "little")
        return decode_reply(self._stream.read(frame_bytes - 4)[:header_bytes])

    @property
    def closed(self) -> bool:
        return self._stream.read(1) == b""

    def close(self) -> None:
        self._stream.close()
        self._socket.close()


@pytest.fixture
def peer(cluster: ProcessCluster) -> Iterator[Peer]:
    peer = Peer(cluster, 0)
    yield peer
    peer.close()


def test_a_wrong_secret_proves_nothing(cluster: ProcessCluster) -> None:
    slot = cluster.slots[0]
    strangers = Credentials(KeyRing([new_secret()]), lambda: Identity(SenderKind.BROKER, 1, 1))
    with pytest.raises(BrokerError) as error:
        BlockingConnection(slot.host, slot.port, client_id="test", credentials=strangers)
    assert error.value.code is NOT_AUTHORIZED


def test_a_proof_is_valid_for_one_connection_only(cluster: ProcessCluster, peer: Peer) -> None:
    """The proof is recorded and sent again to the same broker, with the same hello."""
    said = offer(hello("replayed"), cluster.keys, Identity(SenderKind.BROKER, 1, 1), b"n" * 32)
    reply = peer.ask(said)
    assert isinstance(reply, HelloReply)
    prove = Prove(0, check(said, reply, cluster.keys, expected=0, required=True))
    assert isinstance(peer.ask(prove), Ack)
    again = Peer(cluster, 0)
    try:
        assert isinstance(again.ask(said), HelloReply)
        answer = again.ask(prove)
        assert isinstance(answer, ErrorReply) and answer.code == NOT_AUTHORIZED
        assert again.closed
    finally:
        again.close()
    answer = peer.ask(prove)
    assert isinstance(answer, ErrorReply) and answer.code == ErrorCode.INVALID_REQUEST, "nor a second time alone"


def test_a_brokers_own_proof_sent_back_proves_nothing(cluster: ProcessCluster, peer: Peer) -> None:
    said = offer(hello("reflected"), cluster.keys, Identity(SenderKind.BROKER, 1, 1), b"n" * 32)
    reply = peer.ask(said)
    assert isinstance(reply, HelloReply) and reply.proof
    answer = peer.ask(Prove(0, reply.proof))
    assert isinstance(answer, ErrorReply) and answer.code == NOT_AUTHORIZED
    assert peer.closed


def test_a_broker_does_not_prove_itself_to_itself(cluster: ProcessCluster, peer: Peer) -> None:
    said = offer(hello("mirror"), cluster.keys, Identity(SenderKind.BROKER, 0, 1), b"n" * 32)
    answer = peer.ask(said)
    assert isinstance(answer, ErrorReply) and answer.code == ErrorCode.INVALID_REQUEST
    assert peer.closed


def test_a_proof_that_was_not_offered_is_refused(peer: Peer) -> None:
    assert isinstance(peer.ask(hello("plain")), HelloReply)
    answer = peer.ask(Prove(0, b"p" * 32))
    assert isinstance(answer, ErrorReply) and answer.code == ErrorCode.INVALID_REQUEST
    assert peer.closed


def test_a_client_learns_nothing_about_the_secret(peer: Peer) -> None:
    reply = peer.ask(hello("plain"))
    assert isinstance(reply, HelloReply)
    assert (reply.nonce, reply.key_id, reply.proof) == (b"", "", b"")


def test_only_a_follower_may_fetch_as_a_follower(cluster: ProcessCluster, topic: str) -> None:
    with cluster.connect(0, identity=cluster.as_broker(1)) as connection:
        assert refused(connection, follower_fetch(cluster, topic, 2, 0)) is NOT_AUTHORIZED
        reply, _ = connection.request(follower_fetch(cluster, topic, 1, 0))
        assert isinstance(reply, FetchReply)
