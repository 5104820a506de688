"""The revalidation of a producer's waiting batches against the newest metadata.

While a batch waits, its topic may get another schema, be recreated, or be deleted. All code runs on the producer's I/O
thread, or on a caller's thread that runs the event loop in its place (see ``LoopHandoff``).
"""

from __future__ import annotations

from collections.abc import Iterator

from sparklog.client.producer.chunk_encoder import encode_error
from sparklog.client.producer.delivery import DeliveryReports
from sparklog.client.producer.partition_queues import BatchState, PartitionQueues, ProducerBatch
from sparklog.client.producer.partitioning import ProducerTopic, under_newest_schema
from sparklog.client.producer.producer_metadata import ProducerMetadata
from sparklog.errors import BrokerError, ErrorCode


class BatchRevalidation:
    """A part of the ``Sender`` that checks waiting batches after a change of metadata.

    The object keeps no state itself.
    """

    def __init__(self, metadata: ProducerMetadata, queues: PartitionQueues, reports: DeliveryReports) -> None:
        """Create the check for the batches in ``queues``. ``reports`` reports the batches that fail."""
        self._metadata = metadata
        self._queues = queues
        self._reports = reports

    def revalidate_topic(self, topic: ProducerTopic) -> None:
        """Call ``revalidate`` for every batch of a topic that is not in flight."""
        for batch in self._batches_of(topic.name):
            self.revalidate(batch)

    def revalidate(self, batch: ProducerBatch) -> None:
        """Encode a batch again if its topic has a newer schema.

        Fail the batch if its topic was recreated, or if its records do not fit the newer schema.
        """
        topic = self._metadata.topics.get(batch.tp.topic)
        if topic is None:
            return
        if batch.topic_id != topic.topic_id:
            detail = (
                f"topic {topic.name!r} was deleted and created again after the producer last read its metadata; "
                "the records were not written: send them again if they belong to the new topic"
            )
            self._fail_batch(batch, BrokerError(ErrorCode.INCONSISTENT_TOPIC_ID, detail))
        elif batch.encoded.header.schema_id < topic.schema_id:
            try:
                batch.encoded = under_newest_schema(batch.encoded, topic)
            except Exception as error:
                self._fail_batch(batch, error if isinstance(error, BrokerError) else encode_error(topic, error))

    def fail_topic(self, topic: str, error: BrokerError) -> None:
        """Fail all batches of a topic that are not in flight."""
        for batch in self._batches_of(topic):
            self._fail_batch(batch, error)

    def discard_all(self, error: BaseException) -> None:
        """Fail all batches. A batch in flight may still reach the log."""
        for batch in self._queues.batches():
            self._fail_batch(batch, error)

    def fail_all(self, error: BaseException) -> None:
        """Fail all batches when the producer ends, even if an interrupt left the queues inconsistent."""
        for batch in self._queues.batches():
            try:
                self._queues.drop(batch)
            except (KeyError, ValueError):
                batch.state = BatchState.DONE  # the interrupt came while the batch moved from one queue to another
            self._reports.fail(batch, error)

    def _batches_of(self, topic: str) -> Iterator[ProducerBatch]:
        if self._queues.topic_busy(topic):
            for batch in self._queues.batches(topic):
                if batch.state is not BatchState.IN_FLIGHT:
                    yield batch

    def _fail_batch(self, batch: ProducerBatch, error: BaseException) -> None:
        self._queues.drop(batch)
        self._reports.fail(batch, error)
