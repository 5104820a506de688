"""Batches and schemas for the tests of the record layer."""

from __future__ import annotations

import datetime
import decimal
import struct
from typing import Any

import pyarrow as pa

from sparklog.record.checksum import crc32c
from sparklog.record.codec import EncodedBatch, encode_batch
from sparklog.record.schema import DEFAULT_SCHEMA
from sparklog.record.validate import validate_batch

MAX_MESSAGE_BYTES = 1 << 20

NESTED_SCHEMA = pa.schema(
    [
        pa.field("id", pa.int64(), nullable=False),
        pa.field("name", pa.string()),
        pa.field("notes", pa.large_string()),
        pa.field("flag", pa.bool_()),
        pa.field("amount", pa.decimal128(12, 2)),
        pa.field("code", pa.binary(4)),
        pa.field("day", pa.date32()),
        pa.field("at", pa.timestamp("ms")),
        pa.field("tags", pa.list_(pa.string())),
        pa.field("numbers", pa.large_list(pa.float64())),
        pa.field("corner", pa.list_(pa.int16(), 2)),
        pa.field("counts", pa.map_(pa.string(), pa.int32())),
        pa.field("place", pa.struct([pa.field("x", pa.float32(), nullable=False), pa.field("label", pa.string())])),
    ]
)


def default_batch(rows: int = 10) -> pa.RecordBatch:
    """Return Kafka-like records: every third key is null, some have headers, and timestamps count up."""
    return pa.RecordBatch.from_pylist(
        [
            {
                "key": None if row % 3 == 0 else b"key-%d" % row,
                "value": b"value " * (row % 5),
                "headers": [{"key": "trace", "value": b"%d" % row}] * (row % 3),
                "timestamp": 1_700_000_000_000_000 + row,
            }
            for row in range(rows)
        ],
        schema=DEFAULT_SCHEMA,
    )


def nested_batch(rows: int = 10) -> pa.RecordBatch:
    """Return a batch with every kind of layout that a message may have."""
    return pa.RecordBatch.from_pylist([_nested_row(row) for row in range(rows)], schema=NESTED_SCHEMA)


def _nested_row(row: int) -> dict[str, Any]:
    if row % 4 == 3:
        return {"id": row}
    return {
        "id": row,
        "name": f"näme {row}",
        "notes": "x" * row,
        "flag": row % 2 == 0,
        "amount": decimal.Decimal(row) / 4,
        "code": b"%04d" % row,
        "day": datetime.date(2024, 1, 1) + datetime.timedelta(days=row),
        "at": 1_700_000_000_000 + row,
        "tags": ["a", None, "b" * row][: row % 4],
        "numbers": [row / 3] * (row % 3),
        "corner": [row, -row],
        "counts": [(f"k{index}", index) for index in range(row % 3)],
        "place": {"x": row / 2, "label": None if row % 2 else "here"},
    }


def encoded(batch: pa.RecordBatch | None = None, compression: str | None = None, **changes: Any) -> EncodedBatch:
    """Encode ``batch`` as a producer would send it, with schema id 0."""
    batch = default_batch() if batch is None else batch
    event_time = "timestamp" if "timestamp" in batch.schema.names else None
    return encode_batch(batch, schema_id=0, compression=compression, event_time=event_time, **changes)


def resealed(batch: EncodedBatch, body: bytes) -> EncodedBatch:
    """Return ``body`` with the header of ``batch`` and a matching length and CRC, as an attacker would send it."""
    header = batch.header._replace(length=len(body), body_crc=crc32c(body))
    return EncodedBatch(header, pa.py_buffer(body))


def validate(batch: EncodedBatch, schema: pa.Schema = DEFAULT_SCHEMA, **changes: Any) -> None:
    """Call ``validate_batch`` as a topic with ``schema`` and schema id 0 would."""
    arguments: dict[str, Any] = {
        "schema": schema,
        "schema_id": 0,
        "max_message_bytes": MAX_MESSAGE_BYTES,
        "event_time": "timestamp" if "timestamp" in schema.names else None,
    }
    validate_batch(batch.header, memoryview(batch.body), **{**arguments, **changes})


def find_pair(body: bytes, pair: tuple[int, int]) -> int:
    """Return the position in ``body`` of two adjacent i64: a node or a buffer of the metadata."""
    packed = struct.pack("<qq", *pair)
    assert body.count(packed) == 1, f"{pair} occurs {body.count(packed)} times"
    return body.find(packed)
