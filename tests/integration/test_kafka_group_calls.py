"""Kafka's requests about groups in all their versions, on the Kafka listener of real brokers."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from sparklog.errors import ErrorCode
from sparklog.kafka.wire import API_VERSIONS, ApiKey
from sparklog.kafka.wire.groups import (
    ConsumerGroupDescribeRequest,
    ConsumerGroupHeartbeatRequest,
    DeleteGroupsRequest,
    DescribeGroupsRequest,
    HeartbeatRequest,
    JoinGroupRequest,
    JoinGroupRequestProtocol,
    JoinGroupResponse,
    LeaveGroupRequest,
    ListGroupsRequest,
    MemberIdentity,
    SyncGroupRequest,
    SyncGroupRequestAssignment,
)
from sparklog.kafka.wire.offsets import (
    OffsetCommitRequest,
    OffsetCommitRequestPartition,
    OffsetCommitRequestTopic,
    OffsetDeleteRequest,
    OffsetDeleteRequestPartition,
    OffsetDeleteRequestTopic,
    OffsetFetchRequest,
    OffsetFetchRequestGroup,
    OffsetFetchRequestTopic,
    OffsetFetchRequestTopics,
)
from sparklog.testing.process_cluster import ProcessCluster
from sparklog.testing.settled_admin import SettledAdmin
from tests.integration.kafka_calls import KafkaCalls, coordinator_of

pytestmark = pytest.mark.integration
MEMBER_ID_REQUIRED = 79


@pytest.fixture(scope="module")
def cluster() -> Iterator[ProcessCluster]:
    with ProcessCluster(3, kafka=True, settings={"group.initial.rebalance.delay.ms": "0"}) as running:
        with SettledAdmin(running.bootstrap) as admin:
            admin.create_topic("t", partitions=4, replication_factor=3)
        yield running


def calls_of(cluster: ProcessCluster, group: str) -> KafkaCalls:
    return KafkaCalls(coordinator_of(cluster.kafka_bootstrap.split(",")[0], group))


def versions(api_key: ApiKey) -> range:
    low, high = API_VERSIONS[api_key]
    return range(low, high + 1)


def join(
    calls: KafkaCalls, group: str, version: int, *, member_id: str = "", instance_id: str | None = None
) -> JoinGroupResponse:
    """Join the group, with a member id that the coordinator gives if the version demands it."""
    request = JoinGroupRequest(
        group_id=group,
        session_timeout_ms=10_000,
        rebalance_timeout_ms=5000 if version else -1,
        member_id=member_id,
        group_instance_id=instance_id if version >= 5 else None,
        protocol_type="consumer",
        protocols=[JoinGroupRequestProtocol(name="range", metadata=b"m")],
    )
    found: JoinGroupResponse = calls.ask(ApiKey.JOIN_GROUP, version, request)
    if found.error_code == MEMBER_ID_REQUIRED:
        assert version >= 4
        return join(calls, group, version, member_id=found.member_id)
    return found


def sync(calls: KafkaCalls, group: str, joined: JoinGroupResponse, *, version: int = 5) -> bytes:
    request = SyncGroupRequest(
        group_id=group,
        generation_id=joined.generation_id,
        member_id=joined.member_id,
        protocol_type="consumer" if version >= 5 else None,
        protocol_name="range" if version >= 5 else None,
        assignments=[SyncGroupRequestAssignment(member_id=joined.member_id, assignment=b"a")],
    )
    found = calls.ask(ApiKey.SYNC_GROUP, version, request)
    assert found.error_code == 0
    return bytes(found.assignment)


@pytest.mark.parametrize("version", versions(ApiKey.JOIN_GROUP))
def test_a_member_joins_and_leaves_in_each_version(cluster: ProcessCluster, version: int) -> None:
    group = f"versions-{version}"
    with calls_of(cluster, group) as calls:
        joined = join(calls, group, version)
        assert (joined.error_code, joined.generation_id, joined.leader) == (0, 1, joined.member_id)
        assert [one.metadata for one in joined.members] == [b"m"]
        assert joined.member_id.startswith("test-")
        assert sync(calls, group, joined, version=min(version, 5)) == b"a"
        beat = HeartbeatRequest(group_id=group, generation_id=1, member_id=joined.member_id)
        assert calls.ask(ApiKey.HEARTBEAT, min(version, 4), beat).error_code == 0
        late = HeartbeatRequest(group_id=group, generation_id=0, member_id=joined.member_id)
        assert calls.ask(ApiKey.HEARTBEAT, min(version, 4), late).error_code == ErrorCode.ILLEGAL_GENERATION
        leave = min(version, 5)
        if leave < 3:
            left = calls.ask(ApiKey.LEAVE_GROUP, leave, LeaveGroupRequest(group_id=group, member_id=joined.member_id))
            assert left.error_code == 0
        else:
            members = [MemberIdentity(member_id=joined.member_id), MemberIdentity(member_id="zz")]
            left = calls.ask(ApiKey.LEAVE_GROUP, leave, LeaveGroupRequest(group_id=group, members=members))
            assert [one.error_code for one in left.members] == [0, ErrorCode.UNKNOWN_MEMBER_ID]
        assert calls.ask(ApiKey.HEARTBEAT, 4, beat).error_code == ErrorCode.UNKNOWN_MEMBER_ID


def commit(
    calls: KafkaCalls,
    group: str,
    offsets: dict[int, int],
    *,
    version: int = 9,
    topic: str = "t",
    member: tuple[str, int] = ("", -1),
    metadata: str | None = "note",
) -> list[int]:
    """Commit offsets of partitions, and return their error codes."""
    request = OffsetCommitRequest(
        group_id=group,
        member_id=member[0],
        generation_id_or_member_epoch=member[1],
        topics=[
            OffsetCommitRequestTopic(
                name=topic,
                partitions=[
                    OffsetCommitRequestPartition(
                        partition_index=number,
                        committed_offset=offset,
                        committed_leader_epoch=0 if version >= 6 else -1,
                        committed_metadata=metadata,
                    )
                    for number, offset in offsets.items()
                ],
            )
        ],
    )
    found = calls.ask(ApiKey.OFFSET_COMMIT, version, request)
    return [partition.error_code for partition in found.topics[0].partitions]


@pytest.mark.parametrize("version", versions(ApiKey.OFFSET_COMMIT))
def test_offsets_are_committed_and_fetched_in_each_version(cluster: ProcessCluster, version: int) -> None:
    group = f"commits-{version}"
    with calls_of(cluster, group) as calls:
        assert commit(calls, group, {0: 5, 3: 0}, version=version) == [0, 0]
        assert commit(calls, group, {9: 5}, version=version) == [ErrorCode.UNKNOWN_TOPIC_OR_PARTITION]
        assert commit(calls, group, {1: 5}, version=version, metadata="x" * 4097) == [12]
        assert commit(calls, group, {1: 5}, version=version, member=("zz", 1)) == [ErrorCode.UNKNOWN_MEMBER_ID]
        for fetch in versions(ApiKey.OFFSET_FETCH):
            topics = [OffsetFetchRequestTopic(name="t", partition_indexes=[0, 1, 3])]
            if fetch < 8:
                request = OffsetFetchRequest(group_id=group, topics=topics)
                found = calls.ask(ApiKey.OFFSET_FETCH, fetch, request)
            else:
                wanted = [OffsetFetchRequestTopics(name="t", partition_indexes=[0, 1, 3])]
                request = OffsetFetchRequest(groups=[OffsetFetchRequestGroup(group_id=group, topics=wanted)])
                (found,) = calls.ask(ApiKey.OFFSET_FETCH, fetch, request).groups
            assert found.error_code == 0
            (topic,) = found.topics
            offsets = [(one.partition_index, one.committed_offset, one.metadata) for one in topic.partitions]
            assert offsets == [(0, 5, "note"), (1, -1, ""), (3, 0, "note")]
            if fetch >= 5:
                epochs = [one.committed_leader_epoch for one in topic.partitions]
                assert epochs == [0 if version >= 6 else -1, -1, 0 if version >= 6 else -1]
        whole = calls.ask(
            ApiKey.OFFSET_FETCH, 9, OffsetFetchRequest(groups=[OffsetFetchRequestGroup(group_id=group, topics=None)])
        )
        assert [one.partition_index for one in whole.groups[0].topics[0].partitions] == [0, 3]
    with SettledAdmin(cluster.bootstrap) as admin:
        assert sorted(admin.group_offsets(group).values()) == [0, 5]


def test_groups_are_listed_described_and_deleted(cluster: ProcessCluster) -> None:
    with calls_of(cluster, "described") as calls:
        joined = join(calls, "described", 9, instance_id="static-1")
        sync(calls, "described", joined)
        member = (joined.member_id, joined.generation_id)
        assert commit(calls, "described", {0: 1}, member=member) == [0]
        assert commit(calls, "described", {0: 1}) == [ErrorCode.UNKNOWN_MEMBER_ID]
        for version in versions(ApiKey.LIST_GROUPS):
            listed = {one.group_id: one for one in calls.ask(ApiKey.LIST_GROUPS, version, ListGroupsRequest()).groups}
            assert listed["described"].protocol_type == "consumer"
            if version >= 5:
                assert (listed["described"].group_state, listed["described"].group_type) == ("Stable", "classic")
        filtered = calls.ask(ApiKey.LIST_GROUPS, 5, ListGroupsRequest(states_filter=["empty"])).groups
        assert "described" not in {one.group_id for one in filtered}
        for version in versions(ApiKey.DESCRIBE_GROUPS):
            request = DescribeGroupsRequest(groups=["described", "none"], include_authorized_operations=version >= 3)
            found, missing = calls.ask(ApiKey.DESCRIBE_GROUPS, version, request).groups
            assert (found.group_state, found.protocol_type, found.protocol_data) == ("Stable", "consumer", "range")
            (one,) = found.members
            assert (one.client_id, one.client_host) == ("test", "/127.0.0.1")
            assert (bytes(one.member_metadata), bytes(one.member_assignment)) == (b"m", b"a")
            assert one.group_instance_id == ("static-1" if version >= 4 else None)
            assert missing.error_code in {ErrorCode.NOT_COORDINATOR, 0, ErrorCode.GROUP_ID_NOT_FOUND}
        for version in versions(ApiKey.DELETE_GROUPS):
            (refused,) = calls.ask(
                ApiKey.DELETE_GROUPS, version, DeleteGroupsRequest(groups_names=["described"])
            ).results
            assert refused.error_code == ErrorCode.NON_EMPTY_GROUP
        with SettledAdmin(cluster.bootstrap) as admin:
            described = admin.describe_group("described")
            assert described is not None
            assert (described.state, described.members[0].instance_id) == ("stable", "static-1")
        members = [MemberIdentity(group_instance_id="static-1")]
        calls.ask(ApiKey.LEAVE_GROUP, 5, LeaveGroupRequest(group_id="described", members=members))
        (deleted,) = calls.ask(ApiKey.DELETE_GROUPS, 2, DeleteGroupsRequest(groups_names=["described"])).results
        assert deleted.error_code == 0
        (again,) = calls.ask(ApiKey.DELETE_GROUPS, 2, DeleteGroupsRequest(groups_names=["described"])).results
        assert again.error_code == ErrorCode.GROUP_ID_NOT_FOUND


def test_groups_of_kip_848_are_served_in_each_version(cluster: ProcessCluster) -> None:
    with calls_of(cluster, "new") as calls:
        joined = join(calls, "new", 9)
        sync(calls, "new", joined)
        request = ConsumerGroupHeartbeatRequest(
            group_id="new",
            member_id="m1",
            member_epoch=0,
            subscribed_topic_names=["t"],
            rebalance_timeout_ms=10_000,
            topic_partitions=[],
        )
        refused = calls.ask(ApiKey.CONSUMER_GROUP_HEARTBEAT, 1, request)
        assert refused.error_code == ErrorCode.GROUP_ID_NOT_FOUND, "the group has members of the classic protocol"
        leaving = LeaveGroupRequest(group_id="new", members=[MemberIdentity(member_id=joined.member_id)])
        calls.ask(ApiKey.LEAVE_GROUP, 5, leaving)
        found = calls.ask(ApiKey.CONSUMER_GROUP_HEARTBEAT, 1, request)
        assert (found.error_code, found.member_id, found.heartbeat_interval_ms) == (0, "m1", 5000)
        (assigned,) = found.assignment.topic_partitions
        assert assigned.partitions == [0, 1, 2, 3]
        again = ConsumerGroupHeartbeatRequest(group_id="new", member_id="m1", member_epoch=found.member_epoch)
        assert calls.ask(ApiKey.CONSUMER_GROUP_HEARTBEAT, 0, again).assignment is None
        assert join(calls, "new", 9).error_code == ErrorCode.INCONSISTENT_GROUP_PROTOCOL
        assert commit(calls, "new", {0: 3}, member=("m1", found.member_epoch)) == [0]
        assert commit(calls, "new", {0: 3}) == [ErrorCode.UNKNOWN_MEMBER_ID]
        for version in versions(ApiKey.CONSUMER_GROUP_DESCRIBE):
            asked = ConsumerGroupDescribeRequest(group_ids=["new"], include_authorized_operations=True)
            (described,) = calls.ask(ApiKey.CONSUMER_GROUP_DESCRIBE, version, asked).groups
            assert (described.error_code, described.group_state) == (0, "Stable")
            (member,) = described.members
            (owned,) = member.assignment.topic_partitions
            assert (owned.topic_name, owned.topic_id) == ("t", assigned.topic_id)
            assert owned.partitions == [0, 1, 2, 3]
        listed = calls.ask(ApiKey.LIST_GROUPS, 5, ListGroupsRequest(types_filter=["consumer"])).groups
        assert [(one.group_id, one.group_state) for one in listed] == [("new", "Stable")]
        other = ConsumerGroupHeartbeatRequest(
            group_id="new", member_epoch=0, subscribed_topic_names=["t"], topic_partitions=[], server_assignor="zz"
        )
        assert calls.ask(ApiKey.CONSUMER_GROUP_HEARTBEAT, 0, other).error_code == 112
        unnamed = ConsumerGroupHeartbeatRequest(
            group_id="new", member_epoch=0, subscribed_topic_names=["t"], topic_partitions=[], server_assignor="uniform"
        )
        assert calls.ask(ApiKey.CONSUMER_GROUP_HEARTBEAT, 1, unnamed).error_code == ErrorCode.INVALID_REQUEST
        given = calls.ask(ApiKey.CONSUMER_GROUP_HEARTBEAT, 0, unnamed)
        assert (given.error_code, len(given.member_id)) == (0, 36)
        for member_id in ("m1", given.member_id):
            leave = ConsumerGroupHeartbeatRequest(group_id="new", member_id=member_id, member_epoch=-1)
            left = calls.ask(ApiKey.CONSUMER_GROUP_HEARTBEAT, 1, leave)
            assert (left.error_code, left.member_epoch, left.assignment) == (0, -1, None)


def test_a_group_is_described_once_in_a_request(cluster: ProcessCluster) -> None:
    with calls_of(cluster, "once") as calls:
        assert commit(calls, "once", {0: 1}) == [0]
        groups = calls.ask(ApiKey.DESCRIBE_GROUPS, 5, DescribeGroupsRequest(groups=["once"] * 1000)).groups
        assert [one.group_id for one in groups] == ["once"]
        of_kip_848 = ConsumerGroupDescribeRequest(group_ids=["once"] * 1000)
        assert len(calls.ask(ApiKey.CONSUMER_GROUP_DESCRIBE, 1, of_kip_848).groups) == 1
        all_offsets = OffsetFetchRequestGroup(group_id="once", topics=None)
        fetch = OffsetFetchRequest(groups=[all_offsets] * 1000)
        first, *others = calls.ask(ApiKey.OFFSET_FETCH, 8, fetch).groups
        assert (first.error_code, first.topics[0].partitions[0].committed_offset) == (0, 1)
        assert {(one.error_code, len(one.topics)) for one in others} == {(ErrorCode.INVALID_REQUEST, 0)}


def test_a_pattern_selects_topics(cluster: ProcessCluster) -> None:
    with calls_of(cluster, "pattern") as calls:
        request = ConsumerGroupHeartbeatRequest(
            group_id="pattern", member_id="m", member_epoch=0, subscribed_topic_regex="[a-t]", topic_partitions=[]
        )
        found = calls.ask(ApiKey.CONSUMER_GROUP_HEARTBEAT, 1, request)
        assert [one.partitions for one in found.assignment.topic_partitions] == [[0, 1, 2, 3]]
        wrong = ConsumerGroupHeartbeatRequest(
            group_id="pattern", member_id="n", member_epoch=0, subscribed_topic_regex="[", topic_partitions=[]
        )
        refused = calls.ask(ApiKey.CONSUMER_GROUP_HEARTBEAT, 1, wrong)
        assert refused.error_code == ErrorCode.INVALID_REGULAR_EXPRESSION


def test_some_offsets_of_a_group_are_deleted(cluster: ProcessCluster) -> None:
    with calls_of(cluster, "pruned") as calls:
        commit(calls, "pruned", {0: 1, 1: 2})
        partitions = [OffsetDeleteRequestPartition(partition_index=0)]
        request = OffsetDeleteRequest(
            group_id="pruned", topics=[OffsetDeleteRequestTopic(name="t", partitions=partitions)]
        )
        found = calls.ask(ApiKey.OFFSET_DELETE, 0, request)
        assert (found.error_code, found.topics[0].partitions[0].error_code) == (0, 0)
    with SettledAdmin(cluster.bootstrap) as admin:
        assert list(admin.group_offsets("pruned").values()) == [2]


def test_requests_outside_the_bounds_are_refused(cluster: ProcessCluster) -> None:
    with calls_of(cluster, "bounds") as calls:
        request = JoinGroupRequest(
            group_id="bounds",
            session_timeout_ms=1,
            protocol_type="consumer",
            protocols=[JoinGroupRequestProtocol(name="range")],
        )
        assert calls.ask(ApiKey.JOIN_GROUP, 9, request).error_code == ErrorCode.INVALID_SESSION_TIMEOUT
        for name in ("", "x" * 300):
            beat = HeartbeatRequest(group_id=name, generation_id=1, member_id="m")
            assert calls.ask(ApiKey.HEARTBEAT, 4, beat).error_code == 24
        assert join(calls, "bounds", 9, member_id="unknown").error_code == ErrorCode.UNKNOWN_MEMBER_ID
        topics = [OffsetFetchRequestTopic(name="t", partition_indexes=list(range(100_001)))]
        found = calls.ask(ApiKey.OFFSET_FETCH, 7, OffsetFetchRequest(group_id="bounds", topics=topics))
        assert found.error_code == ErrorCode.INVALID_REQUEST
        with pytest.raises(ConnectionError):  # The response of OffsetCommit has no error for the whole request.
            commit(calls, "bounds", dict.fromkeys(range(10_001), 0))


def test_members_continue_after_the_coordinator_is_killed(cluster: ProcessCluster) -> None:
    group = "failover"
    address = coordinator_of(cluster.kafka_bootstrap.split(",")[0], group)
    with KafkaCalls(address) as calls:
        joined = join(calls, group, 9)
        assert sync(calls, group, joined) == b"a"
        assert commit(calls, group, {0: 7}, member=(joined.member_id, joined.generation_id)) == [0]
    (broker_id,) = [number for number, slot in cluster.slots.items() if slot.kafka_address == address]
    other = next(slot.kafka_address for slot in cluster.slots.values() if slot.kafka_address != address)
    cluster.kill(broker_id)
    try:
        member = (joined.member_id, joined.generation_id)
        beat = HeartbeatRequest(group_id=group, generation_id=member[1], member_id=member[0])
        for _ in range(200):
            new = coordinator_of(other, group)
            if new != address:
                with KafkaCalls(new) as calls:
                    code = calls.ask(ApiKey.HEARTBEAT, 4, beat).error_code
                    assert code in {0, ErrorCode.NOT_COORDINATOR, ErrorCode.COORDINATOR_LOAD_IN_PROGRESS}
                    if code == 0:
                        break
        else:
            raise AssertionError("no new coordinator knows the member")
        with KafkaCalls(new) as calls:
            assert sync(calls, group, joined) == b"a"
            assert commit(calls, group, {0: 8}, member=member) == [0]
    finally:
        cluster.start_brokers()
    with SettledAdmin(cluster.bootstrap) as admin:
        assert list(admin.group_offsets(group).values()) == [8]
