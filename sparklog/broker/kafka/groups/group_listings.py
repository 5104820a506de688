"""The requests of operators about groups: ListGroups, DescribeGroups and DeleteGroups."""

from __future__ import annotations

from collections.abc import Generator
from itertools import islice

from sparklog.broker.kafka.call import KafkaCall
from sparklog.broker.kafka.error_codes import REFUSALS
from sparklog.broker.kafka.groups.group_access import STATES, GroupAccess, group_code
from sparklog.broker.lifecycle.broker import Broker
from sparklog.coordinator.classic_group import ClassicGroup, GroupPhase
from sparklog.coordinator.groups import Groups
from sparklog.errors import BrokerError, ErrorCode
from sparklog.kafka.wire.groups import (
    DeletableGroupResult,
    DeleteGroupsRequest,
    DeleteGroupsResponse,
    DescribedGroup,
    DescribedGroupMember,
    DescribeGroupsRequest,
    DescribeGroupsResponse,
    ListedGroup,
    ListGroupsRequest,
    ListGroupsResponse,
)
from sparklog.protocol.fields import MAX_ENTRIES
from sparklog.protocol.messages import DeleteGroup
from sparklog.security.acls import CLUSTER_NAME, Operation, ResourceType

#: Kafka's names of the types of groups.
CLASSIC, CONSUMER = "classic", "consumer"
#: The value of a response's authorized operations if the response does not report them.
_UNKNOWN = -0x80000000
#: The first version of DescribeGroups whose response has an error for a group that does not exist.
_NOT_FOUND = 6


class GroupListings:
    """The handlers of the requests of operators about groups."""

    def __init__(self, broker: Broker, access: GroupAccess) -> None:
        self._groups = broker.groups
        self._slices = broker.slices
        self._access = access

    async def list_groups(self, call: KafkaCall, request: ListGroupsRequest) -> ListGroupsResponse:
        """Return the groups that this broker coordinates.

        If the request names states or types, return only groups that have one of these states or types.
        """
        try:
            return ListGroupsResponse(groups=await self._slices.result(self._listed(call, request)))
        except BrokerError as error:
            return ListGroupsResponse(error_code=group_code(error))

    def _listed(self, call: KafkaCall, request: ListGroupsRequest) -> Generator[None, None, list[ListedGroup]]:
        permissions = self._access.permissions
        sees_all = permissions.allows(call, Operation.DESCRIBE, ResourceType.CLUSTER, CLUSTER_NAME)
        states = {state.lower() for state in request.states_filter}
        types = {kind.lower() for kind in request.types_filter}
        found: list[ListedGroup] = []
        for host in self._groups.all_ready():
            for name in host.groups.names():
                if self._slices.over():
                    yield
                if not sees_all and not permissions.allows(call, Operation.DESCRIBE, ResourceType.GROUP, name):
                    continue
                listed = _listed(host.groups, name)
                if (not states or listed.group_state.lower() in states) and (not types or listed.group_type in types):
                    found.append(listed)
        return found

    async def describe(self, call: KafkaCall, request: DescribeGroupsRequest) -> DescribeGroupsResponse:
        """Describe groups of the classic protocol. Groups of KIP-848 do not exist for this request."""
        groups = []
        for name in islice(dict.fromkeys(request.groups), MAX_ENTRIES):  # each once: a group may be large
            await call.pause()
            try:
                self._access.require(call, "DescribeGroups", Operation.DESCRIBE, name)
                operations = _UNKNOWN
                if request.include_authorized_operations:
                    operations = self._access.permissions.operations(call, ResourceType.GROUP, name)
                described = await self._slices.result(self._described(name, call.version, operations))
            except REFUSALS as error:
                described = DescribedGroup(error_code=group_code(error), group_id=name)
            groups.append(described)
        return DescribeGroupsResponse(groups=groups)

    def _described(self, name: str, version: int, operations: int) -> Generator[None, None, DescribedGroup]:
        groups = self._access.host(name).groups
        if not groups.exists(name) or groups.is_consumer_group(name):
            code, text = ErrorCode.NONE, None
            if version >= _NOT_FOUND:
                code, text = ErrorCode.GROUP_ID_NOT_FOUND, f"Group {name} not found."
            return DescribedGroup(
                error_code=int(code), error_message=text, group_id=name, group_state=GroupPhase.DEAD.value
            )
        group = groups.classic(name)
        if group is None:
            return DescribedGroup(group_id=name, group_state=GroupPhase.EMPTY.value, authorized_operations=operations)
        stable = group.phase is GroupPhase.STABLE
        members = []
        for member in list(group.members.values()):
            if self._slices.over():
                yield
            members.append(
                DescribedGroupMember(
                    member_id=member.member_id,
                    group_instance_id=member.instance_id or None,
                    client_id=member.client_id,
                    client_host=member.host,
                    member_metadata=member.metadata(group.protocol) if stable else b"",
                    member_assignment=member.assignment if stable else b"",
                )
            )
        return DescribedGroup(
            group_id=name,
            group_state=group.phase.value,
            protocol_type=group.protocol_type,
            protocol_data=group.protocol if stable else "",
            members=members,
            authorized_operations=operations,
        )

    async def delete(self, call: KafkaCall, request: DeleteGroupsRequest) -> DeleteGroupsResponse:
        results = []
        for name in islice(dict.fromkeys(request.groups_names), MAX_ENTRIES):
            await call.pause()
            code = 0
            try:
                self._access.require(call, "DeleteGroups", Operation.DELETE, name)
                self._access.host(name)
                await call.native(DeleteGroup(0, name))
            except REFUSALS as error:
                code = group_code(error)
            results.append(DeletableGroupResult(group_id=name, error_code=code))
        return DeleteGroupsResponse(results=results)


def _listed(groups: Groups, name: str) -> ListedGroup:
    if groups.is_consumer_group(name):
        state, _ = groups.summary(name)
        return ListedGroup(group_id=name, protocol_type=CONSUMER, group_state=STATES[state], group_type=CONSUMER)
    classic: ClassicGroup | None = groups.classic(name)
    if classic is None:
        return ListedGroup(group_id=name, group_state=GroupPhase.EMPTY.value, group_type=CLASSIC)
    return ListedGroup(
        group_id=name, protocol_type=classic.protocol_type, group_state=classic.phase.value, group_type=CLASSIC
    )
