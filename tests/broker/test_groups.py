"""Tests of groups' offsets on three real brokers: committed, handed over by transactions, kept by the next
coordinators."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from sparklog.broker.groups.group_requests import _refusal, _unknown
from sparklog.broker.metadata_cache import MetadataCache
from sparklog.errors import BrokerError, ErrorCode
from sparklog.model import LeaderAndIsr, TopicSchema
from sparklog.protocol.messages import (
    Ack,
    CommitOffsets,
    CommitOffsetsReply,
    ControlUpdate,
    DeleteTopic,
    FetchOffsets,
    FetchOffsetsReply,
    FindCoordinator,
    FindCoordinatorReply,
    GroupOffset,
    Heartbeat,
    HeartbeatReply,
    ListGroups,
    ListGroupsReply,
    PartitionDecision,
    ReplicaDescription,
    TopicChange,
    TopicPartitions,
)
from sparklog.testing.process_cluster import ProcessCluster, wait_until
from tests.broker.topics import PATIENCE_S, create_topic, replica, running, wait_isr
from tests.broker.transactions import Client, ask, find_coordinator, retried

pytestmark = pytest.mark.integration


class Group:
    def __init__(self, cluster: ProcessCluster, name: str) -> None:
        self._cluster = cluster
        self.name = name

    @property
    def coordinator(self) -> Callable[[], int]:
        return lambda: find_coordinator(self._cluster, "group", self.name)

    def commit(self, *offsets: GroupOffset, transaction: tuple[str, int] | None = None) -> list[int]:
        request = CommitOffsets(0, self.name, offsets, transaction)
        return [result.code for result in retried(self._cluster, self.coordinator, request, CommitOffsetsReply).results]

    def offsets(self, *partitions: tuple[str, int]) -> dict[tuple[str, int], int]:
        request = FetchOffsets(0, self.name, partitions or None)
        found = retried(self._cluster, self.coordinator, request, FetchOffsetsReply).offsets
        return {(offset.topic, offset.partition): offset.offset for offset in found}


def test_offsets_survive_their_coordinator_and_not_their_topic(cluster: ProcessCluster) -> None:
    topic_id = create_topic(cluster, "read", partitions=2)
    create_topic(cluster, "stays")
    group = Group(cluster, "readers")
    unknown, below_zero = GroupOffset("nowhere", 0, 1), GroupOffset("read", 0, -1)
    codes = group.commit(GroupOffset("read", 0, 5), GroupOffset("read", 1, 6, metadata="x"), unknown, below_zero)
    assert codes == [0, 0, ErrorCode.UNKNOWN_TOPIC_OR_PARTITION, ErrorCode.INVALID_REQUEST]
    assert group.commit(GroupOffset("stays", 0, 9, leader_epoch=3)) == [0]
    everything = {("read", 0): 5, ("read", 1): 6, ("stays", 0): 9}
    assert group.offsets() == everything
    assert group.offsets(("read", 1), ("read", 7)) == {("read", 1): 6}
    first = group.coordinator()
    cluster.kill(first)
    assert group.offsets() == everything
    found = retried(cluster, group.coordinator, FetchOffsets(0, "readers"), FetchOffsetsReply).offsets[1]
    assert found == GroupOffset("read", 1, 6, topic_id, -1, "x")
    assert "readers" in ask(cluster, group.coordinator(), ListGroups(0), ListGroupsReply).groups
    elsewhere = next(broker_id for broker_id in running(cluster) if broker_id != group.coordinator())
    with pytest.raises(BrokerError) as refused:
        ask(cluster, elsewhere, FetchOffsets(0, "readers"), FetchOffsetsReply)
    assert refused.value.code is ErrorCode.NOT_COORDINATOR
    cluster.start_broker(first)
    wait_isr(cluster, "__consumer_offsets", {0, 1, 2})
    ask(cluster, group.coordinator(), DeleteTopic(0, "read", 10_000), Ack)
    wait_until(lambda: group.offsets() == {("stays", 0): 9}, PATIENCE_S, "the deleted topic's offsets to go")


def test_offsets_of_invalid_topic_names_go_with_the_next_deletion(cluster: ProcessCluster) -> None:
    """A transaction's handover accepts such names. ZooKeeper cannot have nodes for them, and would close every
    client's connection at a path of more than a megabyte."""
    create_topic(cluster, "short-lived")
    group = Group(cluster, "odd readers")
    offsets = [GroupOffset("..", 0, 1), GroupOffset("a/b", 0, 1), GroupOffset("", 0, 1), GroupOffset("n" * 300, 0, 1)]
    offsets += [GroupOffset("ok", number, 1, topic_id) for number, topic_id in enumerate((".", "../x", "i" * 300))]
    assert group.commit(*offsets, transaction=("unknown", 1)) == [0] * len(offsets)
    assert len(group.offsets()) == len(offsets)
    failed = {broker_id: cluster.describe(broker_id).counters.get("tasks.failed", 0) for broker_id in (0, 1, 2)}
    ask(cluster, group.coordinator(), DeleteTopic(0, "short-lived", 10_000), Ack)
    wait_until(lambda: not group.offsets(), PATIENCE_S, "offsets of no topic to go")
    now = {broker_id: cluster.describe(broker_id).counters.get("tasks.failed", 0) for broker_id in (0, 1, 2)}
    assert now == failed


def test_a_new_replica_copies_a_compacted_log_of_its_coordinator(cluster: ProcessCluster) -> None:
    partitions = 100
    create_topic(cluster, "many", partitions=partitions, replicas=1)
    group = Group(cluster, "again-and-again")
    for offset in range(12):  # above a thousand records the log is rewritten
        assert set(group.commit(*(GroupOffset("many", number, offset) for number in range(partitions)))) == {0}
    coordinator = group.coordinator()

    def shortened() -> list[ReplicaDescription]:
        found = cluster.describe(coordinator).replicas
        return [one for one in found if one.topic == "__consumer_offsets" and one.log_start_offset > 0]

    wait_until(shortened, PATIENCE_S, "a log that begins later")
    number = shortened()[0].partition
    other = next(broker_id for broker_id in running(cluster) if broker_id != coordinator)
    directory = Path(replica(cluster, other, "__consumer_offsets", number).directory)
    cluster.kill(other)
    shutil.rmtree(directory)
    cluster.start_broker(other)
    wait_isr(cluster, "__consumer_offsets", {0, 1, 2}, number)


def test_a_transaction_commits_or_aborts_its_offsets(cluster: ProcessCluster) -> None:
    create_topic(cluster, "in")
    create_topic(cluster, "out")
    group = Group(cluster, "processors")
    client = Client(cluster, "processor")
    for commit, offset, seen in ((False, 3, {}), (True, 4, {("in", 0): 4}), (False, 8, {("in", 0): 4})):
        client.begin()
        client.write("out", 0, 1, "v")
        client.add(group="processors", offsets=(GroupOffset("in", 0, 1),))
        client.add(group="processors", offsets=(GroupOffset("in", 0, offset),))
        assert client.end(commit=commit).complete
        assert group.offsets() == seen
    assert group.commit(GroupOffset("in", 0, 2), transaction=("processor", 2)) == [0]
    assert group.offsets() == {("in", 0): 4}, "the second decision was already handed over"


def test_a_coordinators_log_is_bounded(cluster: ProcessCluster) -> None:
    create_topic(cluster, "busy", partitions=100)
    group = Group(cluster, "busy readers")
    for offset in range(11):
        assert not any(group.commit(*(GroupOffset("busy", number, offset) for number in range(100))))
    request = retried(cluster, group.coordinator, FetchOffsets(0, group.name), FetchOffsetsReply)
    assert {found.offset for found in request.offsets} == {10}
    number = partition_of_group(cluster, group.name)
    at = group.coordinator()

    def log_starts() -> set[int]:
        return {replica(cluster, broker_id, "__consumer_offsets", number).log_start_offset for broker_id in (0, 1, 2)}

    wait_until(lambda: min(log_starts()) > 1000, PATIENCE_S, f"every log start to move, not {log_starts()}")
    cluster.kill(at)
    assert set(group.offsets().values()) == {10}
    cluster.start_broker(at)
    wait_isr(cluster, "__consumer_offsets", {0, 1, 2}, number)


def test_an_oversized_heartbeat_is_refused_without_effect(cluster: ProcessCluster) -> None:
    group = Group(cluster, "crowd \u2603\n")
    half = tuple(range(60_000))
    owned = (TopicPartitions("a", "", half), TopicPartitions("b", "", half))
    for request, expected in (
        (Heartbeat(0, group.name, "m", 0, 1, owned), "120000 partitions found"),
        (Heartbeat(0, group.name, "m", 0, 1, topics=tuple(map(str, range(10_001)))), "subscribe by a pattern"),
    ):
        with pytest.raises(BrokerError, match=expected) as error:
            retried(cluster, group.coordinator, request, HeartbeatReply)
        assert error.value.code == ErrorCode.INVALID_REQUEST
    assert group.name not in retried(cluster, group.coordinator, ListGroups(0), ListGroupsReply).groups


def test_a_broker_with_old_metadata_accepts_a_members_commit() -> None:
    cache = MetadataCache("cluster", {})
    cache.forgotten["gone"] = None
    found = [_unknown(cache, GroupOffset("t", 0, 5, topic_id), member=True) for topic_id in ("new", "gone", "")]
    assert found == ["", *["this broker does not know partition t-0"] * 2]
    assert _unknown(cache, GroupOffset("t", 0, 5, "new"), member=False)
    below_zero = _refusal(cache, GroupOffset("t", 0, -1, "new"), member=True)
    assert below_zero is not None and below_zero.code == ErrorCode.INVALID_REQUEST


@pytest.mark.parametrize("member", [True, False], ids=["a member", "an observer"])
def test_a_late_offset_of_a_deleted_topic_is_dropped(member: bool) -> None:
    cache = MetadataCache("cluster", {})
    for number, topic_id in enumerate(("old", "new"), start=1):
        change = TopicChange("t", topic_id, (TopicSchema(0, b"schema"),), ("key",), None, {})
        known = PartitionDecision("t", topic_id, 0, LeaderAndIsr(0, 1, (0,), 1), 1, (0,))
        cache.apply(ControlUpdate(0, "c", 1, 1, True, (), (change,), (known,), sequence=number))
    late = _refusal(cache, GroupOffset("t", 0, 5, "old"), member=member)
    assert late is not None
    assert (late.code, late.detail) == (
        ErrorCode.UNKNOWN_TOPIC_OR_PARTITION,
        "t-0: topic id old found, new expected",
    )
    assert [_refusal(cache, GroupOffset("t", 0, 5, topic_id), member=member) for topic_id in ("new", "")] == [None] * 2


def partition_of_group(cluster: ProcessCluster, name: str) -> int:
    return retried(
        cluster, lambda: running(cluster)[0], FindCoordinator(0, "group", name), FindCoordinatorReply
    ).partition
