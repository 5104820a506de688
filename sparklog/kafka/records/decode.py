"""Decoding of a produced batch: to rows of the default schema, and to a batch of the log."""

from __future__ import annotations

import pyarrow as pa

from sparklog.kafka.records.batch_view import BatchView
from sparklog.record.codec import EncodedBatch


class DecodedBatch:
    """The records of a produced batch, checked and decompressed."""

    __slots__ = (
        "_rows",
        "base_sequence",
        "count",
        "max_timestamp_ms",
        "producer_epoch",
        "producer_id",
        "transactional",
    )

    def __init__(self, view: BatchView, rows: pa.RecordBatch) -> None:
        self.count = view.record_count
        self.producer_id = view.producer_id  #: -1: not idempotent
        self.producer_epoch = view.producer_epoch
        self.base_sequence = view.base_sequence
        self.transactional = view.transactional
        self.max_timestamp_ms = view.max_timestamp_ms  #: as the producer sent it; -1: none
        self._rows = rows

    @property
    def rows(self) -> pa.RecordBatch:
        """Return the records as a batch of ``DEFAULT_SCHEMA``. A record with timestamp -1 has a null there."""
        return self._rows

    def stored(self, *, schema_id: int, timed: bool, compression: str | None = None) -> EncodedBatch:
        """Return the records as a batch of the log, with the producer's id, epoch, sequence and transactional flag.

        The topic has the default schema, with the number ``schema_id``. ``timed`` means that the timestamp column is
        the topic's event-time column. The batch needs no further validation: ``validate_batch`` accepts it.
        """
        raise NotImplementedError


def decode_batch(view: BatchView, *, max_bytes: int, keyed: bool = False) -> DecodedBatch:
    """Check, decompress and decode a batch that a client has produced.

    ``max_bytes`` is the most bytes that the records may have after decompression. No more memory than a small multiple
    of it is taken. ``keyed`` means that every record needs a key, as in a compacted topic.

    Raises:
        InvalidRecords: CORRUPT_MESSAGE for a wrong CRC; UNSUPPORTED_COMPRESSION_TYPE for an unknown codec;
            MESSAGE_TOO_LARGE for more than ``max_bytes``; INVALID_TIMESTAMP for a time that does not fit into
            microseconds, and for a batch that claims log append time; INVALID_RECORD for other faults.
    """
    raise NotImplementedError
