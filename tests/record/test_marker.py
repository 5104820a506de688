"""Tests of control markers: they survive encoding in any file, and damaged ones are refused."""

from __future__ import annotations

import io

import numpy as np
import polars
import pyarrow as pa
import pytest

from sparklog.errors import BrokerError, ErrorCode
from sparklog.record.codec import encode_batch
from sparklog.record.footer import BLOCK_DTYPE, arrow_footer, arrow_prelude
from sparklog.record.header import Flag
from sparklog.record.marker import Marker, decode_marker, encode_marker
from sparklog.record.message import read_batch_message
from sparklog.record.schema import DEFAULT_SCHEMA, schema_message

MARKER = Marker(committed=((7, 0), (2**40, 3)), aborted=tuple((number, 0) for number in range(2000)))


def test_a_marker_is_read_as_it_was_written() -> None:
    for marker in (Marker(), MARKER, Marker(aborted=((1, 0),))):
        header, body = encode_marker(marker, DEFAULT_SCHEMA, schema_id=3)
        assert decode_marker(header, body) == marker
        assert (header.offset_span, header.record_count, header.schema_id) == (1, 0, 3)
        assert body.size % 8 == 0 and header.flags == Flag.CONTROL
        assert read_batch_message(memoryview(body)).rows == 0


def test_a_file_with_a_marker_shows_only_the_records() -> None:
    schema = pa.schema([("a", pa.int64()), ("b", pa.list_(pa.string()))])
    rows = pa.RecordBatch.from_pylist([{"a": 1, "b": ["x"]}, {"a": 2, "b": None}], schema=schema)
    message = schema_message(schema)
    prelude = arrow_prelude(message)
    bodies = [
        encode_batch(rows, schema_id=0, compression=None, event_time=None).body,
        encode_marker(MARKER, schema, schema_id=0).body,
        encode_batch(rows, schema_id=0, compression="zstd", event_time=None).body,
    ]
    blocks = np.zeros(len(bodies), dtype=BLOCK_DTYPE)
    at = len(prelude)
    for number, body in enumerate(bodies):
        parts = read_batch_message(memoryview(body))
        values = (at, parts.metadata_length, parts.body_length)
        for name, value in zip([n for n in BLOCK_DTYPE.names or () if "pad" not in n], values, strict=False):
            blocks[number][name] = value
        at += body.size
    data = prelude + b"".join(body.to_pybytes() for body in bodies) + arrow_footer(message, blocks)
    table = pa.ipc.open_file(pa.py_buffer(data)).read_all()
    table.validate(full=True)
    assert table.column("a").to_pylist() == [1, 2, 1, 2]
    assert polars.read_ipc(io.BytesIO(data), use_pyarrow=False)["a"].to_list() == [1, 2, 1, 2]


def test_an_invalid_marker_is_refused() -> None:
    header, body = encode_marker(MARKER, DEFAULT_SCHEMA, schema_id=0)
    damaged = bytearray(body.to_pybytes())
    damaged[len(damaged) // 2] ^= 1
    newer = encode_marker(Marker(version=2), DEFAULT_SCHEMA, schema_id=0)
    rows = pa.RecordBatch.from_pylist([{"a": 1}])
    records = encode_batch(rows, schema_id=0, compression=None, event_time=None)
    plain = records.header._replace(flags=int(Flag.CONTROL))
    for found, bytes_found in [
        (header, bytes(damaged)),
        (header, body.slice(0, body.size - 8)),
        newer,
        records,
        (plain, records.body),
    ]:
        with pytest.raises(BrokerError) as refused:
            decode_marker(found, bytes_found)
        assert refused.value.code is ErrorCode.CORRUPT_MESSAGE
