"""The restore of a partition's records at their original offsets, with retries after a change of leader.

It is harmless to send a batch twice: the leader refuses a batch that does not begin at the log end offset, and returns
that offset. So no progress is stored except in the log itself.
"""

from __future__ import annotations

from collections.abc import Sequence

from sparklog.client.cluster.blocking_cluster import BlockingCluster
from sparklog.errors import BrokerError, ErrorCode
from sparklog.model import TopicPartition
from sparklog.protocol.messages import RestoreRecords, RestoreRecordsReply
from sparklog.record.codec import EncodedBatch


def restore_batches(
    cluster: BlockingCluster, tp: TopicPartition, topic_id: str, batches: Sequence[EncodedBatch], *, timeout_s: float
) -> int:
    """Append consecutive batches at their original offsets, and wait for their commit. Return the log end offset.

    If the log did not end where the first batch begins, the leader appends nothing and returns its log end offset.
    After a retry, that offset is the end of the last batch if an earlier attempt has appended all batches.

    Raises:
        BrokerError: INVALID_REQUEST if the topic is not being restored; INCONSISTENT_TOPIC_ID, INVALID_RECORD.
        ClientTimeout: the batches were not committed in time. The batches may be in the log.
    """
    parts = [batch.header.pack() for batch in batches] + [memoryview(batch.body) for batch in batches]
    body_bytes = sum(batch.header.stored_bytes for batch in batches)

    asked: set[int] = set()

    def attempt() -> int:
        leader = cluster.leader(tp, refresh=bool(asked))
        asked.add(leader.broker_id)
        request = RestoreRecords(0, *tp, topic_id, len(batches), body_bytes, cluster.broker_timeout_ms(timeout_s))
        connection = cluster.connection(leader.broker_id)
        reply, _ = connection.request(request, parts)
        if not isinstance(reply, RestoreRecordsReply):
            connection.close()
            raise BrokerError(ErrorCode.INVALID_REQUEST, f"{connection.address} responded with {reply!r:.200}")
        if reply.code not in {ErrorCode.NONE, ErrorCode.OFFSET_OUT_OF_RANGE}:
            raise BrokerError(reply.code, reply.detail)
        return reply.log_end_offset

    return cluster.retrying(f"restore {tp}", attempt, timeout_s=timeout_s)
