"""The deletion of the oldest records of partitions: requests to their leaders, with retries."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from sparklog.client.cluster.blocking_cluster import BlockingCluster
from sparklog.client.cluster.leader_requests import ask_leaders
from sparklog.client.cluster.metadata import Leader
from sparklog.model import TopicPartition
from sparklog.protocol.messages import DeletedRecords, DeleteRecords, DeleteRecordsPartition, DeleteRecordsReply

_HIGH_WATERMARK = -1


def delete_records(
    cluster: BlockingCluster, before: Mapping[TopicPartition, int | None], *, timeout_s: float
) -> dict[TopicPartition, int]:
    """Delete records. Arguments and errors are those of ``Admin.delete_records``.

    A repeated request deletes no more records, except with None, which means the current end of the log.
    """

    def ask(broker_id: int, leaders: Mapping[TopicPartition, Leader]) -> Sequence[DeletedRecords]:
        ends = {tp: _HIGH_WATERMARK if (offset := before[tp]) is None else offset for tp in leaders}
        wanted = [DeleteRecordsPartition(tp.topic, tp.partition, ends[tp], leaders[tp].epoch) for tp in leaders]
        return cluster.ask_broker(broker_id, DeleteRecords(0, tuple(wanted)), DeleteRecordsReply).results

    done = ask_leaders(cluster, "delete records", before, ask, timeout_s=timeout_s)
    return {tp: done[tp].log_start_offset for tp in before}
