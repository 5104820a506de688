"""Tests of sealed segments: golden bytes, and every reader of Arrow files opens them."""

from __future__ import annotations

import io
from pathlib import Path

import duckdb
import numpy as np
import pandas as pd
import polars as pl
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparklog.errors import BrokerError
from sparklog.record.footer import (
    BLOCK_DTYPE,
    END_OF_STREAM,
    arrow_footer,
    arrow_prelude,
    block_of,
    blocks_of,
    schema_of_prelude,
)
from sparklog.record.schema import DEFAULT_SCHEMA, parse_schema, schema_message
from tests.record.batches import NESTED_SCHEMA, default_batch, encoded, nested_batch
from tests.record.goldens import golden_bytes

GOLDEN_BLOCKS = [(336, 400, 640), (1376, 400, 64), (1840, 408, 4096)]


def sealed(schema: pa.Schema, bodies: list[pa.Buffer]) -> bytes:
    """Return a segment file as the storage layer writes it."""
    message = schema_message(schema)
    file = arrow_prelude(message)
    blocks = []
    for body in bodies:
        blocks.append(block_of(len(file), memoryview(body)))
        file += body.to_pybytes()
    return file + arrow_footer(message, blocks)


def test_the_bytes_of_prelude_and_footer_are_fixed() -> None:
    # The schema message is golden as well: the installed pyarrow may write another one.
    message = golden_bytes("schema_message.hex")
    assert parse_schema(message).equals(DEFAULT_SCHEMA)
    assert arrow_prelude(message) == b"ARROW1\0\0" + message
    assert arrow_footer(message, GOLDEN_BLOCKS) == golden_bytes("footer.hex")
    assert arrow_footer(message, []) == golden_bytes("footer_without_batches.hex")


@pytest.mark.parametrize("compression", [None, "lz4", "zstd"])
@pytest.mark.parametrize(
    ("schema", "batch"),
    [(DEFAULT_SCHEMA, default_batch(40)), (NESTED_SCHEMA, nested_batch(40))],
    ids=["kafka", "nested"],
)
def test_pyarrow_reads_a_sealed_file(schema: pa.Schema, batch: pa.RecordBatch, compression: str | None) -> None:
    bodies = [encoded(batch.slice(at, 10), compression).body for at in (0, 10, 20, 30)]
    with pa.ipc.open_file(pa.py_buffer(sealed(schema, bodies))) as reader:
        assert reader.num_record_batches == 4
        assert reader.schema.equals(schema)
        assert reader.get_batch(2).equals(batch.slice(20, 10))
        table = reader.read_all()
    table.validate(full=True)
    assert table.equals(pa.Table.from_batches([batch]))


def test_a_file_without_batches_is_valid() -> None:
    with pa.ipc.open_file(pa.py_buffer(sealed(DEFAULT_SCHEMA, []))) as reader:
        assert reader.num_record_batches == 0 and reader.schema.equals(DEFAULT_SCHEMA)


def test_a_sealed_file_is_also_a_stream() -> None:
    file = sealed(DEFAULT_SCHEMA, [encoded().body])
    with pa.ipc.open_stream(pa.py_buffer(file).slice(8)) as reader:
        assert reader.read_all().num_rows == 10


@pytest.mark.parametrize("compression", [None, "lz4", "zstd"])
def test_polars_pandas_and_duckdb_read_a_sealed_segment(tmp_path: Path, compression: str | None) -> None:
    batch = default_batch(30)
    path = tmp_path / "00000000000000000000.arrow"
    path.write_bytes(sealed(DEFAULT_SCHEMA, [encoded(batch.slice(at, 10), compression).body for at in (0, 10, 20)]))
    values = batch.column("value").to_pylist()

    assert pl.read_ipc(path)["value"].to_list() == values
    if compression is None:
        assert pl.scan_ipc(path).select("value").collect()["value"].to_list() == values

    frame = pd.read_feather(path)
    assert frame["value"].tolist() == values

    with pa.memory_map(str(path)) as source, pa.ipc.open_file(source) as reader, duckdb.connect() as database:
        database.register("records", reader.read_all())
        query = "SELECT count(*), count(key), epoch_us(max(timestamp)) FROM records"
        assert database.sql(query).fetchall() == [(30, 20, 1_700_000_000_000_029)]


@given(st.lists(st.tuples(st.integers(0, 2**40), st.integers(0, 2**30), st.integers(0, 2**40)), max_size=20))
def test_the_footer_equals_the_one_pyarrow_computes(blocks: list[tuple[int, int, int]]) -> None:
    message = schema_message(DEFAULT_SCHEMA)
    footer = arrow_footer(message, blocks)
    assert footer.startswith(END_OF_STREAM) and footer.endswith(b"ARROW1")
    assert int.from_bytes(footer[-10:-6], "little") == len(footer) - 8 - 10
    array = np.array([(offset, length, 0, body) for offset, length, body in blocks], dtype=BLOCK_DTYPE)
    assert arrow_footer(message, array) == footer
    # Readers read the footer from the end, so the start of the file may be anything.
    with pa.ipc.open_file(io.BytesIO(arrow_prelude(message) + footer)) as reader:
        assert reader.num_record_batches == len(blocks) and reader.schema.equals(DEFAULT_SCHEMA)


def test_blocks_are_found_in_the_file_itself() -> None:
    bodies = [encoded(default_batch(rows)).body for rows in (1, 100, 7)]
    file = sealed(DEFAULT_SCHEMA, bodies)
    expected = []
    position = len(arrow_prelude(schema_message(DEFAULT_SCHEMA)))
    for body in bodies:
        expected.append(block_of(position, memoryview(body)))
        position += body.size
    positions = np.array([at for at, _, _ in expected])
    found = blocks_of(positions, np.array([body.size for body in bodies]), memoryview(file))
    assert found[["offset", "metadata_length", "body_length"]].tolist() == expected


def test_the_schema_is_found_at_the_start_of_a_file() -> None:
    message = schema_message(DEFAULT_SCHEMA)
    prelude = arrow_prelude(message)
    assert schema_of_prelude(prelude) == message
    for wrong in (b"", prelude[:-8], prelude + bytes(8), b"X" + prelude[1:], bytes(len(prelude))):
        with pytest.raises(BrokerError, match="CORRUPT_MESSAGE"):
            schema_of_prelude(wrong)


def test_an_invalid_schema_message_is_refused() -> None:
    for wrong in (b"", bytes(64), encoded().body.to_pybytes(), schema_message(DEFAULT_SCHEMA)[:-8]):
        with pytest.raises(BrokerError):
            arrow_footer(wrong, [])
