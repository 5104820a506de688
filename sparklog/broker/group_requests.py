"""Requests about groups' offsets: checked, handed to the group's coordinator, answered with what it says."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from sparklog.broker.state import BrokerState
from sparklog.coordinator.effects import Done, Outcome, Refused
from sparklog.coordinator.group_offsets import CommitRequested
from sparklog.errors import BrokerError, ErrorCode
from sparklog.model import TopicPartition
from sparklog.net.server import ServerConnection
from sparklog.protocol.messages import (
    CommitOffsets,
    CommitOffsetsReply,
    ErrorReply,
    FetchOffsets,
    FetchOffsetsReply,
    GroupOffset,
    ListGroups,
    ListGroupsReply,
    PartitionResult,
)


def handle_commit_offsets(
    broker: BrokerState, connection: ServerConnection, request: CommitOffsets, body: memoryview
) -> None:
    """What a transaction hands over is taken as it is: its topics may be gone, but its decision stands."""
    refused: dict[int, PartitionResult] = {}
    taken: list[GroupOffset] = []
    for number, offset in enumerate(request.offsets):
        detail = _unknown(broker, offset) if request.transaction is None else ""
        if detail:
            refused[number] = PartitionResult(
                offset.topic, offset.partition, ErrorCode.UNKNOWN_TOPIC_OR_PARTITION, detail
            )
        else:
            taken.append(offset)

    def answered(error: BrokerError | None) -> None:
        if error is not None:
            connection.reply(ErrorReply(request.cid, error.code, error.detail))
            return
        results = tuple(
            refused.get(number) or PartitionResult(offset.topic, offset.partition, ErrorCode.NONE)
            for number, offset in enumerate(request.offsets)
        )
        connection.reply(CommitOffsetsReply(request.cid, results))

    commit_offsets(broker, request, tuple(taken), answered)


def commit_offsets(
    broker: BrokerState,
    request: CommitOffsets,
    offsets: tuple[GroupOffset, ...],
    answered: Callable[[BrokerError | None], None],
) -> None:
    """Commit ``offsets`` for the request's group. Raises BrokerError when this broker does not coordinate it now."""
    host = broker.coordinators.groups.of(request.group)
    named = tuple(_with_topic_id(broker, offset) for offset in offsets)

    def outcome(result: Outcome) -> None:
        if isinstance(result, Refused):
            answered(BrokerError(result.code, result.detail))
        else:
            assert isinstance(result, Done)
            answered(None)

    host.ask(lambda ticket: CommitRequested(ticket, request.group, named, request.transaction), outcome)


def _unknown(broker: BrokerState, offset: GroupOffset) -> str:
    """Why there can be no offset for this partition, or the empty string."""
    if offset.offset < 0:
        return f"{offset.topic}-{offset.partition}: offset {offset.offset} found, 0 or more expected"
    tp = TopicPartition(offset.topic, offset.partition)
    return "" if broker.cache.partition(tp) is not None else f"no partition {tp} is known here"


def _with_topic_id(broker: BrokerState, offset: GroupOffset) -> GroupOffset:
    known = broker.cache.topic(offset.topic)
    if offset.topic_id or known is None:
        return offset
    return msgspec.structs.replace(offset, topic_id=known.change.topic_id)


def handle_fetch_offsets(
    broker: BrokerState, connection: ServerConnection, request: FetchOffsets, body: memoryview
) -> None:
    known = broker.coordinators.groups.of(request.group).groups.offsets(request.group)
    wanted = sorted(known) if request.partitions is None else list(dict.fromkeys(request.partitions))
    found = tuple(known[place] for place in wanted if place in known)
    connection.reply(FetchOffsetsReply(request.cid, found))


def handle_list_groups(
    broker: BrokerState, connection: ServerConnection, request: ListGroups, body: memoryview
) -> None:
    names = [name for host in broker.coordinators.groups.all_ready() for name in host.groups.names()]
    connection.reply(ListGroupsReply(request.cid, tuple(sorted(names))))
