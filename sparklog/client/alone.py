"""One record on its own, of a producer with nothing else to do: from ``send`` straight into a request.

What becomes of such a batch is as with all others; what is left out is the collecting, and the looking for whatever
else there may be to do. Where there is anything, the record goes the usual way.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from sparklog.client.accumulator import Accumulator, ProducerBatch
from sparklog.client.async_link import AsyncLink
from sparklog.client.batch_outcomes import Ticket
from sparklog.client.collector import Collector, Record, RecordChunk
from sparklog.client.partitioning import EncodedPart, ProducerTopic, encode_few
from sparklog.client.produce_requests import ProduceRequests
from sparklog.client.stand_in import StandIn
from sparklog.model import TopicPartition

#: A larger one is encoded as all others are: there, room for it is waited for.
_MOST_BYTES = 64 * 1024


class SendAlone:
    """Owner: the ``Sender``. For any thread."""

    def __init__(
        self,
        link: AsyncLink,
        collector: Collector,
        accumulator: Accumulator,
        requests: ProduceRequests,
        stand_in: StandIn,
        *,
        at_rest: Callable[[ProducerTopic], bool],
        delivery_timeout_s: float,
    ) -> None:
        """``at_rest``: whether there is nothing to do, and the topic is as known; asked by who acts for the loop."""
        self._link = link
        self._collector = collector
        self._accumulator = accumulator
        self._requests = requests
        self._stand_in = stand_in
        self._at_rest = at_rest
        self._delivery_timeout_s = delivery_timeout_s

    def send(self, topic: ProducerTopic, partition: int | None, record: Record, size: int) -> RecordChunk | None:
        """The chunk that has the record, which is on its way; None: it is to go the usual way."""
        if self._requests.under_way or size > _MOST_BYTES or not topic.hand_written:
            return None
        if partition is None and record[0] is None and topic.partition_count > 1:
            return None  # partitions take turns, and a turn that came to nothing would be one less
        # Before this thread acts for the other: what a signal's handler raises here is the caller's, and harms nobody.
        try:
            parts = encode_few(topic, (record,), partition, size=size, batch_bytes=_MOST_BYTES)
        except OverflowError:  # the usual way tells so
            return None
        if parts is None:
            return None
        (part,) = parts
        sent: list[RecordChunk] = []
        self._stand_in.act(lambda: self._send(topic, part, record, sent))
        return sent[0] if sent else None

    def _send(self, topic: ProducerTopic, part: EncodedPart, record: Record, sent: list[RecordChunk]) -> None:
        if not self._at_rest(topic):
            return
        tp = TopicPartition(topic.name, part.partition)
        leader = self._link.metadata.leader(tp)
        if leader is None or not self._requests.can_take(leader.broker_id) or not self._accumulator.may_start(tp):
            return
        chunk = self._collector.alone(topic, part.partition, record)
        sent.append(chunk)
        batch = ProducerBatch(
            tp,
            part.encoded,
            topic_id=topic.topic_id,
            deadline_ms=(time.monotonic() + self._delivery_timeout_s) * 1000,
            handle=Ticket(chunk, 0, 0),
        )
        self._accumulator.start(batch, leader.broker_id)
        self._requests.send(leader.broker_id, [batch])
