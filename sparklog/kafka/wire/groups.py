"""The messages of consumer groups: the classic protocol, the protocol of KIP-848, and their administration."""

from __future__ import annotations

from sparklog.kafka.wire.api_keys import ApiKey
from sparklog.kafka.wire.fields import array, binary, boolean, int8, int16, int32, message, nested, string, struct, uuid


@struct
class JoinGroupRequestProtocol:
    name: str = string("0+")
    metadata: bytes = binary("0+")


@message(ApiKey.JOIN_GROUP, "0-9", flexible="6+")
class JoinGroupRequest:
    """A request of the classic protocol to join a group, or to join again in a rebalance."""

    group_id: str = string("0+")
    session_timeout_ms: int = int32("0+")
    rebalance_timeout_ms: int = int32("1+", default=-1)
    member_id: str = string("0+")
    group_instance_id: str | None = string("5+", default=None, nullable="5+")
    protocol_type: str = string("0+")
    protocols: list[JoinGroupRequestProtocol] = array(JoinGroupRequestProtocol, "0+")
    reason: str | None = string("8+", default=None, nullable="8+")


@struct
class JoinGroupResponseMember:
    member_id: str = string("0+")
    group_instance_id: str | None = string("5+", default=None, nullable="5+")
    metadata: bytes = binary("0+")


@message(ApiKey.JOIN_GROUP, "0-9", flexible="6+")
class JoinGroupResponse:
    throttle_time_ms: int = int32("2+")
    error_code: int = int16("0+")
    generation_id: int = int32("0+", default=-1)
    protocol_type: str | None = string("7+", default=None, nullable="7+")
    protocol_name: str | None = string("0+", nullable="7+")
    leader: str = string("0+")
    skip_assignment: bool = boolean("9+")
    member_id: str = string("0+")
    members: list[JoinGroupResponseMember] = array(JoinGroupResponseMember, "0+")


@struct
class SyncGroupRequestAssignment:
    member_id: str = string("0+")
    assignment: bytes = binary("0+")


@message(ApiKey.SYNC_GROUP, "0-5", flexible="4+")
class SyncGroupRequest:
    """A request of the classic protocol for a member's assignment. The leader's request has all assignments."""

    group_id: str = string("0+")
    generation_id: int = int32("0+")
    member_id: str = string("0+")
    group_instance_id: str | None = string("3+", default=None, nullable="3+")
    protocol_type: str | None = string("5+", default=None, nullable="5+")
    protocol_name: str | None = string("5+", default=None, nullable="5+")
    assignments: list[SyncGroupRequestAssignment] = array(SyncGroupRequestAssignment, "0+")


@message(ApiKey.SYNC_GROUP, "0-5", flexible="4+")
class SyncGroupResponse:
    throttle_time_ms: int = int32("1+")
    error_code: int = int16("0+")
    protocol_type: str | None = string("5+", default=None, nullable="5+")
    protocol_name: str | None = string("5+", default=None, nullable="5+")
    assignment: bytes = binary("0+")


@message(ApiKey.HEARTBEAT, "0-4", flexible="4+")
class HeartbeatRequest:
    """A request by which a member of a classic group extends its session."""

    group_id: str = string("0+")
    generation_id: int = int32("0+")
    member_id: str = string("0+")
    group_instance_id: str | None = string("3+", default=None, nullable="3+")


@message(ApiKey.HEARTBEAT, "0-4", flexible="4+")
class HeartbeatResponse:
    throttle_time_ms: int = int32("1+")
    error_code: int = int16("0+")


@struct
class MemberIdentity:
    member_id: str = string("3+")
    group_instance_id: str | None = string("3+", default=None, nullable="3+")
    reason: str | None = string("5+", default=None, nullable="5+")


@message(ApiKey.LEAVE_GROUP, "0-5", flexible="4+")
class LeaveGroupRequest:
    """A request to remove members from a classic group."""

    group_id: str = string("0+")
    member_id: str = string("0-2")
    members: list[MemberIdentity] = array(MemberIdentity, "3+")


@struct
class MemberResponse:
    member_id: str = string("3+")
    group_instance_id: str | None = string("3+", nullable="3+")
    error_code: int = int16("3+")


@message(ApiKey.LEAVE_GROUP, "0-5", flexible="4+")
class LeaveGroupResponse:
    throttle_time_ms: int = int32("1+")
    error_code: int = int16("0+")
    members: list[MemberResponse] = array(MemberResponse, "3+")


@message(ApiKey.LIST_GROUPS, "0-5", flexible="3+")
class ListGroupsRequest:
    """A request for the groups that a broker coordinates."""

    states_filter: list[str] = array(string, "4+")
    types_filter: list[str] = array(string, "5+")


@struct
class ListedGroup:
    group_id: str = string("0+")
    protocol_type: str = string("0+")
    group_state: str = string("4+")
    group_type: str = string("5+")


@message(ApiKey.LIST_GROUPS, "0-5", flexible="3+")
class ListGroupsResponse:
    throttle_time_ms: int = int32("1+")
    error_code: int = int16("0+")
    groups: list[ListedGroup] = array(ListedGroup, "0+")


@message(ApiKey.DESCRIBE_GROUPS, "0-6", flexible="5+")
class DescribeGroupsRequest:
    """A request for the state and members of classic groups."""

    groups: list[str] = array(string, "0+")
    include_authorized_operations: bool = boolean("3+")


@struct
class DescribedGroupMember:
    member_id: str = string("0+")
    group_instance_id: str | None = string("4+", default=None, nullable="4+")
    client_id: str = string("0+")
    client_host: str = string("0+")
    member_metadata: bytes = binary("0+")
    member_assignment: bytes = binary("0+")


@struct
class DescribedGroup:
    error_code: int = int16("0+")
    error_message: str | None = string("6+", default=None, nullable="6+")
    group_id: str = string("0+")
    group_state: str = string("0+")
    protocol_type: str = string("0+")
    protocol_data: str = string("0+")
    members: list[DescribedGroupMember] = array(DescribedGroupMember, "0+")
    authorized_operations: int = int32("3+", default=-0x80000000)


@message(ApiKey.DESCRIBE_GROUPS, "0-6", flexible="5+")
class DescribeGroupsResponse:
    throttle_time_ms: int = int32("1+")
    groups: list[DescribedGroup] = array(DescribedGroup, "0+")


@message(ApiKey.DELETE_GROUPS, "0-2", flexible="2+")
class DeleteGroupsRequest:
    """A request to delete empty groups with their offsets."""

    groups_names: list[str] = array(string, "0+")


@struct
class DeletableGroupResult:
    group_id: str = string("0+")
    error_code: int = int16("0+")


@message(ApiKey.DELETE_GROUPS, "0-2", flexible="2+")
class DeleteGroupsResponse:
    throttle_time_ms: int = int32("0+")
    results: list[DeletableGroupResult] = array(DeletableGroupResult, "0+")


@struct
class TopicPartitions:
    topic_id: bytes = uuid("0+")
    partitions: list[int] = array(int32, "0+")


@message(ApiKey.CONSUMER_GROUP_HEARTBEAT, "0-1", flexible="0+")
class ConsumerGroupHeartbeatRequest:
    """A member's heartbeat in the protocol of KIP-848. A field is null if the member's value has not changed."""

    group_id: str = string("0+")
    member_id: str = string("0+")
    member_epoch: int = int32("0+")
    instance_id: str | None = string("0+", default=None, nullable="0+")
    rack_id: str | None = string("0+", default=None, nullable="0+")
    rebalance_timeout_ms: int = int32("0+", default=-1)
    subscribed_topic_names: list[str] | None = array(string, "0+", default=None, nullable="0+")
    subscribed_topic_regex: str | None = string("1+", default=None, nullable="1+")
    server_assignor: str | None = string("0+", default=None, nullable="0+")
    topic_partitions: list[TopicPartitions] | None = array(TopicPartitions, "0+", default=None, nullable="0+")


@struct
class Assignment:
    topic_partitions: list[TopicPartitions] = array(TopicPartitions, "0+")


@message(ApiKey.CONSUMER_GROUP_HEARTBEAT, "0-1", flexible="0+")
class ConsumerGroupHeartbeatResponse:
    throttle_time_ms: int = int32("0+")
    error_code: int = int16("0+")
    error_message: str | None = string("0+", default=None, nullable="0+")
    member_id: str | None = string("0+", default=None, nullable="0+")
    member_epoch: int = int32("0+")
    heartbeat_interval_ms: int = int32("0+")
    assignment: Assignment | None = nested(Assignment, "0+", default=None, nullable="0+")


@message(ApiKey.CONSUMER_GROUP_DESCRIBE, "0-1", flexible="0+")
class ConsumerGroupDescribeRequest:
    """A request for the state and members of groups of the protocol of KIP-848."""

    group_ids: list[str] = array(string, "0+")
    include_authorized_operations: bool = boolean("0+")


@struct
class ConsumerGroupDescribeTopicPartitions:
    topic_id: bytes = uuid("0+")
    topic_name: str = string("0+")
    partitions: list[int] = array(int32, "0+")


@struct
class ConsumerGroupDescribeAssignment:
    topic_partitions: list[ConsumerGroupDescribeTopicPartitions] = array(ConsumerGroupDescribeTopicPartitions, "0+")


@struct
class ConsumerGroupDescribeMember:
    member_id: str = string("0+")
    instance_id: str | None = string("0+", default=None, nullable="0+")
    rack_id: str | None = string("0+", default=None, nullable="0+")
    member_epoch: int = int32("0+")
    client_id: str = string("0+")
    client_host: str = string("0+")
    subscribed_topic_names: list[str] = array(string, "0+")
    subscribed_topic_regex: str | None = string("0+", default=None, nullable="0+")
    assignment: ConsumerGroupDescribeAssignment = nested(ConsumerGroupDescribeAssignment, "0+")
    target_assignment: ConsumerGroupDescribeAssignment = nested(ConsumerGroupDescribeAssignment, "0+")
    member_type: int = int8("1+", default=-1)


@struct
class ConsumerGroupDescribeGroup:
    error_code: int = int16("0+")
    error_message: str | None = string("0+", default=None, nullable="0+")
    group_id: str = string("0+")
    group_state: str = string("0+")
    group_epoch: int = int32("0+")
    assignment_epoch: int = int32("0+")
    assignor_name: str = string("0+")
    members: list[ConsumerGroupDescribeMember] = array(ConsumerGroupDescribeMember, "0+")
    authorized_operations: int = int32("0+", default=-0x80000000)


@message(ApiKey.CONSUMER_GROUP_DESCRIBE, "0-1", flexible="0+")
class ConsumerGroupDescribeResponse:
    throttle_time_ms: int = int32("0+")
    groups: list[ConsumerGroupDescribeGroup] = array(ConsumerGroupDescribeGroup, "0+")
