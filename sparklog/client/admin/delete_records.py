"""The deletion of the oldest records: requests to the leader of each partition, with retries."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from sparklog.client.cluster.blocking_cluster import BlockingCluster
from sparklog.client.cluster.request_pieces import pieces
from sparklog.client.cluster.routing_core import no_leader
from sparklog.errors import BrokerError, ErrorCode
from sparklog.model import TopicPartition
from sparklog.protocol.messages import DeleteRecords, DeleteRecordsPartition, DeleteRecordsReply

_HIGH_WATERMARK = -1


def delete_records(
    cluster: BlockingCluster, before: Mapping[TopicPartition, int | None], *, timeout_s: float
) -> dict[TopicPartition, int]:
    """Delete records. Arguments and errors are those of ``Admin.delete_records``.

    The request is idempotent, except for an end (None), which may have moved.
    """
    done: dict[TopicPartition, int] = {}

    def attempt() -> None:
        waiting = [tp for tp in before if tp not in done]
        cluster.refresh(sorted({tp.topic for tp in waiting}))
        problem: BrokerError | None = None
        for broker_id, group in cluster.metadata.group_by_leader(waiting).items():
            try:
                if broker_id is None:
                    raise no_leader(cluster.metadata, group[0])
                for piece in pieces(group):
                    _ask_one(cluster, broker_id, piece, before=before, done=done)
            except BrokerError as error:  # noqa: PERF203 - the other leaders are asked nevertheless
                if not error.retriable:
                    raise
                problem = error
        if problem is not None:
            raise problem

    cluster.retrying("delete records", attempt, timeout_s=timeout_s)
    return {tp: done[tp] for tp in before}


def _ask_one(
    cluster: BlockingCluster,
    broker_id: int,
    group: Sequence[TopicPartition],
    *,
    before: Mapping[TopicPartition, int | None],
    done: dict[TopicPartition, int],
) -> None:
    """Ask one leader. Keep the results, then raise the last error among its partitions."""
    leaders = {tp: leader for tp in group if (leader := cluster.metadata.leader(tp))}
    wanted = [
        DeleteRecordsPartition(tp.topic, tp.partition, _HIGH_WATERMARK if offset is None else offset, leader.epoch)
        for tp, leader in leaders.items()
        for offset in [before[tp]]
    ]
    reply = cluster.ask_broker(broker_id, DeleteRecords(0, tuple(wanted)), DeleteRecordsReply)
    problem: BrokerError | None = None
    for tp, result in zip(leaders, reply.results, strict=True):
        if result.code == ErrorCode.NONE:
            done[tp] = result.log_start_offset
        else:
            problem = BrokerError(result.code, result.detail or f"partition {tp}")
    if problem is not None:
        raise problem
