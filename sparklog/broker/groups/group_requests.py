"""Handlers of requests about groups, members and offsets.

A handler checks the request, passes it to the group's coordinator, and responds with the coordinator's result.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
import operator
from collections.abc import Callable, Generator, Iterable, Set

import msgspec

from sparklog.broker.context import BrokerContext
from sparklog.broker.groups.group_host import GroupHost, TakesPart
from sparklog.broker.metadata_cache import MetadataCache
from sparklog.broker.requests.access import Access
from sparklog.broker.requests.delayed_replies import reply_later
from sparklog.broker.requests.slices import Slices, Steps, answer_failure, answer_in_slices
from sparklog.broker.transactions.hosted_coordinators import HostedCoordinators
from sparklog.config import BrokerConfig
from sparklog.coordinator.effects import Assigned, Done, Outcome, Refused
from sparklog.coordinator.group_events import CommitRequested, DeleteRequested, HeartbeatRequested, HoldRequested
from sparklog.coordinator.group_records import About, CommittedOffset, GroupValue
from sparklog.errors import BrokerError, ErrorCode
from sparklog.model import TopicPartition
from sparklog.net.server_connection import ServerConnection
from sparklog.protocol.fields import MAX_ENTRIES, MAX_PLAIN
from sparklog.protocol.messages import (
    Ack,
    CommitOffsets,
    CommitOffsetsReply,
    DeleteGroup,
    DescribedGroup,
    DescribeGroup,
    DescribeGroupReply,
    ErrorReply,
    FetchOffsets,
    FetchOffsetsReply,
    GroupOffset,
    Heartbeat,
    HeartbeatReply,
    HoldOffsets,
    ListGroups,
    ListGroupsReply,
    PartitionResult,
    Reply,
)
from sparklog.protocol.senders import SenderKind


class GroupRequests:
    """The handlers of requests about groups.

    Not thread-safe: use them only on the broker's event loop.
    """

    def __init__(
        self,
        context: BrokerContext,
        access: Access,
        slices: Slices,
        *,
        groups: HostedCoordinators[GroupHost],
        takes_part: TakesPart,
    ) -> None:
        self._context = context
        self._access = access
        self._slices = slices
        self._groups = groups
        self._takes_part = takes_part

    def commit_offsets(self, connection: ServerConnection, request: CommitOffsets, body: memoryview) -> None:
        """Commit the offsets in a request of a member, another client or a transaction coordinator.

        The offsets of a transaction are accepted without checks: the transaction is already committed, even if a topic
        has been deleted since.
        """
        if request.transaction is not None:
            self._access.require(connection, SenderKind.BROKER, "CommitOffsets of a transaction")
        check_offsets(request)
        work = self._commit(connection, request)
        self._slices.run(connection, work, lambda error: answer_failure(connection, request, error))

    def _commit(self, connection: ServerConnection, request: CommitOffsets) -> Steps:
        refused: dict[int, PartitionResult] = {}
        taken: list[GroupOffset] = []
        for number, offset in enumerate(request.offsets):
            if self._slices.over():
                yield None
            refusal = (
                _refusal(self._context.cache, offset, member=bool(request.member_id))
                if request.transaction is None
                else None
            )
            if refusal is not None:
                refused[number] = refusal
            else:
                taken.append(offset)

        def on_result(error: BrokerError | None) -> None:
            if error is not None:
                connection.reply(ErrorReply(request.cid, error.code, error.detail))
                return
            results = tuple(
                refused.get(number) or PartitionResult(offset.topic, offset.partition, ErrorCode.NONE)
                for number, offset in enumerate(request.offsets)
            )
            connection.reply(CommitOffsetsReply(request.cid, results))

        commit_offsets(self._groups, self._context.cache, request, offsets=tuple(taken), on_result=on_result)

    def fetch_offsets(self, connection: ServerConnection, request: FetchOffsets, body: memoryview) -> None:
        host = self._groups.of(request.group)
        groups = host.groups
        if request.partitions is None and not request.member_id:
            work = self._all_offsets(request.cid, groups.values(request.group))
            answer_in_slices(self._slices, connection, request, work)
            return
        known = groups.offsets(request.group, request.partitions)
        wanted = sorted(known) if request.partitions is None else list(dict.fromkeys(request.partitions))
        held: Set[tuple[str, int]] = frozenset()
        if request.member_id:
            detail = groups.refuses_fetch(request.group, request.member_id, request.member_epoch, wanted)
            if detail:
                raise BrokerError(ErrorCode.STALE_MEMBER_EPOCH, detail)
            holds = groups.holds(request.group, request.member_id, wanted)
            host.check_holds(request.group, holds)
            held = groups.held(request.group, request.member_id, wanted) if holds else frozenset()
            if held and len(held) == len(wanted):
                name = holds[0][0]
                detail = f"group {request.group!r}: transaction {name!r}, which offsets were sent with, has not ended"
                raise BrokerError(ErrorCode.UNSTABLE_OFFSET_COMMIT, detail)
        found = tuple(known[place] for place in wanted if place in known and place not in held)
        connection.reply(FetchOffsetsReply(request.cid, found, tuple(sorted(held))))

    def _all_offsets(self, cid: int, values: Iterable[GroupValue]) -> Generator[None, None, Reply]:
        """Return a reply with all offsets among the values of a group, sorted by topic and partition.

        There may be hundreds of thousands of values, so this yields when its slice of time is used up.
        """
        by_topic: dict[str, list[GroupOffset]] = {}
        for value in values:
            if self._slices.over():
                yield
            if isinstance(value, CommittedOffset):
                by_topic.setdefault(value.offset.topic, []).append(value.offset)
        found: list[GroupOffset] = []
        for _, offsets in sorted(by_topic.items()):
            if self._slices.over():
                yield
            found += sorted(offsets, key=lambda offset: offset.partition)
        return FetchOffsetsReply(cid, tuple(found))

    def hold_offsets(self, connection: ServerConnection, request: HoldOffsets, body: memoryview) -> None:
        """Block the offsets that a member has added to a transaction. They are blocked until the transaction ends.

        The transaction's coordinator must first confirm that the transaction exists.
        """
        if not request.member_id:
            raise BrokerError(ErrorCode.INVALID_REQUEST, f"group {request.group!r}: the member id is empty")
        self._groups.of(request.group)
        reply_later(self._context, connection, request, self._hold(request))

    async def _hold(self, request: HoldOffsets) -> Reply:
        takes_part, epoch = await self._takes_part(request.key, request.producer_id)
        if not takes_part:
            detail = f"producer {request.producer_id} is not part of the open transaction of {request.key!r}"
            raise BrokerError(ErrorCode.INVALID_TXN_STATE, detail)
        done: asyncio.Future[Outcome] = asyncio.get_running_loop().create_future()

        def on_result(result: Outcome) -> None:
            if not done.done():
                done.set_result(result)

        hold = (request.group, request.key, request.producer_id, epoch)
        member = (request.offsets, request.member_id, request.member_epoch)
        self._groups.of(request.group).ask(lambda ticket: HoldRequested(ticket, *hold, *member), on_result)
        result = await done
        if isinstance(result, Refused):
            raise BrokerError(result.code, result.detail)
        return Ack(request.cid)

    def _host_of(self, connection: ServerConnection) -> str:
        """Return a member's host as other hosts know it.

        The connection of a member on this broker's host has no address, so the broker's own host is returned.
        """
        if not connection.within_host:
            return connection.peer.rpartition(":")[0].strip("[]")
        own = self._context.cache.endpoint(self._context.broker_id)
        return "localhost" if own is None else own.host

    def heartbeat(self, connection: ServerConnection, request: Heartbeat, body: memoryview) -> None:
        """Respond when the coordinator has a new assignment for the member, or when the heartbeat interval ends."""
        if not request.member_id:
            raise BrokerError(ErrorCode.INVALID_REQUEST, f"group {request.group!r}: the member id is empty")
        _check_sizes(request)
        _check_times(request, self._context.config)
        about = About(
            tuple(dict.fromkeys(request.topics)),
            request.pattern,
            request.rack,
            request.instance_id,
            request.session_timeout_ms,
            request.rebalance_timeout_ms,
            request.heartbeat_interval_ms,
            connection.client_id,
            self._host_of(connection),
        )

        def on_result(result: Outcome) -> None:
            if isinstance(result, Refused):
                connection.reply(ErrorReply(request.cid, result.code, result.detail))
            else:
                assert isinstance(result, Assigned)
                connection.reply(HeartbeatReply(request.cid, result.member_epoch, result.assigned))

        member = (request.group, request.member_id, request.member_epoch, request.sequence, request.owned, about)
        self._groups.of(request.group).ask(lambda ticket: HeartbeatRequested(ticket, *member), on_result)

    def describe(self, connection: ServerConnection, request: DescribeGroup, body: memoryview) -> None:
        parts = self._groups.of(request.group).groups.describe(request.group)
        answer_in_slices(self._slices, connection, request, self._describe(request.cid, parts))

    def _describe(self, cid: int, parts: Generator[None, None, DescribedGroup | None]) -> Generator[None, None, Reply]:
        try:
            while True:
                next(parts)
                if self._slices.over():
                    yield
        except StopIteration as described:
            return DescribeGroupReply(cid, described.value)

    def delete(self, connection: ServerConnection, request: DeleteGroup, body: memoryview) -> None:
        def on_result(result: Outcome) -> None:
            if isinstance(result, Refused):
                connection.reply(ErrorReply(request.cid, result.code, result.detail))
            else:
                reply = Ack(request.cid)
                connection.reply(reply)
                self._context.audit.replied(connection, request, reply)

        host = self._groups.of(request.group)
        host.ask(lambda ticket: DeleteRequested(ticket, request.group), on_result)

    def list_groups(self, connection: ServerConnection, request: ListGroups, body: memoryview) -> None:
        answer_in_slices(self._slices, connection, request, self._list_groups(request.cid))

    def _list_groups(self, cid: int) -> Generator[None, None, Reply]:
        """Return a reply with all groups of this broker, sorted by name.

        There may be hundreds of thousands of groups. Each coordinator's names are already sorted, so they are merged.
        """
        listings: list[Iterable[tuple[str, GroupHost]]] = []
        for host in self._groups.all_ready():
            if self._slices.over():
                yield
            listings.append(zip(host.groups.names(), itertools.repeat(host), strict=False))
        names: list[str] = []
        states: list[tuple[str, int]] = []
        for name, host in heapq.merge(*listings, key=operator.itemgetter(0)):
            if self._slices.over():
                yield
            names.append(name)
            states.append(host.groups.summary(name))
        return ListGroupsReply(cid, tuple(names), tuple(states))


def check_offsets(request: CommitOffsets) -> None:
    """Raise BrokerError INVALID_REQUEST if a client's request has too many offsets."""
    if request.transaction is None and len(request.offsets) > MAX_ENTRIES:
        detail = f"{len(request.offsets)} offsets found in one request, at most {MAX_ENTRIES} expected"
        raise BrokerError(ErrorCode.INVALID_REQUEST, f"group {request.group!r}: {detail}")


def commit_offsets(
    groups: HostedCoordinators[GroupHost],
    cache: MetadataCache,
    request: CommitOffsets,
    *,
    offsets: tuple[GroupOffset, ...],
    on_result: Callable[[BrokerError | None], None],
) -> None:
    """Commit ``offsets`` for the request's group, and call ``on_result`` with the error or None.

    Raises BrokerError if this broker does not coordinate the group.
    """
    host = groups.of(request.group)
    named = tuple(_with_topic_id(cache, offset) for offset in offsets)

    def outcome(result: Outcome) -> None:
        if isinstance(result, Refused):
            on_result(BrokerError(result.code, result.detail))
        else:
            assert isinstance(result, Done)
            on_result(None)

    member = (request.member_id, request.member_epoch)
    host.ask(lambda ticket: CommitRequested(ticket, request.group, named, request.transaction, *member), outcome)


def _refusal(cache: MetadataCache, offset: GroupOffset, *, member: bool) -> PartitionResult | None:
    code, detail = ErrorCode.INVALID_REQUEST, below_zero(offset)
    if not detail:
        code, detail = ErrorCode.UNKNOWN_TOPIC_OR_PARTITION, _unknown(cache, offset, member=member)
    return PartitionResult(offset.topic, offset.partition, code, detail) if detail else None


def _unknown(cache: MetadataCache, offset: GroupOffset, *, member: bool) -> str:
    """Return why there can be no offset for this partition, or the empty string.

    A partition that a member owns exists unless it was deleted, even if this broker does not know it yet. A commit of
    another client may arrive late: an offset of a deleted topic would then count for a new topic of the same name.
    """
    if member and offset.topic_id and offset.topic_id not in cache.forgotten:
        return ""
    tp = TopicPartition(offset.topic, offset.partition)
    known = cache.partition(tp)
    if known is None:
        return f"this broker does not know partition {tp}"
    if offset.topic_id not in {"", known.topic_id}:
        return f"{tp}: topic id {offset.topic_id} found, {known.topic_id} expected"
    return ""


def below_zero(offset: GroupOffset) -> str:
    """Return an error text if the offset is negative, otherwise the empty string."""
    named = f"{offset.topic}-{offset.partition}"
    return "" if offset.offset >= 0 else f"{named}: offset {offset.offset} found, 0 or more expected"


def _with_topic_id(cache: MetadataCache, offset: GroupOffset) -> GroupOffset:
    known = cache.topic(offset.topic)
    if offset.topic_id or known is None:
        return offset
    return msgspec.structs.replace(offset, topic_id=known.change.topic_id)


def _check_sizes(request: Heartbeat) -> None:
    """Raise BrokerError INVALID_REQUEST if the member's state is too large: it must be much smaller than one append."""
    owned = sum(len(found.partitions) for found in request.owned)
    if owned > MAX_PLAIN:
        detail = f"{owned} partitions found that a member owns, {MAX_PLAIN} at most expected"
        raise BrokerError(ErrorCode.INVALID_REQUEST, f"group {request.group!r}: {detail}")
    if len(request.topics) > MAX_ENTRIES:
        detail = f"{len(request.topics)} topics found, {MAX_ENTRIES} at most expected: subscribe by a pattern instead"
        raise BrokerError(ErrorCode.INVALID_REQUEST, f"group {request.group!r}: {detail}")


def _check_times(request: Heartbeat, config: BrokerConfig) -> None:
    """Check the member's timeouts and heartbeat interval against the broker's limits.

    Raises:
        BrokerError: INVALID_SESSION_TIMEOUT, INVALID_CONFIG or INVALID_REQUEST, with the limits.
    """
    low, high = config.group_min_session_timeout_ms, config.group_max_session_timeout_ms
    if not low <= request.session_timeout_ms <= high:
        detail = f"session.timeout.ms={request.session_timeout_ms}: expected {low} to {high}"
        raise BrokerError(ErrorCode.INVALID_SESSION_TIMEOUT, f"group {request.group!r}: {detail}")
    low, high = config.group_min_heartbeat_interval_ms, config.group_max_heartbeat_interval_ms
    if not low <= request.heartbeat_interval_ms <= high:
        detail = f"heartbeat.interval.ms={request.heartbeat_interval_ms}: expected {low} to {high}"
        raise BrokerError(ErrorCode.INVALID_CONFIG, f"group {request.group!r}: {detail}")
    if request.rebalance_timeout_ms < 1:
        detail = f"a time of {request.rebalance_timeout_ms} ms found for giving partitions up, 1 or more expected"
        raise BrokerError(ErrorCode.INVALID_REQUEST, f"group {request.group!r}: {detail}")
