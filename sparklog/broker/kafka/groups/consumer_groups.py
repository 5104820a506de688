"""The requests of groups of KIP-848: ConsumerGroupHeartbeat and ConsumerGroupDescribe.

sparklog's own consumers use the same groups. Kafka clients and consumers of sparklog may be members of one group.
Two things differ from Kafka. A static member replaces an earlier member with the same instance id at once, and the
earlier one is fenced. There is only one server assignor, for both names "uniform" and "range".
"""

from __future__ import annotations

import uuid
from collections.abc import Generator, Iterable
from itertools import islice

from sparklog.broker.kafka.call import KafkaCall
from sparklog.broker.kafka.error_codes import REFUSALS, KafkaCode, KafkaError
from sparklog.broker.kafka.groups.group_access import MAX_NAME, STATES, GroupAccess, group_code
from sparklog.broker.lifecycle.broker import Broker
from sparklog.coordinator.effects import Assigned
from sparklog.coordinator.group_events import ConsumerHeartbeatRequested
from sparklog.errors import BrokerError, ErrorCode
from sparklog.kafka.wire.groups import (
    Assignment,
    ConsumerGroupDescribeAssignment,
    ConsumerGroupDescribeGroup,
    ConsumerGroupDescribeMember,
    ConsumerGroupDescribeRequest,
    ConsumerGroupDescribeResponse,
    ConsumerGroupDescribeTopicPartitions,
    ConsumerGroupHeartbeatRequest,
    ConsumerGroupHeartbeatResponse,
    TopicPartitions,
)
from sparklog.protocol import messages
from sparklog.protocol.fields import MAX_ENTRIES, MAX_PLAIN
from sparklog.protocol.messages import JOIN
from sparklog.security.acls import Operation, ResourceType

#: The names of Kafka's server assignors. Both select the only assignor of sparklog.
ASSIGNORS = ("uniform", "range")
#: The member type in ConsumerGroupDescribe.
_CONSUMER = 1
#: The value of a response's authorized operations if the response does not report them.
_UNKNOWN = -0x80000000


class ConsumerGroupHandlers:
    """The handlers of the requests of groups of KIP-848."""

    def __init__(self, broker: Broker, access: GroupAccess) -> None:
        self._config = broker.context.config
        self._slices = broker.slices
        self._access = access

    async def heartbeat(
        self, call: KafkaCall, request: ConsumerGroupHeartbeatRequest
    ) -> ConsumerGroupHeartbeatResponse:
        """Record a member's state, and return the partitions that it should own if they have changed."""
        member_id = request.member_id
        if not member_id and request.member_epoch == JOIN and call.version == 0:
            member_id = str(uuid.uuid4())  # Since version 1 a client chooses the id.
        try:
            self._check(call, request, member_id)
            await self._slices.result(
                self._check_topics(call, "ConsumerGroupHeartbeat", request.subscribed_topic_names or ())
            )
            outcome = await self._access.ask(
                request.group_id, lambda ticket: self._heartbeat_of(ticket, call, request, member_id)
            )
        except REFUSALS as error:
            return ConsumerGroupHeartbeatResponse(
                error_code=consumer_group_code(error), error_message=str(error)[:1000], member_id=member_id
            )
        assert isinstance(outcome, Assigned)
        assignment = None
        if request.member_epoch >= JOIN and not (
            outcome.unchanged and request.member_epoch > JOIN and request.topic_partitions is None
        ):
            assignment = Assignment(topic_partitions=self._visible(call, request, outcome.assigned))
        return ConsumerGroupHeartbeatResponse(
            member_id=member_id,
            member_epoch=outcome.member_epoch,
            heartbeat_interval_ms=self._config.group_consumer_heartbeat_interval_ms,
            assignment=assignment,
        )

    def _check(self, call: KafkaCall, request: ConsumerGroupHeartbeatRequest, member_id: str) -> None:
        """Check the permissions and the bounds of a heartbeat. Raises BrokerError or KafkaError."""
        self._access.require(call, "ConsumerGroupHeartbeat", Operation.READ, request.group_id)
        topics, owned = request.subscribed_topic_names or (), request.topic_partitions or ()
        if not member_id or max(map(len, (member_id, request.instance_id or "", request.rack_id or ""))) > MAX_NAME:
            raise _invalid(request, f"a member id, instance id or rack of at most {MAX_NAME} characters expected")
        if request.member_epoch == JOIN and owned:
            raise _invalid(request, "a member that joins has partitions")
        if len(topics) > MAX_ENTRIES or len(request.subscribed_topic_regex or "") > MAX_NAME:
            detail = f"at most {MAX_ENTRIES} topics and a pattern of at most {MAX_NAME} characters expected"
            raise _invalid(request, detail)
        if sum(len(one.partitions) for one in owned) > MAX_PLAIN:
            raise _invalid(request, f"at most {MAX_PLAIN} partitions expected")
        if request.server_assignor is not None and request.server_assignor not in ASSIGNORS:
            detail = f"assignor {request.server_assignor!r} found, one of {', '.join(ASSIGNORS)} expected"
            raise KafkaError(KafkaCode.UNSUPPORTED_ASSIGNOR, detail)

    def _check_topics(self, call: KafkaCall, request: str, topics: Iterable[str]) -> Generator[None, None, None]:
        """Check that the client may describe the topics; raise BrokerError otherwise. Yield between slices."""
        for topic in topics:
            if self._slices.over():
                yield
            self._access.permissions.require(call, request, Operation.DESCRIBE, ResourceType.TOPIC, topic)

    def _heartbeat_of(
        self, ticket: int, call: KafkaCall, request: ConsumerGroupHeartbeatRequest, member_id: str
    ) -> ConsumerHeartbeatRequested:
        topics, owned = request.subscribed_topic_names, request.topic_partitions
        return ConsumerHeartbeatRequested(
            ticket,
            request.group_id,
            member_id,
            request.member_epoch,
            self._config.group_consumer_session_timeout_ms,
            self._config.group_consumer_heartbeat_interval_ms,
            call.client_id[:MAX_NAME],
            call.connection.peer_host,
            None if owned is None else tuple((one.topic_id.hex(), tuple(one.partitions)) for one in owned),
            None if topics is None else tuple(dict.fromkeys(topics)),
            request.subscribed_topic_regex,
            request.instance_id,
            request.rack_id,
            request.rebalance_timeout_ms if request.rebalance_timeout_ms > 0 else None,
        )

    def _visible(
        self, call: KafkaCall, request: ConsumerGroupHeartbeatRequest, assigned: Iterable[messages.TopicPartitions]
    ) -> list[TopicPartitions]:
        """Return the assigned partitions of topics that the client may describe.

        The member's pattern may also match other topics.
        """
        return [
            TopicPartitions(topic_id=bytes.fromhex(one.topic_id), partitions=list(one.partitions))
            for one in assigned
            if self._access.permissions.allows(call, Operation.DESCRIBE, ResourceType.TOPIC, one.topic)
        ]

    async def describe(self, call: KafkaCall, request: ConsumerGroupDescribeRequest) -> ConsumerGroupDescribeResponse:
        groups = []
        for name in islice(dict.fromkeys(request.group_ids), MAX_ENTRIES):  # each once: a group may be large
            await call.pause()
            try:
                self._access.require(call, "ConsumerGroupDescribe", Operation.DESCRIBE, name)
                operations = _UNKNOWN
                if request.include_authorized_operations:
                    operations = self._access.permissions.operations(call, ResourceType.GROUP, name)
                described = await self._slices.result(self._described(call, name, operations))
            except REFUSALS as error:
                described = ConsumerGroupDescribeGroup(
                    error_code=consumer_group_code(error), error_message=str(error)[:1000], group_id=name
                )
            groups.append(described)
        return ConsumerGroupDescribeResponse(groups=groups)

    def _described(
        self, call: KafkaCall, name: str, operations: int
    ) -> Generator[None, None, ConsumerGroupDescribeGroup]:
        groups = self._access.host(name).groups
        parts = groups.describe(name)
        found: messages.DescribedGroup | None = None
        try:
            while groups.is_consumer_group(name):
                next(parts)
                if self._slices.over():
                    yield
        except StopIteration as described:
            found = described.value
        if found is None:
            raise BrokerError(ErrorCode.GROUP_ID_NOT_FOUND, f"there is no group {name!r} of KIP-848")
        topics = {one.topic for member in found.members for one in (*member.owned, *member.target)}
        yield from self._check_topics(call, "ConsumerGroupDescribe", sorted(topics))
        return ConsumerGroupDescribeGroup(
            group_id=name,
            group_state=STATES[found.state],
            group_epoch=found.group_epoch,
            assignment_epoch=found.group_epoch,
            assignor_name=ASSIGNORS[0],
            members=[_member(member) for member in found.members],
            authorized_operations=operations,
        )


def consumer_group_code(error: BrokerError | KafkaError) -> int:
    """Return Kafka's error code for a failed request of KIP-848.

    A classic group gets the code GROUP_ID_NOT_FOUND, because these requests are not for classic groups.
    """
    if error.code == ErrorCode.INCONSISTENT_GROUP_PROTOCOL:
        return int(ErrorCode.GROUP_ID_NOT_FOUND)
    return group_code(error)


def _invalid(request: ConsumerGroupHeartbeatRequest, detail: str) -> BrokerError:
    return BrokerError(ErrorCode.INVALID_REQUEST, f"group {request.group_id!r}: {detail}")


def _member(member: messages.MemberDescription) -> ConsumerGroupDescribeMember:
    return ConsumerGroupDescribeMember(
        member_id=member.member_id,
        instance_id=member.instance_id or None,
        rack_id=member.rack or None,
        member_epoch=member.member_epoch,
        client_id=member.client_id,
        client_host=f"/{member.host}",
        subscribed_topic_names=list(member.topics),
        subscribed_topic_regex=member.pattern or None,
        assignment=_assignment(member.owned),
        target_assignment=_assignment(member.target),
        member_type=_CONSUMER,
    )


def _assignment(partitions: Iterable[messages.TopicPartitions]) -> ConsumerGroupDescribeAssignment:
    return ConsumerGroupDescribeAssignment(
        topic_partitions=[
            ConsumerGroupDescribeTopicPartitions(
                topic_id=bytes.fromhex(one.topic_id), topic_name=one.topic, partitions=list(one.partitions)
            )
            for one in partitions
        ]
    )
