"""AlterReassignments and ListReassignments requests. Source: KIP-455.

A move is the reassignment of one partition. The topic's metadata in ZooKeeper has an entry for each move, with the
target replicas and the original replicas. The controller carries out the move, and a new controller continues it. The
broker checks each move separately, and writes all moves of one topic together.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Generator, Iterable

import msgspec

from sparklog.broker.context import BrokerContext
from sparklog.broker.lifecycle.zk_registration import ZkRegistration
from sparklog.broker.metadata_cache import MetadataCache
from sparklog.broker.requests.delayed_replies import reply_later, wait_for_metadata
from sparklog.broker.requests.slices import Slices, answer_in_slices
from sparklog.controller.placement import shared_hosts
from sparklog.errors import BrokerError, ErrorCode
from sparklog.model import Reassignment, TopicPartition, TopicRecord
from sparklog.net.server_connection import ServerConnection
from sparklog.protocol.messages import (
    AlterReassignments,
    AlterReassignmentsReply,
    ListReassignments,
    ListReassignmentsReply,
    PartitionResult,
    ReassignmentStatus,
    ReplicaMove,
    Reply,
)

_log = logging.getLogger(__name__)

#: The maximum wait for the controller's update about the moves. After this update, this broker's next responses have
#: the new replicas. The moves are accepted even if the update does not arrive in time.
_ECHO_TIMEOUT_MS = 1000
#: If a request has more moves of one topic than this, a thread enters them in the topic's record.
_MANY = 1000


class ReassignmentRequests:
    """The handlers of AlterReassignments and ListReassignments requests."""

    def __init__(self, context: BrokerContext, slices: Slices, registry: ZkRegistration) -> None:
        self._context = context
        self._slices = slices
        self._registry = registry

    def alter(self, connection: ServerConnection, request: AlterReassignments, body: memoryview) -> None:
        reply_later(self._context, connection, request, self._alter(request))

    async def _alter(self, request: AlterReassignments) -> Reply:
        named = Counter((move.topic, move.partition) for move in request.moves)
        by_topic: dict[str, list[ReplicaMove]] = {}
        for move in request.moves:
            by_topic.setdefault(move.topic, []).append(move)
        refused: dict[tuple[str, int], BrokerError] = {}
        for topic, moves in by_topic.items():
            wanted = []
            for move in moves:
                if named[topic, move.partition] > 1:
                    refused[topic, move.partition] = _bad(
                        move, f"named {named[topic, move.partition]} times, expected once"
                    )
                else:
                    wanted.append(move)
            if wanted:
                refused.update(await self._alter_topic(topic, wanted, throttle_bytes=request.throttle_bytes))
        await asyncio.sleep(0)
        begun = [move for move in request.moves if (move.topic, move.partition) not in refused]
        await wait_for_metadata(
            self._context, lambda: all(_arrived(self._context.cache, move) for move in begun), _ECHO_TIMEOUT_MS
        )
        await asyncio.sleep(0)
        results = [_result(move, refused.get((move.topic, move.partition))) for move in request.moves]
        return AlterReassignmentsReply(request.cid, tuple(results), _warning(self._context.cache, request.moves))

    async def _alter_topic(
        self, name: str, moves: list[ReplicaMove], *, throttle_bytes: int
    ) -> dict[tuple[str, int], BrokerError]:
        """Write the valid moves of one topic, and return the errors of the invalid moves by partition."""
        refused: dict[tuple[str, int], BrokerError] = {}

        def altered(record: TopicRecord) -> TopicRecord:
            refused.clear()
            draft = ReassignmentDraft(record, live=self._context.cache.incarnations)
            for move in moves:
                try:
                    draft.alter(move, throttle_bytes=throttle_bytes)
                except BrokerError as error:  # noqa: PERF203 - each move is checked separately
                    refused[name, move.partition] = error
            return draft.record

        try:
            found = await self._registry.change_topic(name, altered, in_thread=len(moves) > _MANY)
        except BrokerError as error:  # the record is too large: nothing was written
            return {(name, move.partition): error for move in moves}
        if found is None:
            unknown = BrokerError(ErrorCode.UNKNOWN_TOPIC_OR_PARTITION, f"topic {name!r} does not exist")
            return {(name, move.partition): unknown for move in moves}
        _log.info(
            "topic %s: accepted moves of %d partitions, refused %d", name, len(moves) - len(refused), len(refused)
        )
        return refused

    def list_moves(self, connection: ServerConnection, request: ListReassignments, body: memoryview) -> None:
        answer_in_slices(self._slices, connection, request, self._list(request.cid))

    def _list(self, cid: int) -> Generator[None, None, Reply]:
        moves: list[ReassignmentStatus] = []
        for tp, move in sorted(self._context.cache.moving.items()):
            if self._slices.over():
                yield
            moves.append(
                ReassignmentStatus(
                    tp.topic,
                    tp.partition,
                    move.target,
                    move.original,
                    replicas=move.replicas,
                    isr=move.state.isr,
                    leader=move.state.leader,
                    throttle_bytes=move.throttle_bytes,
                )
            )
        return ListReassignmentsReply(cid, tuple(moves))


def _arrived(cache: MetadataCache, move: ReplicaMove) -> bool:
    """Return whether this broker's metadata shows the move, in progress or complete.

    A cancelled move has arrived if the target is the original replicas, or if there is no move any more.
    """
    known = cache.partition(TopicPartition(move.topic, move.partition))
    if known is None:
        return False
    if move.target is None:
        return known.target in {(), known.original}
    return (known.target or known.replicas) == move.target


class ReassignmentDraft:
    """A pure object: a copy of a topic's metadata into which moves are entered one by one.

    A move is the reassignment of one partition. If the same move is entered twice, the second time has no effect.
    """

    def __init__(self, record: TopicRecord, *, live: Iterable[int]) -> None:
        self._before = record
        self._live = set(live)
        self._assignment = list(record.assignment)
        self._moves = dict(record.reassigning)

    @property
    def record(self) -> TopicRecord:
        return msgspec.structs.replace(self._before, assignment=tuple(self._assignment), reassigning=self._moves)

    def alter(self, move: ReplicaMove, *, throttle_bytes: int) -> None:
        """Begin a reassignment of a partition, or change or cancel the reassignment in progress.

        Raises:
            BrokerError: UNKNOWN_TOPIC_OR_PARTITION, INVALID_REPLICA_ASSIGNMENT, NO_REASSIGNMENT_IN_PROGRESS.
        """
        if not 0 <= move.partition < len(self._assignment):
            raise BrokerError(
                ErrorCode.UNKNOWN_TOPIC_OR_PARTITION,
                f"topic {move.topic!r} has no partition {move.partition}; it has {len(self._assignment)} partitions",
            )
        replicas = self._assignment[move.partition]
        under_way = self._moves.get(move.partition)
        if move.target is None:
            if under_way is None:
                raise BrokerError(
                    ErrorCode.NO_REASSIGNMENT_IN_PROGRESS, f"{move.topic}-{move.partition} is on {list(replicas)}"
                )
            self._enter(move.partition, msgspec.structs.replace(under_way, target=under_way.original))
            return
        self._check(move, move.target, replicas)
        if under_way is not None or move.target != replicas:
            original = under_way.original if under_way is not None else replicas
            self._enter(move.partition, Reassignment(move.target, original, throttle_bytes))

    def _check(self, move: ReplicaMove, target: tuple[int, ...], replicas: tuple[int, ...]) -> None:
        if not target:
            raise _bad(move, "gets no replica")
        if len(set(target)) != len(target):
            raise _bad(move, f"gets a broker twice: {list(target)}")
        absent = sorted(set(target) - set(replicas) - self._live)
        if absent:
            raise _bad(
                move,
                f"gets brokers {absent}, which are not live and have no replica; live brokers: {sorted(self._live)}",
            )

    def _enter(self, partition: int, move: Reassignment) -> None:
        """Enter a move. All present replicas stay until the controller sees that the target replicas are in sync."""
        others = tuple(replica for replica in self._assignment[partition] if replica not in move.target)
        self._assignment[partition] = move.target + others
        self._moves[partition] = move


def _bad(move: ReplicaMove, what: str) -> BrokerError:
    return BrokerError(ErrorCode.INVALID_REPLICA_ASSIGNMENT, f"{move.topic}-{move.partition} {what}")


def _result(move: ReplicaMove, error: BrokerError | None) -> PartitionResult:
    if error is None:
        return PartitionResult(move.topic, move.partition, ErrorCode.NONE)
    return PartitionResult(move.topic, move.partition, error.code, error.detail)


def _warning(cache: MetadataCache, moves: tuple[ReplicaMove, ...]) -> str:
    targets = tuple(move.target for move in moves if move.target)
    return shared_hosts(targets, cache.brokers)
