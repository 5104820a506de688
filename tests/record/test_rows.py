"""Tests of dict rows as columns: each value is stored exactly or refused with its column, row and value."""

# ruff: noqa: DTZ001 - datetimes without a time zone are among what is tested

from __future__ import annotations

import datetime as dt
import decimal
from decimal import Decimal
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sparklog.errors import BrokerError
from sparklog.record.exact_values import ValueRefusedError
from sparklog.record.rows import ColumnOfValues, RowColumns
from sparklog.record.schema_cast import fit_table

UTC = dt.timezone.utc
STAMP = pa.timestamp("us", "UTC")
STRUCT = pa.struct([pa.field("a", pa.int32()), pa.field("b", pa.string())])
NOON = dt.datetime(2024, 7, 1, 12, 0, 0, 7)
NOON_US = 1_719_835_200_000_007


def stored(value: Any, kind: pa.DataType) -> pa.Array:
    """Return ``value`` in a column of type ``kind``, beside a null."""
    array = ColumnOfValues(kind).array([value, None])
    array.validate(full=True)
    assert array.type == kind and not array[1].is_valid
    # The value is also stored within every nested type.
    for outer, around in (
        (pa.list_(kind), [value, None]),
        (pa.struct([pa.field("x", kind)]), {"x": value}),
        (pa.map_(pa.string(), kind), {"k": value}),
    ):
        nested = ColumnOfValues(outer).array([around, None, around])
        nested.validate(full=True)
        assert nested.type == outer and nested.null_count == 1
    return array


def refused(value: Any, kind: pa.DataType) -> ValueRefusedError:
    with pytest.raises(ValueRefusedError) as caught:
        ColumnOfValues(kind).array([None, value])
    assert caught.value.row == 1
    return caught.value


@pytest.mark.parametrize(
    ("value", "kind", "expected"),
    [
        (True, pa.bool_(), True),
        (np.True_, pa.bool_(), True),
        (5, pa.int8(), 5),
        (np.uint8(5), pa.int8(), 5),
        (2.0, pa.int32(), 2),
        (Decimal("1e3"), pa.int32(), 1000),
        (2**64 - 1, pa.uint64(), 2**64 - 1),
        (2**53, pa.float64(), 2.0**53),
        (np.float32(0.1), pa.float32(), float(np.float32(0.1))),
        (np.float32(0.1), pa.float64(), float(np.float32(0.1))),
        (0.5, pa.float32(), 0.5),
        (0.5, pa.float16(), 0.5),
        (Decimal("0.1"), pa.float64(), 0.1),
        (Decimal("0.1"), pa.float32(), float(np.float32(0.1))),
        (Decimal("1.500"), pa.decimal128(4, 2), Decimal("1.50")),
        (Decimal("1e2"), pa.decimal128(4, 1), Decimal("100.0")),
        (1.5, pa.decimal128(4, 2), Decimal("1.50")),
        (7, pa.decimal256(50, 10), Decimal(7)),
        (np.float32(0.1), pa.decimal128(4, 2), Decimal("0.10")),
        (np.longdouble(2) ** 63 - 1, pa.int64(), 2**63 - 1),
        ("ä", pa.string(), "ä"),
        (b"abc", pa.string(), "abc"),
        ("ä", pa.binary(), "ä".encode()),
        (bytearray(b"ac"), pa.binary(), b"ac"),
        ("ab", pa.binary(2), b"ab"),
        (dt.date(1, 1, 1), pa.date32(), dt.date(1, 1, 1)),
        (np.datetime64("2024-01-02"), pa.date64(), dt.date(2024, 1, 2)),
        (dt.time(1, 2, 3, 4000), pa.time32("ms"), dt.time(1, 2, 3, 4000)),
        (dt.time(1, 2, 3, 4), pa.time64("us"), dt.time(1, 2, 3, 4)),
        (pd.Timedelta(5, "us"), pa.duration("us"), dt.timedelta(microseconds=5)),
        (np.timedelta64(5, "m"), pa.duration("s"), dt.timedelta(minutes=5)),
        ((1, 2), pa.list_(pa.int8()), [1, 2]),
        (np.array([1, 2]), pa.list_(pa.int8()), [1, 2]),
        ([1, 2], pa.list_(pa.int8(), 2), [1, 2]),
        ({"b": "x"}, STRUCT, {"a": None, "b": "x"}),
        ((1, "x"), STRUCT, {"a": 1, "b": "x"}),
        ([("a", 1)], STRUCT, {"a": 1, "b": None}),
        ({"k": 1}, pa.map_(pa.string(), pa.int8()), [("k", 1)]),
        ([("k", 1), ["k", 2.0]], pa.map_(pa.string(), pa.int8()), [("k", 1), ("k", 2)]),
    ],
    ids=lambda value: str(value)[:30],
)
def test_a_value_that_fits_is_stored_exactly(value: Any, kind: pa.DataType, expected: Any) -> None:
    assert stored(value, kind)[0].as_py() == expected


@pytest.mark.parametrize("kind", [STAMP, pa.timestamp("us"), pa.timestamp("ns"), pa.timestamp("ns", "UTC")])
@pytest.mark.parametrize(
    "value",
    [
        NOON,
        NOON.replace(tzinfo=UTC),
        NOON.replace(hour=17).replace(tzinfo=dt.timezone(dt.timedelta(hours=5))),
        pd.Timestamp(NOON),
        pd.Timestamp(NOON).as_unit("us"),
        np.datetime64(NOON),
    ],
)
def test_a_datetime_without_a_zone_is_utc(value: Any, kind: pa.DataType) -> None:
    factor = 1000 if kind.unit == "ns" else 1
    assert stored(value, kind).cast(pa.int64())[0].as_py() == NOON_US * factor


@pytest.mark.parametrize("zone", [dt.timezone(dt.timedelta(hours=1, seconds=5)), dt.timezone(-dt.timedelta(0, 0, 7))])
def test_an_offset_is_subtracted_to_the_microsecond(zone: dt.timezone) -> None:
    values = [NOON.replace(tzinfo=zone), NOON.replace(tzinfo=UTC), NOON]
    us = [NOON_US - zone.utcoffset(None) // dt.timedelta(microseconds=1), NOON_US, NOON_US]
    for value, expected in zip(values, us, strict=True):
        assert stored(value, STAMP).cast(pa.int64())[0].as_py() == expected
    assert ColumnOfValues(STAMP).array(values).cast(pa.int64()).to_pylist() == us


@pytest.mark.parametrize(
    ("value", "kind"),
    [
        (dt.datetime(9999, 12, 31, 23, 59, 59, 999999), STAMP),
        (dt.datetime(1, 1, 1), STAMP),
        (pd.Timestamp("9999-12-31 23:59:59.999999").as_unit("us"), STAMP),
        (dt.datetime(1600, 1, 1), pa.timestamp("s")),
        (dt.date(9999, 12, 31), STAMP),
    ],
)
def test_far_times_are_stored_exactly(value: Any, kind: pa.DataType) -> None:
    naive = value if isinstance(value, dt.datetime) else dt.datetime(value.year, value.month, value.day)
    us = (naive - dt.datetime(1970, 1, 1)) // dt.timedelta(microseconds=1)
    assert stored(value, kind).cast(pa.int64())[0].as_py() == us // (1_000_000 if kind.unit == "s" else 1)


@pytest.mark.parametrize("missing", [pd.NA, pd.NaT, np.datetime64("NaT", "us"), np.timedelta64("NaT", "us")])
@pytest.mark.parametrize("kind", [pa.int64(), pa.string(), STAMP, pa.date32(), pa.duration("us"), pa.list_(STAMP)])
def test_nulls_of_pandas_and_numpy_become_null(missing: Any, kind: pa.DataType) -> None:
    assert ColumnOfValues(kind).array([missing]).null_count == 1
    assert ColumnOfValues(pa.list_(kind)).array([[missing]]).flatten().null_count == 1


@pytest.mark.parametrize(
    ("value", "kind", "reason"),
    [
        (1.5, pa.int32(), "expected a whole number"),
        (True, pa.int32(), "expected a whole number"),
        ("5", pa.int32(), "expected a whole number"),
        (Decimal("1.7"), pa.int64(), "expected a whole number"),
        (Decimal("1e999999"), pa.int64(), "expected a whole number"),
        (float("nan"), pa.int64(), "expected a whole number"),
        (float("-inf"), pa.int64(), "expected a whole number"),
        pytest.param(
            np.longdouble(2) ** 60 + np.longdouble(0.5),
            pa.int64(),
            "expected a whole number",
            marks=pytest.mark.skipif(np.finfo(np.longdouble).nmant < 61, reason="a longdouble is a double here"),
        ),
        (2**31, pa.int32(), "expected -2147483648 to 2147483647"),
        (-1, pa.uint64(), "expected 0 to 18446744073709551615"),
        (1, pa.bool_(), "expected True or False"),
        (True, pa.float64(), "expected a number"),
        (2**53 + 1, pa.float64(), "the nearest value is 9007199254740992.0"),
        (np.int64(2**53 + 1), pa.float64(), "the nearest value is 9007199254740992.0"),
        (10**400, pa.float64(), "out of range"),
        (0.1, pa.float32(), "send numpy.float32(x)"),
        (1e300, pa.float32(), "out of range"),
        (70000, pa.float16(), "out of range"),
        (Decimal("1e400"), pa.float64(), "out of range"),
        (Decimal("0.12345678901234567890"), pa.float64(), "the nearest value is"),
        (True, pa.decimal128(4, 2), "expected a decimal number"),
        (Decimal("1.555"), pa.decimal128(4, 2), "3 decimal places, at most 2 expected"),
        (1.555, pa.decimal128(4, 2), "3 decimal places"),
        (Decimal("100"), pa.decimal128(4, 2), "at most 2 digits before the point"),
        (Decimal("NaN"), pa.decimal128(4, 2), "finite"),
        (5, pa.string(), "expected text"),
        (b"\xff", pa.string(), "no UTF-8"),
        ("\ud800", pa.string(), "no Unicode"),
        (5, pa.binary(), "expected bytes"),
        ("abc", pa.binary(2), "3 bytes, 2 expected"),
        (5, pa.date32(), "expected a date"),
        (dt.datetime(2024, 1, 1), pa.date32(), "expected a date"),
        (dt.datetime(2024, 1, 1), pa.date64(), "expected a date"),
        (np.datetime64(2**31, "D"), pa.date32(), "out of range"),
        (np.datetime64(-(2**40), "D"), pa.date64(), "out of range"),
        (5, STAMP, "expected a datetime"),
        ("2024-01-01", STAMP, "expected a datetime"),
        (NOON, pa.timestamp("ms"), "finer than ms"),
        (pd.Timestamp(1, unit="ns"), STAMP, "finer than us"),
        (np.datetime64(1, "ns"), STAMP, "finer than us"),
        (dt.datetime(2300, 1, 1), pa.timestamp("ns"), "out of range"),
        (dt.time(1, 2, 3, 4), pa.time32("ms"), "finer than ms"),
        (dt.time(1, tzinfo=UTC), pa.time64("us"), "without a time zone"),
        (5, pa.time64("us"), "expected a time"),
        (5, pa.duration("us"), "expected a timedelta"),
        (dt.timedelta(microseconds=1), pa.duration("ms"), "finer than ms"),
        (pd.Timedelta(1, "ns"), pa.duration("us"), "finer than us"),
        ("ab", pa.list_(pa.string()), "expected a list"),
        ([1], pa.list_(pa.int8(), 2), "1 items, 2 expected"),
        ({"a": 1, "tpyo": "x"}, STRUCT, "unknown fields ['tpyo']"),
        ({"a": 1, "B": "x"}, STRUCT, "unknown fields ['B']"),
        ((1, "x", 2), STRUCT, "expected a mapping of its fields"),
        ([("a", 1), ("a", 2)], STRUCT, "given twice"),
        ({None: 1}, pa.map_(pa.string(), pa.int8()), "cannot be null"),
        (5, pa.map_(pa.string(), pa.int8()), "expected a mapping"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_a_lossy_value_is_refused_at_any_depth(value: Any, kind: pa.DataType, reason: str) -> None:
    error = refused(value, kind)
    assert reason in error.reason and error.path == ""
    assert repr(value)[:40] in str(error)
    for outer, around, path in (
        (pa.list_(kind), [None, value], "[1]"),
        (pa.large_list(kind), [None, value], "[1]"),
        (pa.struct([pa.field("x", kind)]), {"x": value}, ".x"),
        (pa.map_(pa.string(), kind), {"k": value}, "['k']"),
        (pa.list_(pa.struct([pa.field("x", pa.list_(kind))])), [{}, {"x": [value]}], "[1].x[0]"),
    ):
        inner = refused(around, outer)
        assert (inner.reason, inner.path) == (error.reason, path)


def test_an_error_names_column_row_and_value() -> None:
    rows = RowColumns(pa.schema([pa.field("id", pa.int64(), nullable=False), pa.field("l", pa.list_(STRUCT))]))
    assert rows.batch([{"id": 1}, {"id": 2, "l": [{"a": 1}]}]).num_rows == 2
    with pytest.raises(ValueRefusedError) as caught:
        rows.batch([{"id": 1}, {"id": 2, "l": [{"a": 1.5}]}])
    assert (caught.value.path, caught.value.row, caught.value.value) == ("l[0].a", 1, 1.5)
    for missing in ({}, {"id": None}, {"id": pd.NA}):
        with pytest.raises(ValueRefusedError, match="cannot be null") as caught:
            rows.batch([{"id": 1}, missing])
        assert (caught.value.path, caught.value.row) == ("id", 1)


def test_a_value_whose_own_methods_fail_is_refused() -> None:
    class Broken(dict[str, Any]):
        def keys(self) -> Any:
            raise RuntimeError("broken")

    assert refused(Broken(a=1), STRUCT).reason == "broken"


LEAVES: dict[pa.DataType, st.SearchStrategy[Any]] = {
    pa.bool_(): st.booleans(),
    pa.int16(): st.integers(-(2**15), 2**15 - 1),
    pa.uint64(): st.integers(0, 2**64 - 1),
    pa.float64(): st.floats(allow_nan=False),
    pa.float32(): st.floats(width=32, allow_nan=False),
    pa.decimal128(9, 3): st.decimals(-999999, 999999, places=3),
    pa.string(): st.text(max_size=3),
    pa.binary(): st.binary(max_size=3),
    pa.date32(): st.dates(),
    pa.timestamp("us"): st.datetimes(),
    pa.timestamp("ms"): st.datetimes().map(lambda at: at.replace(microsecond=at.microsecond // 1000 * 1000)),
    pa.time64("us"): st.times(),
    pa.duration("us"): st.timedeltas(dt.timedelta(days=-(10**6)), dt.timedelta(days=10**6)),
}


@st.composite
def columns(draw: st.DrawFn) -> tuple[pa.DataType, list[Any]]:
    kind, values = draw(st.sampled_from(list(LEAVES.items())))
    for _ in range(draw(st.integers(0, 2))):
        item, items = kind, st.none() | values
        shape = draw(st.sampled_from(["list", "large", "fixed", "struct", "map"]))
        if shape in {"list", "large"}:
            kind = pa.list_(item) if shape == "list" else pa.large_list(item)
            values = st.lists(items, max_size=3)
        elif shape == "fixed":
            kind, values = pa.list_(item, 2), st.lists(items, min_size=2, max_size=2)
        elif shape == "struct":
            kind = pa.struct([pa.field("a", item), pa.field("b", item)])
            values = st.fixed_dictionaries({"a": items, "b": items})
        else:
            kind = pa.map_(pa.string(), item)
            values = st.dictionaries(st.text(max_size=2), items, max_size=2).map(lambda found: list(found.items()))
    return kind, draw(st.lists(st.none() | values, max_size=5))


@given(columns())
@settings(suppress_health_check=list(HealthCheck))  # the health checks depend on the clock
def test_values_survive_conversion(column: tuple[pa.DataType, list[Any]]) -> None:
    kind, values = column
    array = ColumnOfValues(kind).array(values)
    array.validate(full=True)
    assert array.to_pylist() == values
    # The path for values of unusual types gives the same result.
    assert ColumnOfValues(kind)._one_by_one(values).equals(array)


@pytest.mark.parametrize(
    ("values", "kind"),
    [
        ([1.5], pa.int8()),
        ([300], pa.int8()),
        ([0.1], pa.float32()),
        ([1e300], pa.float32()),
        ([2**53 + 1], pa.float64()),
        ([70000], pa.float16()),
        ([1.555], pa.decimal128(5, 2)),
        ([Decimal("1.7")], pa.int8()),
        ([Decimal("0.12345678901234567890")], pa.float64()),
        ([True], pa.int8()),
        (["5"], pa.int8()),
        ([5], STAMP),
        ([dt.datetime(2024, 1, 1, 23)], pa.date32()),
        ([dt.datetime(2024, 1, 1, 0, 0, 0, 7)], pa.timestamp("ms")),
        ([{"a": 1, "tpyo": 2}], pa.struct([pa.field("a", pa.int8())])),
        ([[1.5]], pa.list_(pa.int8())),
        ([1.5], pa.decimal128(5, 2)),
        ([1.1], pa.decimal128(38, 20)),
        ([1e30], pa.decimal128(38, 0)),
        ([123456789.123], pa.decimal256(76, 40)),
        ([float("nan")], pa.decimal128(5, 2)),
        ([2.0], pa.int8()),
        ([7], pa.decimal128(5, 2)),
        ([Decimal("0.1")], pa.float64()),
        ([Decimal("0.1")], pa.float32()),
        ([dt.date(2024, 1, 1)], STAMP),
    ],
)
def test_a_table_and_a_dict_row_follow_one_rule(values: list[Any], kind: pa.DataType) -> None:
    table = pa.table({"a": values})
    try:
        fitted = fit_table(table, pa.schema([("a", kind)])).column("a").combine_chunks()
    except BrokerError as error:
        assert "column 'a'" in error.detail
        refused(values[0], kind)
        return
    assert ColumnOfValues(kind).array(values).equals(fitted)


def test_decimals_of_other_contexts_are_exact() -> None:
    with decimal.localcontext() as context:
        context.prec = 3
        kind = pa.decimal128(38, 10)
        assert ColumnOfValues(kind).array([Decimal("1234567.0000000001"), 1]).to_pylist()[0] == Decimal(
            "1234567.0000000001"
        )
