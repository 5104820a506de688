"""Tests of data frames of every library, cast to a topic's schema or refused with the column."""

from __future__ import annotations

import datetime
import decimal

import numpy as np
import pandas as pd
import polars as pl
import pyarrow as pa
import pytest

from sparklog.errors import BrokerError, ErrorCode
from sparklog.record.codec import decode_batch
from sparklog.record.schema import DEFAULT_SCHEMA, plain_schema
from sparklog.record.schema_cast import fit_table
from tests.record.batches import NESTED_SCHEMA, encoded, nested_batch

UTC = pa.timestamp("us", "UTC")


def fitted(array: pa.Array, kind: pa.DataType) -> list[object]:
    """Return the values of ``array`` in a column of type ``kind``."""
    result = fit_table(pa.RecordBatch.from_arrays([array], ["a"]), pa.schema([pa.field("a", kind)]))
    assert isinstance(result, pa.RecordBatch) and result.schema.field("a").type == kind
    result.validate(full=True)
    return list(result.column(0).to_pylist())


def refused(table: pa.Table | pa.RecordBatch, schema: pa.Schema) -> str:
    with pytest.raises(BrokerError) as caught:
        fit_table(table, schema)
    assert caught.value.code is ErrorCode.SCHEMA_MISMATCH
    return caught.value.detail


def test_a_table_that_fits_is_not_copied() -> None:
    batch = nested_batch()
    result = fit_table(batch, NESTED_SCHEMA)
    assert result.equals(batch)
    assert result.column("name").buffers()[2].address == batch.column("name").buffers()[2].address


def test_columns_are_matched_by_name_and_missing_ones_are_null() -> None:
    result = fit_table(pa.table({"value": [b"v"], "key": [b"k"]}), DEFAULT_SCHEMA)
    assert isinstance(result, pa.Table) and result.schema.equals(DEFAULT_SCHEMA)
    assert result.to_pylist() == [{"key": b"k", "value": b"v", "headers": None, "timestamp": None}]


def test_metadata_of_data_frames_is_removed() -> None:
    noisy = pa.table({"a": [1]}).replace_schema_metadata({"pandas": "{}"})
    assert fit_table(noisy, pa.schema([("a", pa.int64())])).schema.metadata is None


@pytest.mark.parametrize(
    ("array", "kind", "expected"),
    [
        (pa.array(["a", None], pa.large_string()), pa.string(), ["a", None]),
        (pa.array(["a", "x" * 50], pa.string_view()), pa.string(), ["a", "x" * 50]),
        (pa.array([b"a"], pa.binary_view()), pa.binary(), [b"a"]),
        (pa.array(["a"]), pa.binary(), [b"a"]),
        (pa.array([b"a"]), pa.string(), ["a"]),
        (pa.array(["ab"]), pa.binary(2), [b"ab"]),
        (pa.array(["b", None, "b"]).dictionary_encode(), pa.string(), ["b", None, "b"]),
        (pa.array([1, None]).dictionary_encode(), pa.int32(), [1, None]),
        (pa.array([None, None]), pa.list_(pa.int8()), [None, None]),
        (pa.array([1, None], pa.int64()), pa.int16(), [1, None]),
        (pa.array([1.0, None]), pa.int64(), [1, None]),
        (pa.array([7], pa.int32()), pa.float64(), [7.0]),
        (pa.array([0.5, None, float("inf")]), pa.float32(), [0.5, None, float("inf")]),
        (pa.array([7]), pa.decimal128(5, 2), [decimal.Decimal("7.00")]),
        (pa.array([decimal.Decimal("7.5")]), pa.decimal128(9, 3), [decimal.Decimal("7.500")]),
        (pa.array([1.1, None, -0.0]), pa.decimal128(38, 20), [decimal.Decimal("1.1"), None, decimal.Decimal(0)]),
        (pa.array([1e30]), pa.decimal128(38, 0), [decimal.Decimal("1e30")]),
        (pa.array([0.1], pa.float32()), pa.decimal256(50, 9), [decimal.Decimal("0.1")]),
        (pa.array(np.array([0.5], np.float16)), pa.decimal128(5, 2), [decimal.Decimal("0.5")]),
        (pa.array([3], pa.timestamp("s")), pa.timestamp("us"), [np.datetime64(3, "s").astype(datetime.datetime)]),
        (
            pa.array([3000], pa.timestamp("ns")),
            UTC,
            [datetime.datetime(1970, 1, 1, 0, 0, 0, 3, tzinfo=datetime.timezone.utc)],
        ),
        (pa.array([86_400_000], pa.date64()), pa.date32(), [datetime.date(1970, 1, 2)]),
        (pa.array([1], pa.date32()), pa.timestamp("us"), [np.datetime64(86_400, "s").astype(datetime.datetime)]),
        (pa.array([5], pa.duration("s")), pa.duration("us"), [datetime.timedelta(seconds=5)]),
        (pa.array([5], pa.time32("s")), pa.time64("us"), [datetime.time(0, 0, 5)]),
        (pa.array([["a"], None, []], pa.large_list(pa.large_string())), pa.list_(pa.string()), [["a"], None, []]),
        (pa.array([[1], [2], None, [3, 4]], pa.list_view(pa.int64())), pa.list_(pa.int8()), [[1], [2], None, [3, 4]]),
        (pa.array([[1], [2]], pa.list_view(pa.int64())), pa.large_list(pa.int8()), [[1], [2]]),
        (pa.array([[1, 2], None], pa.list_(pa.int64(), 2)), pa.list_(pa.int8()), [[1, 2], None]),
        (pa.array([[1, 2], None], pa.list_(pa.int64())), pa.list_(pa.int8(), 2), [[1, 2], None]),
        (
            pa.array([{"b": "x", "a": 1}, None]),
            pa.struct([pa.field("a", pa.int8()), pa.field("b", pa.string()), pa.field("c", pa.int8())]),
            [{"a": 1, "b": "x", "c": None}, None],
        ),
        (
            pa.array([[("k", 1)], None, []], pa.map_(pa.large_string(), pa.int64())),
            pa.map_(pa.string(), pa.int8()),
            [[("k", 1)], None, []],
        ),
    ],
    ids=lambda value: str(value.type) if isinstance(value, pa.Array) else str(value)[:30],
)
def test_types_of_one_kind_are_cast(array: pa.Array, kind: pa.DataType, expected: list[object]) -> None:
    assert fitted(array, kind) == expected
    # slices have offsets that are easily mistaken within nested types
    assert fitted(pa.concat_arrays([array, array]).slice(1, len(array)), kind) == (expected * 2)[1 : len(array) + 1]
    table = pa.table({"a": pa.chunked_array([array, array.slice(1)])})
    result = fit_table(table, pa.schema([pa.field("a", kind)]))
    result.validate(full=True)
    assert result.column("a").to_pylist() == expected + expected[1:]


@pytest.mark.parametrize(
    ("array", "kind", "reason"),
    [
        (pa.array(["12"]), pa.int64(), "of different kinds"),
        (pa.array([12]), pa.string(), "of different kinds"),
        (pa.array([12]), UTC, "of different kinds"),
        (pa.array([True]), pa.int8(), "of different kinds"),
        (pa.array([1], pa.timestamp("us")), pa.date32(), "of different kinds"),
        (pa.array([1]), pa.list_(pa.int64()), "not a list"),
        (pa.array([1]), pa.map_(pa.int64(), pa.int64()), "not a map"),
        (pa.array([[1]]), pa.int64(), "of different kinds"),
        (pa.array([[1]]), pa.struct([("a", pa.int64())]), "not a struct"),
        (pa.array([300]), pa.int8(), "300"),
        (pa.array([1.5]), pa.int64(), "1.5"),
        (pa.array([0.1]), pa.float32(), "rounded"),
        (pa.array([1e300]), pa.float32(), "rounded"),
        (pa.array([1000]), pa.decimal128(5, 2), "precision"),
        (pa.array([1000.0]), pa.decimal128(5, 2), "precision"),
        (pa.array([0.125]), pa.decimal128(5, 2), "data loss"),
        (pa.array([float("nan")]), pa.decimal128(5, 2), "not a valid decimal"),
        (pa.ExtensionArray.from_storage(pa.bool8(), pa.array([1], pa.int8())), pa.int8(), "of different kinds"),
        (pa.array([1], pa.timestamp("ns")), UTC, "lose data"),
        (pa.array([2**62], pa.timestamp("s")), UTC, "out of bounds"),
        (pa.array([b"\xff"]), pa.string(), "UTF8"),
        (pa.array(["abc"]), pa.binary(2), "width"),
        (pa.array([{"z": 1}]), pa.struct([("a", pa.int64())]), "unknown fields ['z']"),
        (pa.array([{}], pa.struct([])), pa.struct([pa.field("a", pa.int64(), nullable=False)]), "'a' is missing"),
        (pa.array([[300]]), pa.list_(pa.int8()), "300"),
    ],
    ids=lambda value: str(value.type) if isinstance(value, pa.Array) else str(value)[:30],
)
def test_lossy_casts_are_refused(array: pa.Array, kind: pa.DataType, reason: str) -> None:
    detail = refused(pa.RecordBatch.from_arrays([array], ["a"]), pa.schema([pa.field("a", kind)]))
    assert detail.startswith(f"column 'a' ({array.type}) does not fit {kind}: ")
    assert reason in detail


def test_every_bad_column_is_named() -> None:
    schema = pa.schema(
        [pa.field("id", pa.int64(), nullable=False), pa.field("name", pa.string()), pa.field("must", pa.int8(), False)]
    )
    detail = refused(pa.table({"id": [1, None], "name": [1, 2], "extra": ["x", "y"]}), schema)
    for part in (
        "column 'extra' (string) is not among the topic's columns ['id', 'name', 'must']",
        "column 'id' (int64) does not fit int64: 'id' holds nulls but is not nullable",
        "column 'name' (int64) does not fit string: the types are of different kinds",
        "column 'must' does not fit int8: it is missing and cannot be null",
    ):
        assert part in detail
    twice = pa.Table.from_arrays([pa.array([1]), pa.array([2])], names=["id", "id"])
    assert "column 'id' occurs 2 times" in refused(twice, pa.schema([("id", pa.int64())]))


def test_nested_nulls_in_required_fields_are_refused() -> None:
    schema = pa.schema([pa.field("a", pa.struct([pa.field("x", pa.int64(), nullable=False)]))])
    loose = pa.struct([pa.field("x", pa.int64())])
    assert fit_table(pa.table({"a": pa.array([{"x": 1}, None], loose)}), schema).num_rows == 2
    assert "'a.x' holds nulls" in refused(pa.table({"a": pa.array([{"x": None}], loose)}), schema)


def test_a_polars_frame_is_cast() -> None:
    frame = pl.DataFrame(
        {
            "name": ["a", None, "b"],
            "category": pl.Series(["x", "y", "x"], dtype=pl.Categorical),
            "tags": [["p"], [], ["q", "r"]],
            "inside": [{"s": "1"}, {"s": None}, {"s": "3"}],
            "at": [datetime.datetime(2024, 1, 1, tzinfo=datetime.timezone.utc)] * 3,
            "raw": [b"1", b"2", b"3"],
        }
    )
    schema = pa.schema(
        [
            ("name", pa.string()),
            ("category", pa.string()),
            ("tags", pa.list_(pa.string())),
            ("inside", pa.struct([("s", pa.string())])),
            ("at", UTC),
            ("raw", pa.binary()),
        ]
    )
    for table in (frame.to_arrow(), pa.table(frame)):
        result = fit_table(table, schema)
        result.validate(full=True)
        assert result.to_pylist() == frame.to_dicts()
        assert fit_table(table, plain_schema(table.schema)).to_pylist() == frame.to_dicts()
        (batch,) = result.combine_chunks().to_batches()
        sent = encoded(batch)
        assert decode_batch(sent.header, sent.body, schema).equals(batch)


def test_periods_are_no_numbers() -> None:
    table = pa.Table.from_pandas(pd.DataFrame({"month": pd.period_range("2024-01", periods=2, freq="M")}))
    assert "of different kinds" in refused(table, pa.schema([("month", pa.int64())]))


def test_a_pandas_frame_is_cast() -> None:
    frame = pd.DataFrame(
        {
            "category": pd.Categorical(["x", None, "x"]),
            "number": [1, None, 3],
            "at": pd.to_datetime(["2024-01-01", None, "2024-01-03"]),
        }
    )
    schema = pa.schema([("category", pa.string()), ("number", pa.int32()), ("at", UTC)])
    result = fit_table(pa.Table.from_pandas(frame, preserve_index=False), schema)
    assert result.column("number").to_pylist() == [1, None, 3]
    assert result.column("category").to_pylist() == ["x", None, "x"]
    assert result.column("at").to_pylist()[2] == datetime.datetime(2024, 1, 3, tzinfo=datetime.timezone.utc)


def test_long_columns_of_large_strings_are_cast_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sparklog.record.schema_cast._CAST_AT_ONCE_BYTES", 100)
    values = [f"value {index}" for index in range(100)]
    table = pa.table({"a": pa.array(values, pa.large_string())})
    result = fit_table(table, pa.schema([("a", pa.string())]))
    assert result.column("a").num_chunks > 10 and result.column("a").to_pylist() == values
