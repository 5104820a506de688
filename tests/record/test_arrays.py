"""Tests that arrays made without pandas equal those of ``pa.array``."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparklog.record.arrays import array_of, binary_of, empty_batch, null_of, scalar_of


@given(st.lists(st.none() | st.binary(max_size=40), max_size=20))
def test_binary_values_equal_the_given_ones(values: list[bytes | None]) -> None:
    made = binary_of(values)
    made.validate(full=True)
    assert made.type == pa.binary()
    assert made.to_pylist() == values
    assert made.null_count == values.count(None)


@pytest.mark.parametrize("kind", [pa.int64(), pa.timestamp("us"), pa.timestamp("us", tz="UTC")])
@pytest.mark.parametrize("value", [0, -1, 2**62])
def test_numbers_and_times_equal_the_given_ones(kind: pa.DataType, value: int) -> None:
    assert scalar_of(value, kind) == pa.scalar(value, pa.int64()).cast(kind)
    assert array_of(np.array([value]), kind).equals(pa.array([value], pa.int64()).cast(kind))


def test_strings_may_be_null() -> None:
    assert binary_of(["ä".encode(), None], pa.string()).to_pylist() == ["ä", None]
    assert null_of(pa.list_(pa.string())).type == pa.list_(pa.string())
    assert not null_of(pa.int8()).is_valid


def test_an_empty_batch_has_the_schema_and_no_rows() -> None:
    kinds = [pa.list_(pa.int8()), pa.struct([("a", pa.string())]), pa.dictionary(pa.int8(), pa.string()), pa.string()]
    schema = pa.schema([pa.field(f"f{n}", kind, nullable=False) for n, kind in enumerate(kinds)], {"k": "v"})
    made = empty_batch(schema)
    made.validate(full=True)
    assert made.num_rows == 0
    assert made.schema.equals(schema, check_metadata=True)
    # Markers are stored with the same bytes as when another function made them.
    assert made.serialize().equals(pa.RecordBatch.from_pylist([], schema=schema).serialize())


#: The Arrow objects of a write, its plan, and a coordinator.
_MADE = """
import sys
from types import SimpleNamespace
import pyarrow as pa
from sparklog.broker.transactions.coordinator_runtime import _rows
from sparklog.broker.internal_topics import _number
from sparklog.client.producer.partitioning import fit_to_topic
from sparklog.coordinator.group_topics import pattern_error
from sparklog.record.arrays import empty_batch
from sparklog.record.codec import _copied
from sparklog.record.schema_cast import fit_table
from sparklog.record.marker import Marker, encode_marker
from sparklog.record.schema import DEFAULT_SCHEMA

values = pa.Array.from_buffers(pa.binary(), 1, [None, pa.py_buffer((0).to_bytes(4, "little") * 2), pa.py_buffer(b"")])
rows = pa.Table.from_arrays([values], schema=pa.schema([("value", pa.binary())]))
fit_to_topic(SimpleNamespace(schema=DEFAULT_SCHEMA, is_default=True), rows, 1)
fit_table(empty_batch(DEFAULT_SCHEMA), DEFAULT_SCHEMA)
encode_marker(Marker(), DEFAULT_SCHEMA, schema_id=0)
_rows([(b"key", b"value"), (b"gone", None)])
_number("group", 50)
assert not pattern_error("orders-.*") and pattern_error("(")
_copied(empty_batch(DEFAULT_SCHEMA))
assert "pandas" not in sys.modules
"""


def test_neither_a_write_nor_a_coordinator_loads_pandas() -> None:
    subprocess.run([sys.executable, "-c", _MADE], check=True, timeout=60)
