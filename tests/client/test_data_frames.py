"""Tests of pandas frames for a topic: columns of Python objects follow the rule for dict rows."""

# ruff: noqa: DTZ001 - datetimes without a time zone are among what is tested

from __future__ import annotations

import datetime as dt
from decimal import Decimal
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest

from sparklog.client.producer.data_frames import to_table
from sparklog.errors import BrokerError, ErrorCode
from sparklog.record.schema_cast import fit_table

STAMP = pa.timestamp("us", "UTC")
NOON = dt.datetime(2024, 1, 1, 12)


def fitted(values: list[Any], kind: pa.DataType) -> pa.Table:
    frame = pd.DataFrame({"a": pd.Series(values, dtype=object), "other": range(len(values))})
    schema = pa.schema([pa.field("a", kind), pa.field("other", pa.int64())])
    return fit_table(to_table(frame, schema), schema)


@pytest.mark.parametrize(
    ("values", "kind", "refused"),
    [
        ([dt.date(2024, 1, 1), NOON], pa.date32(), "column 'a', row 1: datetime.datetime(2024, 1, 1, 12, 0)"),
        ([NOON, pd.Timestamp(1, unit="ns")], STAMP, "column 'a', row 1: Timestamp("),
        ([dt.time(1), dt.time(1, tzinfo=dt.timezone.utc)], pa.time64("us"), "column 'a', row 1: datetime.time("),
        ([[1], [Decimal("1.7")]], pa.list_(pa.int8()), "column 'a[0]', row 1: Decimal('1.7')"),
        ([{"d": dt.date(2024, 1, 1)}, {"d": NOON}], pa.struct([("d", pa.date32())]), "column 'a.d', row 1"),
        ([1, True], pa.int64(), "column 'a', row 1: True (bool)"),
        (["a", 5], pa.string(), "column 'a', row 1: 5 (int)"),
    ],
)
def test_no_part_of_an_object_is_dropped(values: list[Any], kind: pa.DataType, refused: str) -> None:
    with pytest.raises(BrokerError) as caught:
        fitted(values, kind)
    assert caught.value.code == ErrorCode.SCHEMA_MISMATCH and refused in caught.value.detail


@pytest.mark.filterwarnings("ignore:The 'generic' unit for NumPy:DeprecationWarning")
def test_missing_values_of_pandas_are_null() -> None:
    for kind in (STAMP, pa.int64(), pa.string(), pa.list_(pa.int8()), pa.float64()):
        table = fitted([None, pd.NA, pd.NaT, float("nan"), np.datetime64("NaT")], kind)
        assert table.column("a").null_count == 5, kind
        assert table.column("other").to_pylist() == [0, 1, 2, 3, 4]
    alone = to_table(pd.DataFrame({"a": pd.Series([[1]], dtype=object)}), pa.schema([("a", pa.list_(pa.int8()))]))
    assert alone.column("a").to_pylist() == [[1]]


def test_objects_of_several_types_fit_where_each_does() -> None:
    assert fitted([dt.date(2024, 1, 1), NOON], STAMP).column("a").to_pylist() == [
        dt.datetime(2024, 1, 1, tzinfo=dt.timezone.utc),
        NOON.replace(tzinfo=dt.timezone.utc),
    ]
    assert fitted([1, 2.0, Decimal(3)], pa.int8()).column("a").to_pylist() == [1, 2, 3]
    assert fitted(["a", b"b"], pa.binary()).column("a").to_pylist() == [b"a", b"b"]


def test_a_column_named_twice_is_refused() -> None:
    frame = pd.DataFrame([[1, 2]], columns=["a", "a"], dtype=object)
    with pytest.raises((BrokerError, ValueError), match="a"):
        fit_table(to_table(frame, pa.schema([("a", pa.int64())])), pa.schema([("a", pa.int64())]))
