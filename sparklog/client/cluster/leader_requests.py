"""Requests about many partitions: each is sent to its leader, and retried until every partition has a result."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TypeVar

from sparklog.client.cluster.blocking_cluster import BlockingCluster
from sparklog.client.cluster.metadata import Leader
from sparklog.client.cluster.request_pieces import pieces
from sparklog.client.cluster.routing_core import no_leader
from sparklog.errors import BrokerError, ErrorCode
from sparklog.model import TopicPartition
from sparklog.protocol.messages import DeletedRecords, ListedOffset

P = TypeVar("P", ListedOffset, DeletedRecords)


def ask_leaders(
    cluster: BlockingCluster,
    what: str,
    partitions: Collection[TopicPartition],
    ask: Callable[[int, Mapping[TopicPartition, Leader]], Sequence[P]],
    *,
    check: Callable[[TopicPartition, Leader, P], None] = lambda tp, leader, result: None,
    timeout_s: float | None,
) -> dict[TopicPartition, P]:
    """Send requests to the leaders of partitions until each partition has a result. Return the results by partition.

    ``ask`` sends one request about the given partitions to one broker, and returns the results in the order of these
    partitions. ``check`` is called with each successful result, and may raise a BrokerError if the result must not be
    used. Only failed partitions are requested again.

    Raises:
        BrokerError: an error that is not retriable; UNKNOWN_TOPIC_OR_PARTITION.
        ClientTimeout: a leader did not respond in time.
    """
    found: dict[TopicPartition, P] = {}
    stale = False

    def attempt() -> None:
        nonlocal stale
        waiting = [tp for tp in partitions if tp not in found]
        topics = sorted({tp.topic for tp in waiting if stale or cluster.metadata.leader(tp) is None})
        if topics:
            cluster.refresh(topics)
        stale = False
        problem: BrokerError | None = None
        for broker_id, group in cluster.metadata.group_by_leader(waiting).items():
            try:
                if broker_id is None:
                    raise no_leader(cluster.metadata, group[0])
                for piece in pieces(group):
                    ask_one(broker_id, piece)
            except BrokerError as error:  # noqa: PERF203 - continue with the other leaders
                stale = stale or error.refresh_metadata
                if not error.retriable:
                    raise
                problem = error
        if problem is not None:
            raise problem

    def ask_one(broker_id: int, piece: Sequence[TopicPartition]) -> None:
        """Send one request and store its results. Then raise the last error of a partition, if there is one."""
        leaders = {tp: leader for tp in piece if (leader := cluster.metadata.leader(tp))}
        problem: BrokerError | None = None
        for (tp, leader), result in zip(leaders.items(), ask(broker_id, leaders), strict=True):
            try:
                if result.code != ErrorCode.NONE:
                    raise BrokerError(result.code, result.detail or f"partition {tp}")
                check(tp, leader, result)
                found[tp] = result
            except BrokerError as error:  # noqa: PERF203 - the other results are kept
                if not error.retriable:
                    raise
                problem = error
        if problem is not None:
            raise problem

    cluster.retrying(what, attempt, timeout_s=timeout_s)
    return found
