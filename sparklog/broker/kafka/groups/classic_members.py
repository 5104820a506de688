"""The requests of members of classic groups: JoinGroup, SyncGroup, Heartbeat and LeaveGroup."""

from __future__ import annotations

import uuid

from sparklog.broker.kafka.call import KafkaCall
from sparklog.broker.kafka.error_codes import REFUSALS, KafkaCode
from sparklog.broker.kafka.groups.group_access import MAX_NAME, GroupAccess, group_code
from sparklog.broker.lifecycle.broker import Broker
from sparklog.coordinator.classic_events import (
    BeatRequested,
    Joined,
    JoinRequested,
    LeaveRequested,
    LeavingMember,
    Left,
    MemberIdGiven,
    Synced,
    SyncRequested,
)
from sparklog.errors import BrokerError, ErrorCode
from sparklog.kafka.wire.groups import (
    HeartbeatRequest,
    HeartbeatResponse,
    JoinGroupRequest,
    JoinGroupResponse,
    JoinGroupResponseMember,
    LeaveGroupRequest,
    LeaveGroupResponse,
    MemberIdentity,
    MemberResponse,
    SyncGroupRequest,
    SyncGroupResponse,
)
from sparklog.protocol.fields import MAX_ENTRIES
from sparklog.security.acls import Operation

#: The first version of JoinGroup in which a new member gets its id before it joins, and the first version with the
#: field ``skip_assignment``, by which a group's leader learns that it must not assign partitions.
_ID_FIRST, _SKIPS = 4, 9
#: The first version of LeaveGroup with several members.
_SEVERAL = 3


class ClassicMemberHandlers:
    """The handlers of the requests of members of classic groups."""

    def __init__(self, broker: Broker, access: GroupAccess) -> None:
        self._config = broker.context.config
        self._access = access

    async def join(self, call: KafkaCall, request: JoinGroupRequest) -> JoinGroupResponse:
        """Let a member join its group. The response waits until the rebalance has a result."""
        try:
            self._access.require(call, "JoinGroup", Operation.READ, request.group_id)
            self._check_session(request)
            outcome = await self._access.ask(request.group_id, lambda ticket: _joining(ticket, call, request))
        except REFUSALS as error:
            return JoinGroupResponse(error_code=group_code(error), member_id=request.member_id)
        if isinstance(outcome, MemberIdGiven):
            return JoinGroupResponse(error_code=KafkaCode.MEMBER_ID_REQUIRED, member_id=outcome.member_id)
        assert isinstance(outcome, Joined)
        return JoinGroupResponse(
            generation_id=outcome.generation,
            protocol_type=outcome.protocol_type,
            protocol_name=outcome.protocol,
            leader=outcome.leader,
            skip_assignment=outcome.skip_assignment,
            member_id=outcome.member_id,
            members=[
                JoinGroupResponseMember(
                    member_id=one.member_id, group_instance_id=one.instance_id or None, metadata=one.metadata
                )
                for one in outcome.members
            ],
        )

    def _check_session(self, request: JoinGroupRequest) -> None:
        low, high = self._config.group_min_session_timeout_ms, self._config.group_max_session_timeout_ms
        if not low <= request.session_timeout_ms <= high:
            detail = f"session.timeout.ms={request.session_timeout_ms}: expected {low} to {high}"
            raise BrokerError(ErrorCode.INVALID_SESSION_TIMEOUT, f"group {request.group_id!r}: {detail}")

    async def sync(self, call: KafkaCall, request: SyncGroupRequest) -> SyncGroupResponse:
        """Return a member's assignment. The response waits until the leader of the group sends the assignments."""
        try:
            self._access.require(call, "SyncGroup", Operation.READ, request.group_id)
            outcome = await self._access.ask(
                request.group_id,
                lambda ticket: SyncRequested(
                    ticket,
                    request.group_id,
                    member_id=request.member_id,
                    generation=request.generation_id,
                    instance_id=request.group_instance_id or "",
                    protocol_type=request.protocol_type or "",
                    protocol=request.protocol_name or "",
                    assignments=tuple((one.member_id, bytes(one.assignment)) for one in request.assignments),
                ),
            )
        except REFUSALS as error:
            return SyncGroupResponse(error_code=group_code(error))
        assert isinstance(outcome, Synced)
        return SyncGroupResponse(
            protocol_type=outcome.protocol_type, protocol_name=outcome.protocol, assignment=outcome.assignment
        )

    async def heartbeat(self, call: KafkaCall, request: HeartbeatRequest) -> HeartbeatResponse:
        try:
            self._access.require(call, "Heartbeat", Operation.READ, request.group_id)
            await self._access.ask(
                request.group_id,
                lambda ticket: BeatRequested(
                    ticket,
                    request.group_id,
                    member_id=request.member_id,
                    generation=request.generation_id,
                    instance_id=request.group_instance_id or "",
                ),
            )
        except REFUSALS as error:
            return HeartbeatResponse(error_code=group_code(error))
        return HeartbeatResponse()

    async def leave(self, call: KafkaCall, request: LeaveGroupRequest) -> LeaveGroupResponse:
        """Remove members from a group. The response has an error code for each member.

        A request before version 3 names one member, and the error code of its response is that of the member.
        """
        named = request.members if call.version >= _SEVERAL else [MemberIdentity(member_id=request.member_id)]
        try:
            self._access.require(call, "LeaveGroup", Operation.READ, request.group_id)
            if len(named) > MAX_ENTRIES:
                raise BrokerError(ErrorCode.INVALID_REQUEST, f"at most {MAX_ENTRIES} members expected")
            leaving = tuple(LeavingMember(one.member_id, one.group_instance_id or "") for one in named)
            outcome = await self._access.ask(
                request.group_id, lambda ticket: LeaveRequested(ticket, request.group_id, leaving)
            )
        except REFUSALS as error:
            return LeaveGroupResponse(error_code=group_code(error))
        assert isinstance(outcome, Left)
        if call.version < _SEVERAL:
            return LeaveGroupResponse(error_code=int(outcome.codes[0]))
        return LeaveGroupResponse(
            members=[
                MemberResponse(member_id=one.member_id, group_instance_id=one.group_instance_id, error_code=int(code))
                for one, code in zip(named, outcome.codes, strict=True)
            ]
        )


def _joining(ticket: int, call: KafkaCall, request: JoinGroupRequest) -> JoinRequested:
    instance_id = request.group_instance_id or ""
    rebalance_timeout_ms = request.rebalance_timeout_ms
    return JoinRequested(
        ticket,
        request.group_id,
        member_id=request.member_id,
        new_member_id=f"{(instance_id or call.client_id)[:MAX_NAME]}-{uuid.uuid4()}",
        protocol_type=request.protocol_type,
        protocols=tuple((one.name, bytes(one.metadata)) for one in request.protocols),
        instance_id=instance_id,
        session_timeout_ms=request.session_timeout_ms,
        rebalance_timeout_ms=rebalance_timeout_ms if rebalance_timeout_ms >= 0 else request.session_timeout_ms,
        client_id=call.client_id[:MAX_NAME],
        host=f"/{call.connection.peer_host}",
        needs_member_id=call.version >= _ID_FIRST and not instance_id,
        can_skip=call.version >= _SKIPS,
    )
