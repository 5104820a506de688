"""AlterPartitionReassignments and ListPartitionReassignments requests of Kafka clients. Source: KIP-455."""

from __future__ import annotations

from collections.abc import Sequence

from sparklog.broker.kafka.admin.item_errors import FAILURES, ItemError, item_error, refused
from sparklog.broker.kafka.call import KafkaCall
from sparklog.broker.kafka.error_codes import kafka_code
from sparklog.broker.lifecycle.broker import Broker
from sparklog.errors import ErrorCode
from sparklog.kafka.wire.admin import (
    AlterPartitionReassignmentsRequest,
    AlterPartitionReassignmentsResponse,
    ListPartitionReassignmentsRequest,
    ListPartitionReassignmentsResponse,
    OngoingPartitionReassignment,
    OngoingTopicReassignment,
    ReassignablePartitionResponse,
    ReassignableTopicResponse,
)
from sparklog.model import TopicPartition
from sparklog.protocol.fields import MAX_ENTRIES
from sparklog.protocol.messages import (
    AlterReassignments,
    AlterReassignmentsReply,
    ListReassignments,
    ListReassignmentsReply,
    ReassignmentStatus,
    ReplicaMove,
)


class ReassignmentHandlers:
    """The handlers of AlterPartitionReassignments and ListPartitionReassignments."""

    def __init__(self, broker: Broker) -> None:
        self._cache = broker.context.cache

    async def alter(
        self, call: KafkaCall, request: AlterPartitionReassignmentsRequest
    ) -> AlterPartitionReassignmentsResponse:
        moves: list[ReplicaMove] = []
        for topic in request.topics:
            for partition in topic.partitions:
                await call.pause()
                target = None if partition.replicas is None else tuple(partition.replicas)
                moves.append(ReplicaMove(topic.name, partition.partition_index, target))
        errors: dict[tuple[str, int], ItemError] = {}
        if not request.allow_replication_factor_change:
            moves = self._with_same_factor(moves, errors)
        try:
            await _alter(call, moves, errors, timeout_ms=request.timeout_ms)
        except FAILURES as failure:
            error = item_error(failure)
            return AlterPartitionReassignmentsResponse(
                allow_replication_factor_change=request.allow_replication_factor_change,
                error_code=error.code,
                error_message=error.message,
            )
        responses: list[ReassignableTopicResponse] = []
        for topic in request.topics:
            await call.pause()
            results = [
                _result(partition.partition_index, errors[topic.name, partition.partition_index])
                for partition in topic.partitions
            ]
            responses.append(ReassignableTopicResponse(name=topic.name, partitions=results))
        return AlterPartitionReassignmentsResponse(
            allow_replication_factor_change=request.allow_replication_factor_change,
            error_message=None,
            responses=responses,
        )

    def _with_same_factor(
        self, moves: Sequence[ReplicaMove], errors: dict[tuple[str, int], ItemError]
    ) -> list[ReplicaMove]:
        """Return the moves that keep the number of replicas. Enter the errors of the others in ``errors``."""
        kept: list[ReplicaMove] = []
        for move in moves:
            known = self._cache.partition(TopicPartition(move.topic, move.partition))
            present = (known.original or known.replicas) if known is not None else ()
            if move.target is not None and present and len(move.target) != len(present):
                detail = f"{move.topic}-{move.partition}: found {len(move.target)} replicas, expected {len(present)}"
                errors[move.topic, move.partition] = refused(ErrorCode.INVALID_REPLICATION_FACTOR, detail)
            else:
                kept.append(move)
        return kept

    async def list_moves(
        self, call: KafkaCall, request: ListPartitionReassignmentsRequest
    ) -> ListPartitionReassignmentsResponse:
        try:
            reply = await call.native(ListReassignments(0))
        except FAILURES as failure:
            error = item_error(failure)
            return ListPartitionReassignmentsResponse(error_code=error.code, error_message=error.message)
        assert isinstance(reply, ListReassignmentsReply)
        wanted = (
            {(topic.name, partition) for topic in request.topics for partition in topic.partition_indexes}
            if request.topics is not None
            else None
        )
        topics: dict[str, list[OngoingPartitionReassignment]] = {}
        for move in reply.moves:
            if wanted is None or (move.topic, move.partition) in wanted:
                topics.setdefault(move.topic, []).append(_ongoing(move))
        return ListPartitionReassignmentsResponse(
            error_message=None,
            topics=[OngoingTopicReassignment(name=name, partitions=found) for name, found in topics.items()],
        )


async def _alter(
    call: KafkaCall, moves: Sequence[ReplicaMove], errors: dict[tuple[str, int], ItemError], *, timeout_ms: int
) -> None:
    """Start, change or cancel the moves, and enter the result of each in ``errors``.

    Raises:
        BrokerError: one request of at most ``MAX_ENTRIES`` moves has failed. The moves of earlier requests have their
            results in ``errors``.
    """
    for first in range(0, len(moves) or 1, MAX_ENTRIES):
        reply = await call.native(AlterReassignments(0, tuple(moves[first : first + MAX_ENTRIES]), timeout_ms))
        assert isinstance(reply, AlterReassignmentsReply)
        for result in reply.results:
            errors[result.topic, result.partition] = ItemError(kafka_code(result.code), result.detail or None)


def _result(partition: int, error: ItemError) -> ReassignablePartitionResponse:
    return ReassignablePartitionResponse(partition_index=partition, error_code=error.code, error_message=error.message)


def _ongoing(move: ReassignmentStatus) -> OngoingPartitionReassignment:
    return OngoingPartitionReassignment(
        partition_index=move.partition,
        replicas=list(move.replicas),
        adding_replicas=[broker for broker in move.target if broker not in move.original],
        removing_replicas=[broker for broker in move.replicas if broker not in move.target],
    )
