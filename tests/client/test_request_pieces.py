"""Tests of clients with more partitions than one request may name: they send several requests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from sparklog.client.admin.admin import Admin
from sparklog.client.cluster.request_pieces import pieces
from sparklog.client.consumer.consumer import Consumer
from sparklog.client.producer.partition_queues import ProducerIdentity
from sparklog.client.producer.producer import Producer
from sparklog.client.producer.transaction_run import TransactionRun
from sparklog.client.producer.transaction_session import OngoingTransaction
from sparklog.model import TopicPartition
from sparklog.net.server_connection import ServerConnection
from sparklog.protocol.fields import IN_ONE_REQUEST, MAX_ENTRIES
from sparklog.protocol.header_limits import MAX_HEADER_BYTES
from sparklog.protocol.messages import (
    AlterReassignments,
    CommitOffsets,
    CommitOffsetsReply,
    DeletedRecords,
    DeleteRecords,
    DeleteRecordsReply,
    ElectLeaders,
    ElectLeadersReply,
    Fetch,
    FetchPartition,
    ListOffsets,
    PartitionResult,
    Reply,
    Request,
    encode_message,
)
from tests.client.fake_cluster import FakeBroker, FakeCluster

COUNT = MAX_ENTRIES + 1
ALL = [TopicPartition("t", number) for number in range(COUNT)]


@pytest.fixture(scope="module")
def fake() -> Iterator[FakeCluster]:
    with FakeCluster(brokers=1) as cluster:
        cluster.create("t", partitions=COUNT)
        cluster.fault(0, _answer_what_the_fake_does_not)
        yield cluster


def _answer_what_the_fake_does_not(broker: FakeBroker, connection: ServerConnection, request: Request) -> bool:
    reply: Reply
    match request:
        case DeleteRecords():
            reply = DeleteRecordsReply(request.cid, tuple(DeletedRecords(0, 0) for _ in request.partitions))
        case ElectLeaders():
            results = tuple(PartitionResult(*tp, 84) for tp in request.partitions or ())
            reply = ElectLeadersReply(request.cid, results)
        case _:
            return False
    connection.reply(reply)
    return True


def sent(fake: FakeCluster, kind: type) -> list[Request]:
    return [request for request in fake.brokers[0].requests if isinstance(request, kind)]


def test_offsets_of_very_many_partitions_are_listed(fake: FakeCluster) -> None:
    with Admin(fake.bootstrap) as admin:
        assert admin.list_offsets(ALL) == dict.fromkeys(ALL, 0)
    assert len(sent(fake, ListOffsets)) == 3


def test_records_of_very_many_partitions_are_deleted(fake: FakeCluster) -> None:
    with Admin(fake.bootstrap) as admin:
        assert admin.delete_records(dict.fromkeys(ALL)) == dict.fromkeys(ALL, 0)


def test_leaders_of_very_many_partitions_are_elected(fake: FakeCluster) -> None:
    with Admin(fake.bootstrap) as admin:
        assert admin.elect_leaders(ALL) == {}
    assert len(sent(fake, ElectLeaders)) == 3


def test_very_many_moves_are_started_and_cancelled(fake: FakeCluster) -> None:
    with Admin(fake.bootstrap) as admin:
        admin.reassign(dict.fromkeys(ALL, (0,)))
        assert len(fake.moves) == COUNT
        assert admin.cancel_reassignment(ALL) == ALL
    assert not fake.moves
    assert len(sent(fake, AlterReassignments)) == 6


def test_very_many_offsets_are_committed(fake: FakeCluster) -> None:
    with Admin(fake.bootstrap) as admin:
        admin.commit_offsets("g", dict.fromkeys(ALL, 3))
    assert len(fake.groups.offsets) == COUNT
    found = sent(fake, CommitOffsets)
    assert len(found) == 3
    assert all(isinstance(one, CommitOffsets) and len(one.offsets) <= IN_ONE_REQUEST for one in found)


def test_one_refused_commit_of_several_is_reported(fake: FakeCluster) -> None:
    def refuse_first(broker: FakeBroker, connection: ServerConnection, request: Request) -> bool:
        if not isinstance(request, CommitOffsets) or request.offsets[0].partition:
            return False
        results = [PartitionResult("t", one.partition, 42, "not that") for one in request.offsets]
        connection.reply(CommitOffsetsReply(request.cid, tuple(results)))
        return True

    fake.fault(0, refuse_first)
    fake.groups.offsets.clear()
    with Admin(fake.bootstrap) as admin, pytest.raises(Exception, match="not that"):
        admin.commit_offsets("g", dict.fromkeys(ALL, 3))
    assert len(fake.groups.offsets) == COUNT - IN_ONE_REQUEST


def test_a_consumer_of_very_many_partitions_reads_all(fake: FakeCluster) -> None:
    marked = [0, IN_ONE_REQUEST, MAX_ENTRIES]
    with Producer(fake.bootstrap) as producer:
        for number in marked:
            producer.send("t", b"x", partition=number).result(30)
    fake.brokers[0].requests.clear()
    read: list[int] = []
    with Consumer(fake.bootstrap, "t", log_columns=True) as consumer:
        for _ in range(100):
            for found in consumer.poll(timeout_s=1.0):
                read += found.column("_partition").to_pylist()
            if len(read) == len(marked):
                break
    assert sorted(read) == marked
    for request in sent(fake, Fetch):
        assert isinstance(request, Fetch) and len(request.partitions) <= MAX_ENTRIES
        assert len(encode_message(request)) <= MAX_HEADER_BYTES


def test_pieces_have_all_entries_in_order() -> None:
    assert list(pieces((1, 2, 3, 4, 5), 2)) == [(1, 2), (3, 4), (5,)]
    assert list(pieces((), 2)) == [()]
    assert [len(piece) for piece in pieces(range(IN_ONE_REQUEST + 1))] == [IN_ONE_REQUEST, 1]


def test_the_largest_piece_of_entries_fits_into_a_header() -> None:
    """The test uses the longest topic name."""
    wanted = FetchPartition("t" * 249, 99_999, "i" * 32, 1 << 30, 1 << 62, 1 << 30, 1 << 30, 1 << 62)
    request = Fetch(1 << 40, -1, -1, 500, 1, 1 << 30, 1, 0, -1, (wanted,) * IN_ONE_REQUEST)
    assert len(encode_message(request)) <= MAX_HEADER_BYTES


def test_a_registration_of_partitions_with_long_names_fits_into_a_header() -> None:
    """A transaction that writes to more partitions registers them with several requests."""
    transaction = OngoingTransaction.__new__(OngoingTransaction)
    transaction.run = TransactionRun("key", "run", -1, timeout_s=1.0)
    transaction.identity = ProducerIdentity(1, 0)
    transaction.registered = set()
    wanted = [TopicPartition("t" * 249, number) for number in range(MAX_ENTRIES)]
    missing = transaction._missing(lambda: wanted)
    assert len(encode_message(transaction._addition(missing))) <= MAX_HEADER_BYTES
    transaction.registered.update(missing)
    assert transaction._missing(lambda: wanted)[0] == wanted[len(missing)]
