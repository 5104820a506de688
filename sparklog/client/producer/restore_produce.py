"""Records of a partition that go back to the offsets they had: sent to the leader, again when it has changed.

Sending twice does no harm: a batch that does not begin where the log ends is refused, and the answer says where that
is. So whoever restores keeps nothing but the log itself to know how far it has come.
"""

from __future__ import annotations

from collections.abc import Sequence

from sparklog.client.cluster.blocking_cluster import BlockingCluster
from sparklog.errors import BrokerError, ErrorCode
from sparklog.model import TopicPartition
from sparklog.protocol.messages import RestoreRecords, RestoreRecordsReply
from sparklog.record.codec import EncodedBatch


def restore_batches(
    link: BlockingCluster, tp: TopicPartition, topic_id: str, batches: Sequence[EncodedBatch], *, timeout_s: float
) -> int:
    """Append batches that follow each other, and wait until they are committed. Returns where the log ends now: behind
    the last of them, or elsewhere, when it did not end where the first begins; then none was appended, or an earlier
    attempt of this call has appended them all.

    Raises:
        BrokerError: INVALID_REQUEST when the topic is not being restored; INCONSISTENT_TOPIC_ID, INVALID_RECORD.
        ClientTimeout: not committed in time; they may be in the log.
    """
    parts = [batch.header.pack() for batch in batches] + [memoryview(batch.body) for batch in batches]
    body_bytes = sum(batch.header.stored_bytes for batch in batches)

    asked: set[int] = set()

    def attempt() -> int:
        leader = link.leader(tp, refresh=bool(asked))
        asked.add(leader.broker_id)
        request = RestoreRecords(0, *tp, topic_id, len(batches), body_bytes, link.broker_timeout_ms(timeout_s))
        connection = link.connection(leader.broker_id)
        reply, _ = connection.request(request, parts)
        if not isinstance(reply, RestoreRecordsReply):
            connection.close()
            raise BrokerError(ErrorCode.INVALID_REQUEST, f"{connection.address} answered with {reply!r:.200}")
        if reply.code not in {ErrorCode.NONE, ErrorCode.OFFSET_OUT_OF_RANGE}:
            raise BrokerError(reply.code, reply.detail)
        return reply.log_end_offset

    return link.retrying(f"restore {tp}", attempt, timeout_s=timeout_s)
