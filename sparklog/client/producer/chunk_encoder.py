"""The encoding of a chunk of records into batches, each for one partition.

A record that does not fit the topic's schema is refused, and the others are encoded. All code runs on the producer's
I/O thread, or on a caller's thread that runs the event loop in its place (see ``LoopHandoff``).
"""

from __future__ import annotations

import numpy as np

from sparklog.client.producer.partitioning import EncodedPart, ProducerTopic, Rows, encode_parts, encode_small_parts
from sparklog.client.producer.record_chunk import RecordChunk
from sparklog.errors import BrokerError, ErrorCode


class ChunkEncoder:
    """A part of the ``Sender`` that encodes chunks, which are groups of single records.

    The object keeps no state itself.
    """

    def __init__(self, *, compression: str | None, batch_bytes: int) -> None:
        self._compression = compression
        self._batch_bytes = batch_bytes

    def parts(self, topic: ProducerTopic, chunk: RecordChunk) -> list[EncodedPart]:
        """Encode the records of ``chunk`` as batches of one partition each. Return [] if every record was refused.

        The error of each refused record is stored in ``chunk``.
        """
        return self._small_parts(topic, chunk) or self._parts_by_halves(topic, chunk, np.arange(len(chunk)))

    def _small_parts(self, topic: ProducerTopic, chunk: RecordChunk) -> list[EncodedPart] | None:
        if self._compression is not None:
            return None
        try:
            return encode_small_parts(
                topic, chunk.records, chunk.partition, size=chunk.size, batch_bytes=self._batch_bytes
            )
        except Exception:
            return None  # one of the records does not fit; _parts_by_halves finds it

    def _parts_by_halves(self, topic: ProducerTopic, chunk: RecordChunk, rows: Rows) -> list[EncodedPart]:
        """Halve ``rows`` until the records that cannot be encoded are found. Return the batches of the others."""
        try:
            return self._parts(topic, chunk, rows)
        except Exception as error:
            if len(rows) == 1:
                chunk.refuse(int(rows[0]), error if isinstance(error, BrokerError) else encode_error(topic, error))
                return []
        half = len(rows) // 2
        return [*self._parts_by_halves(topic, chunk, rows[:half]), *self._parts_by_halves(topic, chunk, rows[half:])]

    def _parts(self, topic: ProducerTopic, chunk: RecordChunk, rows: Rows) -> list[EncodedPart]:
        """Return the encoded batches.

        Raises BrokerError if a record does not fit the topic's schema, or is too large.
        """
        parts = encode_parts(
            topic,
            chunk.to_batch(topic, rows),
            chunk.partition,
            compression=self._compression,
            batch_bytes=self._batch_bytes,
        )
        return [part._replace(rows=rows[part.rows]) for part in parts]


def encode_error(topic: ProducerTopic, error: BaseException) -> BrokerError:
    """Wrap an unexpected encoding error as INVALID_RECORD."""
    refused = BrokerError(ErrorCode.INVALID_RECORD, f"a record of {topic.name!r} cannot be encoded: {error!r}")
    refused.__cause__ = error
    return refused
