"""Partial replies, for a principal that may do only a part of a request or see only a part of a reply.

This module is pure. A request with entries is split: the broker handles the allowed entries, and ``merged`` adds an
error for each refused entry to the reply. ``shown`` removes from a reply what the principal may not see.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Generator, Sequence
from typing import TypeVar

from msgspec.structs import replace

from sparklog.errors import ErrorCode
from sparklog.protocol.messages import (
    CommitOffsets,
    CommitOffsetsReply,
    DeletedRecords,
    DeleteRecords,
    DeleteRecordsReply,
    DescribeBrokerReply,
    DescribedTransaction,
    DescribeGroupReply,
    ErrorReply,
    FetchOffsets,
    FetchOffsetsReply,
    FindHangingReply,
    HeartbeatReply,
    ListedOffset,
    ListGroupsReply,
    ListOffsets,
    ListOffsetsReply,
    ListTransactionsReply,
    MemberDescription,
    PartitionResult,
    Produce,
    ProduceReply,
    ProduceResult,
    Reply,
    Request,
)
from sparklog.protocol.set_aside_messages import KNOWN_BY
from sparklog.record.header import HEADER_BYTES
from sparklog.security.acls import CLUSTER_NAME, Operation, ResourceType
from sparklog.security.request_rules import transactional_id

_T = TypeVar("_T")
REFUSED = ErrorCode.TOPIC_AUTHORIZATION_FAILED
#: A function that returns whether the principal may do the operation on the resource.
Allows = Callable[[Operation, ResourceType, str], bool]
#: A generator that returns a reply. It yields repeatedly before that, so that the broker can do other work.
Shown = Generator[None, None, Reply]
#: The requests whose entries the broker can handle separately.
Split = Produce | ListOffsets | DeleteRecords | CommitOffsets | FetchOffsets


def without(request: Split, body: memoryview, refused: Collection[int]) -> tuple[Request, memoryview]:
    """Return the request and its body without the entries whose indices are in ``refused``."""
    if isinstance(request, CommitOffsets):
        return replace(request, offsets=_others(request.offsets, refused)), body
    kept = replace(request, partitions=_others(request.partitions or (), refused))
    return kept, _body_without(request, body, refused) if isinstance(request, Produce) else body


def _others(entries: Sequence[_T], refused: Collection[int]) -> tuple[_T, ...]:
    return tuple(entry for index, entry in enumerate(entries) if index not in refused)


def _body_without(request: Produce, body: memoryview, refused: Collection[int]) -> memoryview:
    """Return the body without the parts of the refused entries.

    If the sizes in the request do not match the body, return the whole body. The broker then refuses the request.
    """
    sizes = [wanted.batch_count * HEADER_BYTES + wanted.body_bytes for wanted in request.partitions]
    if sum(sizes) != len(body) or any(size < 0 for size in sizes):
        return body
    kept = bytearray()
    at = 0
    for index, size in enumerate(sizes):
        if index not in refused:
            kept += body[at : at + size]
        at += size
    return memoryview(bytes(kept))


def merged(request: Split, reply: Reply, refused: dict[int, str]) -> Reply:
    """Return the reply with a refusal inserted at the index of each refused entry.

    ``refused`` maps these indices to error texts. If the reply is an error for the whole request, return it unchanged.
    """
    match request, reply:
        case Produce(), ProduceReply():
            return replace(
                reply, results=_woven(reply.results, refused, lambda n: ProduceResult(REFUSED, -1, -1, -1, refused[n]))
            )
        case ListOffsets(), ListOffsetsReply():
            return replace(
                reply, results=_woven(reply.results, refused, lambda n: ListedOffset(REFUSED, -1, -1, -1, refused[n]))
            )
        case DeleteRecords(), DeleteRecordsReply():
            return replace(
                reply, results=_woven(reply.results, refused, lambda n: DeletedRecords(REFUSED, -1, refused[n]))
            )
        case CommitOffsets(), CommitOffsetsReply():
            offsets = request.offsets
            return replace(
                reply,
                results=_woven(
                    reply.results,
                    refused,
                    lambda n: PartitionResult(offsets[n].topic, offsets[n].partition, REFUSED, refused[n]),
                ),
            )
        case FetchOffsets(), FetchOffsetsReply():
            named = request.partitions or ()
            refusals = (PartitionResult(*named[n], REFUSED, refused[n]) for n in sorted(refused))
            return replace(reply, refused=tuple(refusals))
    return reply


def _woven(results: Sequence[_T], refused: Collection[int], refusal: Callable[[int], _T]) -> tuple[_T, ...]:
    """Return the results with a refusal at each of the refused indices."""
    others = iter(results)
    return tuple(refusal(index) if index in refused else next(others) for index in range(len(results) + len(refused)))


def shown(reply: Reply, allows: Allows, over: Callable[[], bool]) -> Shown:
    """Return the reply without the parts that ``allows`` refuses.

    The function is a generator that yields whenever ``over`` returns true. If a part cannot be removed, return an error
    instead of the reply.
    """
    match reply:
        case ListGroupsReply():
            return (yield from _groups(reply, allows, over))
        case ListTransactionsReply():
            return (yield from _transactions(reply, allows, over))
        case FetchOffsetsReply():
            offsets = yield from _kept(reply.offsets, lambda offset: _sees(allows, offset.topic), over)
            held = yield from _kept(reply.held, lambda place: _sees(allows, place[0]), over)
            return replace(reply, offsets=offsets, held=held)
        case FindHangingReply():
            found = yield from _kept(
                reply.transactions, lambda one: allows(Operation.READ, ResourceType.TOPIC, one.topic), over
            )
            return replace(reply, transactions=found)
        case HeartbeatReply():
            assigned = yield from _kept(reply.assigned, lambda given: _sees(allows, given.topic), over)
            return replace(reply, assigned=assigned)
        case DescribeGroupReply():
            return (yield from _group(reply, allows, over))
        case DescribeBrokerReply():
            if allows(Operation.DESCRIBE_CONFIGS, ResourceType.CLUSTER, CLUSTER_NAME):
                return reply
            # Clients recognise by this setting what the broker supports.
            return replace(reply, settings={key: reply.settings[key] for key in {KNOWN_BY} & reply.settings.keys()})
    return reply


def _sees(allows: Allows, topic: str) -> bool:
    return allows(Operation.DESCRIBE, ResourceType.TOPIC, topic)


def _kept(
    entries: Sequence[_T], keeps: Callable[[_T], bool], over: Callable[[], bool]
) -> Generator[None, None, tuple[_T, ...]]:
    kept: list[_T] = []
    for entry in entries:
        if over():
            yield
        if keeps(entry):
            kept.append(entry)
    return tuple(kept)


def _groups(reply: ListGroupsReply, allows: Allows, over: Callable[[], bool]) -> Shown:
    if allows(Operation.DESCRIBE, ResourceType.CLUSTER, CLUSTER_NAME):
        return reply
    listed = list(zip(reply.groups, reply.states, strict=True))
    kept = yield from _kept(listed, lambda one: allows(Operation.DESCRIBE, ResourceType.GROUP, one[0]), over)
    return replace(reply, groups=tuple(name for name, _ in kept), states=tuple(state for _, state in kept))


def _transactions(reply: ListTransactionsReply, allows: Allows, over: Callable[[], bool]) -> Shown:
    kept: list[DescribedTransaction] = []
    for described in reply.transactions:
        if over():
            yield
        if allows(Operation.DESCRIBE, ResourceType.TRANSACTIONAL_ID, transactional_id(described.key)):
            participants = tuple(
                (producer_id, epoch, tuple(place for place in places if _sees(allows, place[0])))
                for producer_id, epoch, places in described.participants
            )
            kept.append(replace(described, participants=participants))
    return replace(reply, transactions=tuple(kept))


def _group(reply: DescribeGroupReply, allows: Allows, over: Callable[[], bool]) -> Shown:
    """Return an error if a member reads a topic that the principal may not describe. Source: Kafka's KIP-848."""
    if reply.description is None:
        return reply
    for member in reply.description.members:
        if over():
            yield
        if not all(_sees(allows, topic) for topic in _topics(member)):
            detail = f"group {reply.description.group!r}: its members read topics that the principal may not Describe"
            return ErrorReply(reply.cid, REFUSED, detail)
    return reply


def _topics(member: MemberDescription) -> set[str]:
    return {*member.topics, *(given.topic for given in (*member.owned, *member.target))}
