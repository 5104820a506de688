"""A chunk of records becomes encoded parts, one for each partition and batch; a record that does not fit is left out.

Runs on the producer's I/O thread, or on the one that acts for it.
"""

from __future__ import annotations

import numpy as np

from sparklog.client.producer.partitioning import EncodedPart, ProducerTopic, Rows, encode_few, encode_parts
from sparklog.client.producer.record_buffer import RecordChunk
from sparklog.errors import BrokerError, ErrorCode


class ChunkEncoder:
    """Owner: the ``Sender``. Keeps nothing from chunk to chunk."""

    def __init__(self, *, compression: str | None, batch_bytes: int) -> None:
        self._compression = compression
        self._batch_bytes = batch_bytes

    def parts(self, topic: ProducerTopic, chunk: RecordChunk) -> list[EncodedPart]:
        """Empty when every record was refused; those that were, the chunk knows of."""
        return self._few_parts(topic, chunk) or self._parts_by_halves(topic, chunk, np.arange(len(chunk)))

    def _few_parts(self, topic: ProducerTopic, chunk: RecordChunk) -> list[EncodedPart] | None:
        if self._compression is not None:
            return None
        try:
            return encode_few(topic, chunk.records, chunk.partition, size=chunk.size, batch_bytes=self._batch_bytes)
        except Exception:
            return None  # because of one of them; which one, is found in another way

    def _parts_by_halves(self, topic: ProducerTopic, chunk: RecordChunk, rows: Rows) -> list[EncodedPart]:
        """Without the records that cannot be encoded, for whatever reason: others are none the worse for them."""
        try:
            return self._parts(topic, chunk, rows)
        except Exception as error:
            if len(rows) == 1:
                chunk.refuse(int(rows[0]), error if isinstance(error, BrokerError) else not_encoded(topic, error))
                return []
        half = len(rows) // 2
        return [*self._parts_by_halves(topic, chunk, rows[:half]), *self._parts_by_halves(topic, chunk, rows[half:])]

    def _parts(self, topic: ProducerTopic, chunk: RecordChunk, rows: Rows) -> list[EncodedPart]:
        """Raises BrokerError when a record does not fit the topic's schema, or is too large."""
        parts = encode_parts(
            topic,
            chunk.to_batch(topic, rows),
            chunk.partition,
            compression=self._compression,
            batch_bytes=self._batch_bytes,
        )
        return [part._replace(rows=rows[part.rows]) for part in parts]


def not_encoded(topic: ProducerTopic, error: BaseException) -> BrokerError:
    """INVALID_RECORD, for an error of nobody's making."""
    refused = BrokerError(ErrorCode.INVALID_RECORD, f"a record of {topic.name!r} cannot be encoded: {error!r}")
    refused.__cause__ = error
    return refused
