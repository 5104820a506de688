"""A producer's batches that wait are kept fit for their topics, which may get another schema meanwhile, be made anew,
or be gone; and batches are given up.

Runs on the producer's I/O thread, or on the one that acts for it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from sparklog.client.producer.chunk_encoder import not_encoded
from sparklog.client.producer.partition_queues import BatchState, PartitionQueues, ProducerBatch
from sparklog.client.producer.partitioning import ProducerTopic, under_newest_schema
from sparklog.client.producer.producer_metadata import ProducerMetadata
from sparklog.errors import BrokerError, ErrorCode


class BatchRevalidation:
    """Owner: the ``Sender``. Keeps nothing: the batches are the accumulator's."""

    def __init__(
        self,
        board: ProducerMetadata,
        accumulator: PartitionQueues,
        *,
        fail: Callable[[ProducerBatch, BaseException], None],
    ) -> None:
        """``fail`` is told of a batch that was given up, and why."""
        self._board = board
        self._accumulator = accumulator
        self._fail = fail

    def follow_topic(self, topic: ProducerTopic) -> None:
        """``follow``, for all batches of a topic."""
        for batch in self._of(topic.name):
            self.follow(batch)

    def follow(self, batch: ProducerBatch) -> None:
        """Fit a batch to its topic as it is now, or give it up when that is another topic."""
        topic = self._board.topics.get(batch.tp.topic)
        if topic is None:
            return
        if batch.topic_id != topic.topic_id:
            detail = (
                f"topic {topic.name!r} was deleted and created again after the producer last read its metadata; "
                "the records were not written: send them again if they belong to the new topic"
            )
            self._give_up(batch, BrokerError(ErrorCode.INCONSISTENT_TOPIC_ID, detail))
        elif batch.encoded.header.schema_id < topic.schema_id:
            try:
                batch.encoded = under_newest_schema(batch.encoded, topic)
            except Exception as error:
                self._give_up(batch, error if isinstance(error, BrokerError) else not_encoded(topic, error))

    def give_up(self, topic: str, error: BrokerError) -> None:
        """All batches of a topic."""
        for batch in self._of(topic):
            self._give_up(batch, error)

    def give_up_all(self, error: BaseException) -> None:
        """Those in flight, too: they may still get into the log."""
        for batch in self._accumulator.batches():
            self._give_up(batch, error)

    def forsake(self, error: BaseException) -> None:
        """The same at the producer's end, for which an interrupt may be the reason."""
        for batch in self._accumulator.batches():
            try:
                self._accumulator.give_up(batch)
            except (KeyError, ValueError):
                batch.state = BatchState.DONE  # it came while the batch went from one place to another
            self._fail(batch, error)

    def _of(self, topic: str) -> Iterator[ProducerBatch]:
        if self._accumulator.topic_busy(topic):
            for batch in self._accumulator.batches(topic):
                if batch.state is not BatchState.IN_FLIGHT:
                    yield batch

    def _give_up(self, batch: ProducerBatch, error: BaseException) -> None:
        self._accumulator.give_up(batch)
        self._fail(batch, error)
