"""The reassignment of replicas and the election of leaders: requests to brokers, and the progress of moves."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import partial

from sparklog.client.admin.descriptions import BrokerDescription, MoveDescription
from sparklog.client.cluster.blocking_cluster import BlockingCluster
from sparklog.client.cluster.request_pieces import pieces
from sparklog.controller.replica_targets import ReplicaTargets
from sparklog.errors import BrokerError, ErrorCode
from sparklog.model import NO_LEADER, BrokerEndpoint, TopicPartition
from sparklog.protocol.messages import (
    AlterReassignments,
    AlterReassignmentsReply,
    ElectLeaders,
    ElectLeadersReply,
    ListReassignments,
    ListReassignmentsReply,
    MetadataReply,
    PartitionMetadata,
    PartitionResult,
    ReplicaMove,
)

ReplicaLists = Mapping[TopicPartition, Sequence[int]]
#: The errors for a move that has ended, or whose topic was deleted.
_ENDED = {ErrorCode.NO_REASSIGNMENT_IN_PROGRESS, ErrorCode.UNKNOWN_TOPIC_OR_PARTITION}


def alter(
    cluster: BlockingCluster, targets: Mapping[TopicPartition, Sequence[int]], *, throttle_bytes: int, timeout_ms: int
) -> str:
    """Start moves of partitions, or change them. Return a warning if replicas will share a host, or else "".

    Raises:
        BrokerError: the error of the first refused move, with the number of refused moves. The other moves are in
            progress.
    """
    moves = tuple(ReplicaMove(tp.topic, tp.partition, tuple(target)) for tp, target in targets.items())
    warning, _ = _ask(cluster, moves, throttle_bytes=throttle_bytes, timeout_ms=timeout_ms)
    return warning


def cancel_moves(
    cluster: BlockingCluster,
    partitions: Iterable[TopicPartition],
    *,
    may_have_ended: Collection[TopicPartition],
    timeout_ms: int,
) -> list[TopicPartition]:
    """Cancel moves, and return the cancelled moves.

    A move in ``may_have_ended`` is ignored if the move or its topic no longer exists. If a response was lost and the
    repeated request finds no move, the move counts as cancelled: the first request cancelled it, or it had just ended.

    Raises:
        BrokerError: the error of the first refused cancellation, with the number of refusals. The other moves are
            cancelled.
    """
    moves = tuple(ReplicaMove(tp.topic, tp.partition, None) for tp in (*partitions, *may_have_ended))
    _, taken = _ask(cluster, moves, throttle_bytes=0, timeout_ms=timeout_ms, may_have_ended=frozenset(may_have_ended))
    return taken


def _ask(
    cluster: BlockingCluster,
    moves: tuple[ReplicaMove, ...],
    *,
    throttle_bytes: int,
    timeout_ms: int,
    may_have_ended: frozenset[TopicPartition] = frozenset(),
) -> tuple[str, list[TopicPartition]]:
    """Request moves; return the warning and the accepted partitions. Raises BrokerError if partitions were refused."""
    if not moves:
        return "", []
    warnings: list[str] = []
    taken: list[TopicPartition] = []
    refused: list[PartitionResult] = []
    for piece in pieces(moves):
        request = AlterReassignments(0, tuple(piece), timeout_ms, throttle_bytes)
        warning, others = _ask_once(cluster, request, taken)
        warnings += [warning] if warning else []
        refused += [one for one in others if one.code not in _ENDED or _partition(one) not in may_have_ended]
    if refused:
        raise _refusal(refused, len(moves), len(taken))
    return "; ".join(warnings), taken


def _ask_once(
    cluster: BlockingCluster, request: AlterReassignments, taken: list[TopicPartition]
) -> tuple[str, list[PartitionResult]]:
    """Request moves once; return the warning and the refused moves. Add the accepted partitions to ``taken``."""
    done = {ErrorCode.NONE}

    def attempt() -> AlterReassignmentsReply:
        try:
            return cluster.ask_any(request, AlterReassignmentsReply)
        except BrokerError as error:
            if error.code in {ErrorCode.NETWORK_EXCEPTION, ErrorCode.REQUEST_TIMED_OUT}:
                done.add(ErrorCode.NO_REASSIGNMENT_IN_PROGRESS)
            raise

    reply = cluster.retrying("moving replicas", attempt)
    taken += [_partition(result) for result in reply.results if result.code in done]
    return reply.warning, [result for result in reply.results if result.code not in done]


def _partition(result: PartitionResult) -> TopicPartition:
    return TopicPartition(result.topic, result.partition)


def _refusal(refused: Sequence[PartitionResult], asked: int, taken: int) -> BrokerError:
    first = refused[0]
    if asked == 1:
        return BrokerError(first.code, first.detail)
    others = f"; {taken} others were accepted" if taken else ""
    return BrokerError(first.code, f"{len(refused)} of {asked} moves were refused{others}; first: {first.detail}")


def list_moves(cluster: BlockingCluster, brokers: Iterable[BrokerDescription] = ()) -> list[MoveDescription]:
    """Return the moves in progress. ``brokers`` has the sizes of the replicas, which show how much is copied."""
    reply = cluster.retrying("moves", lambda: cluster.ask_any(ListReassignments(0), ListReassignmentsReply))
    sizes = {
        (TopicPartition(replica.topic, replica.partition), broker.address.broker_id): replica.size_bytes
        for broker in brokers
        for replica in broker.replicas
    }
    found = []
    for move in reply.moves:
        tp = TopicPartition(move.topic, move.partition)
        found.append(
            MoveDescription(
                topic=move.topic,
                partition=move.partition,
                target=tuple(move.target),
                original=tuple(move.original),
                replicas=tuple(move.replicas),
                isr=tuple(move.isr),
                leader=move.leader if move.leader >= 0 else None,
                throttle_bytes=move.throttle_bytes,
                leader_bytes=sizes.get((tp, move.leader), 0),
                copied_bytes={
                    replica: sizes.get((tp, replica), 0) for replica in move.target if replica not in move.original
                },
            )
        )
    return found


def not_on_target(reply: MetadataReply, targets: ReplicaLists) -> list[str]:
    """Return a sentence for each partition whose replicas are not exactly its target, or are not all in sync."""
    there = {(t.name, p.partition): p for t in reply.topics for p in t.partitions}
    found = []
    for tp, target in targets.items():
        part = there.get(tp)
        if part is None:
            found.append(f"{TopicPartition(*tp)} does not exist")
        elif tuple(part.replicas) != tuple(target) or set(part.isr) != set(target):
            found.append(_place(TopicPartition(*tp), part))
    return found


def not_in_sync(reply: MetadataReply, topics: Collection[str] | None) -> list[str]:
    """Return a sentence for each partition that has no leader, or a replica outside the ISR.

    ``topics`` limits the check to these topics; None means all topics.
    """
    missing = sorted(set(topics or ()) - {topic.name for topic in reply.topics if not topic.code})
    found = [f"topic {name!r} is not known" for name in missing]
    for topic in reply.topics:
        for part in topic.partitions if topics is None or topic.name in topics else ():
            tp = TopicPartition(topic.name, part.partition)
            if part.leader == NO_LEADER:
                found.append(f"{tp} has no leader")
            elif set(part.isr) != set(part.replicas):
                found.append(_place(tp, part))
    return found


def _place(tp: TopicPartition, part: PartitionMetadata) -> str:
    return f"{tp} has replicas {list(part.replicas)}, and the ISR is {list(part.isr)}"


def elect(
    cluster: BlockingCluster, partitions: Iterable[TopicPartition] | None, *, unclean: bool, timeout_ms: int
) -> dict[TopicPartition, BrokerError]:
    """Elect the preferred leader of each partition. Return the failures by partition.

    With ``unclean``, instead elect any live replica, in partitions whose ISR has no live member. Partitions that need
    no election are not in the result.
    """
    kind = "unclean" if unclean else "preferred"
    requests = [ElectLeaders(0, kind, timeout_ms)]
    if partitions is not None:
        named = [(tp.topic, tp.partition) for tp in partitions]
        requests = [ElectLeaders(0, kind, timeout_ms, tuple(piece)) for piece in pieces(named)]
    failed: dict[TopicPartition, BrokerError] = {}
    for request in requests:
        reply = cluster.retrying("electing leaders", partial(cluster.ask_any, request, ElectLeadersReply))
        for result in reply.results:
            if result.code not in {ErrorCode.NONE, ErrorCode.ELECTION_NOT_NEEDED}:
                failed[_partition(result)] = BrokerError(result.code, result.detail)
    return failed


def replicas_of(reply: MetadataReply, moves: Iterable[MoveDescription]) -> dict[TopicPartition, tuple[int, ...]]:
    """Return the replicas of every partition, preferred leader first. For a partition that moves, return its target."""
    replicas = {
        TopicPartition(topic.name, part.partition): tuple(part.replicas)
        for topic in reply.topics
        if topic.code == ErrorCode.NONE
        for part in topic.partitions
    }
    return replicas | {TopicPartition(move.topic, move.partition): move.target for move in moves}


def with_factor(
    brokers: Sequence[BrokerEndpoint], replicas: ReplicaLists, topic: str, replication_factor: int
) -> dict[TopicPartition, tuple[int, ...]]:
    """Return targets that give each partition of ``topic`` this number of replicas.

    Partitions that already have this number of replicas are omitted.

    Raises:
        BrokerError: UNKNOWN_TOPIC_OR_PARTITION, INVALID_REPLICATION_FACTOR.
    """
    wanted = {tp: held for tp, held in replicas.items() if tp.topic == topic}
    if not wanted:
        raise BrokerError(ErrorCode.UNKNOWN_TOPIC_OR_PARTITION, f"topic {topic!r} is not known")
    targets = ReplicaTargets(brokers, replicas)
    found = {tp: targets.of(tp, held, replication_factor) for tp, held in wanted.items()}
    return {tp: target for tp, target in found.items() if target != tuple(wanted[tp])}


def draining(
    brokers: Sequence[BrokerEndpoint], replicas: ReplicaLists, broker_id: int
) -> dict[TopicPartition, tuple[int, ...]]:
    """Return targets that leave ``broker_id`` without replicas, and keep each partition's number of replicas.

    Raises:
        BrokerError: INVALID_REPLICATION_FACTOR if there are not enough other brokers.
    """
    targets = ReplicaTargets(brokers, replicas, without={broker_id})
    return {tp: targets.of(tp, held, len(held)) for tp, held in replicas.items() if broker_id in held}
