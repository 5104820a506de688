"""Tests that ``produce`` reads the same records that ``consume`` wrote: every type, in every format except lines."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sparklog.cli import files
from sparklog.cli.sinks import OutputFormat, format_of, open_sink
from sparklog.client.producer.producer import Producer
from sparklog.errors import ConfigError
from sparklog.record.format_values import _stored, stored_type
from sparklog.record.rows import ColumnOfValues
from sparklog.record.schema import DEFAULT_SCHEMA
from sparklog.record.schema_cast import fit_table
from tests.cli.in_process import Cli
from tests.cli.rows import table_of
from tests.client.fake_cluster import FakeCluster

NAMES = ["r.json", "r.jsonl.gz", "r.csv", "r.csv.zst", "r.arrow", "r.arrows", "r.parquet"]
DAY_MS = 86_400_000


def _ints(bits: int, *, low: int | None = None, high: int | None = None) -> st.SearchStrategy[int]:
    low = -(2 ** (bits - 1)) if low is None else low
    high = 2 ** (bits - 1) - 1 if high is None else high
    return st.integers(low, high) | st.sampled_from([found for found in (low, high, -1, 0, 1) if low <= found <= high])


def _times(kind: pa.DataType, per_second: int) -> tuple[pa.DataType, st.SearchStrategy[Any]]:
    return kind, _ints(64, low=0, high=86_400 * per_second - 1)


#: Types, and the values that they store. Times are numbers.
LEAVES: list[tuple[pa.DataType, st.SearchStrategy[Any]]] = [
    (pa.bool_(), st.booleans()),
    *((getattr(pa, f"int{bits}")(), _ints(bits)) for bits in (8, 16, 32, 64)),
    *((getattr(pa, f"uint{bits}")(), _ints(64, low=0, high=2**bits - 1)) for bits in (8, 16, 32, 64)),
    (pa.float16(), st.floats(width=16)),
    (pa.float32(), st.floats(width=32)),
    (pa.float64(), st.floats()),
    (pa.decimal128(7, 3), st.decimals(-9999, 9999, places=3)),
    (pa.decimal128(38, 0), st.integers(-(10**38) + 1, 10**38 - 1)),
    (pa.decimal256(60, 20), st.decimals(-(10**30), 10**30, places=20)),
    *((kind, st.text(max_size=4) | st.sampled_from(["", "NA", "null", '"', "a\nb", "\r\n", " "]))
      for kind in (pa.string(), pa.large_string())),
    *((kind, st.binary(max_size=4) | st.sampled_from([b"", b"NA", b"\xff\xfe", b"aGk=", b"\n", b'"']))
      for kind in (pa.binary(), pa.large_binary())),
    (pa.binary(2), st.binary(min_size=2, max_size=2)),
    (pa.date32(), _ints(32)),
    (pa.date64(), _ints(32).map(lambda days: days * DAY_MS)),
    _times(pa.time32("s"), 1),
    _times(pa.time32("ms"), 1000),
    _times(pa.time64("us"), 10**6),
    _times(pa.time64("ns"), 10**9),
    *((pa.timestamp("s", zone), _ints(64, low=-(2**63) // 1000 + 1, high=2**63 // 1000)) for zone in (None, "UTC")),
    *((pa.timestamp(unit, zone), _ints(64)) for unit in ("ms", "us", "ns") for zone in (None, "UTC", "Asia/Tokyo")),
    *((pa.duration(unit), _ints(64)) for unit in ("s", "ms", "us", "ns")),
]  # fmt: skip
KEYS = [leaf for leaf in LEAVES if not pa.types.is_floating(leaf[0])]


@st.composite
def fields(draw: st.DrawFn, depth: int = 2) -> tuple[pa.DataType, st.SearchStrategy[Any]]:
    shape = draw(st.sampled_from(["leaf", "leaf", "list", "large", "fixed", "struct", "map"])) if depth else "leaf"
    if shape == "leaf":
        leaf: tuple[pa.DataType, st.SearchStrategy[Any]] = draw(st.sampled_from(LEAVES))
        return leaf
    kind, values = draw(fields(depth - 1))
    values = st.none() | values
    if shape == "list":
        return pa.list_(kind), st.lists(values, max_size=3)
    if shape == "large":
        return pa.large_list(kind), st.lists(values, max_size=3)
    if shape == "fixed":
        return pa.list_(kind, 2), st.lists(values, min_size=2, max_size=2)
    if shape == "map":
        key, keys = draw(st.sampled_from(KEYS))
        return pa.map_(key, kind), st.lists(st.tuples(keys, values), max_size=3)
    other, others = draw(fields(depth - 1))
    return (
        pa.struct([pa.field("a", kind), pa.field('b "quoted"', other)]),
        st.fixed_dictionaries({"a": values, 'b "quoted"': st.none() | others}),
    )


@st.composite
def batches(draw: st.DrawFn) -> pa.RecordBatch:
    found = draw(st.lists(fields(), min_size=1, max_size=4))
    rows = draw(st.integers(0, 4))
    columns = [
        ColumnOfValues(stored_type(kind)).array(draw(st.lists(st.none() | values, min_size=rows, max_size=rows)))
        for kind, values in found
    ]
    names = draw(st.permutations(["a", "b,c", 'd"e', "ä ö"]))[: len(found)]
    schema = pa.schema([pa.field(name, kind) for name, (kind, _) in zip(names, found, strict=True)])
    arrays = [column.cast(kind) for column, (kind, _) in zip(columns, found, strict=True)]
    return pa.RecordBatch.from_arrays(arrays, schema=schema)


def stored(table: pa.Table) -> str:
    """Return all values of a table, with NaN equal to NaN, and -0.0 unequal to 0.0."""
    table.validate(full=True)
    return repr([_stored(column.combine_chunks()).to_pylist() for column in table.columns])


def round_trip(path: Path, batch: pa.RecordBatch) -> pa.Table:
    with open_sink(format_of(path), path, schema=batch.schema, keys=False, template=None) as sink:
        if batch.num_rows:
            sink.write(batch)
    kind = files.format_of(path)
    with files.open_input(path, kind, schema=batch.schema, separator=None) as found:
        return pa.concat_tables(
            [fit_table(table, batch.schema) for table in found.tables] or [batch.schema.empty_table()]
        )


@pytest.mark.parametrize("name", NAMES)
@given(batch=batches())
@settings(max_examples=40, suppress_health_check=list(HealthCheck))  # the health checks depend on the clock
def test_any_columns_survive_a_round_trip(tmp_path: Path, name: str, batch: pa.RecordBatch) -> None:
    found = round_trip(tmp_path / name, batch)
    assert found.schema.equals(batch.schema)
    assert stored(found) == stored(pa.Table.from_batches([batch]))


@pytest.mark.parametrize("name", NAMES)
def test_every_type_survives_a_round_trip_at_its_limits(tmp_path: Path, name: str) -> None:
    for kind, values in (
        (pa.timestamp("us", "UTC"), [-(2**63), -62_135_596_800_000_001, -62_135_596_800_000_000, -1, 0]),
        (pa.timestamp("us", "UTC"), [253_402_300_799_999_999, 253_402_300_800_000_000, 2**63 - 1, None]),
        (pa.timestamp("ns"), [-(2**63), -1, 0, 1, 999, 1000, 1_000_000_001, 2**63 - 1, None]),
        (pa.timestamp("s"), [-62_135_596_801, -62_135_596_800, 253_402_300_799, 253_402_300_800]),
        (pa.date32(), [-(2**31), -719_163, -719_162, 2_932_896, 2_932_897, 2**31 - 1]),
        (pa.duration("us"), [-(2**63), -1, 0, 1, 86_400_000_000, 2**63 - 1]),
        (pa.duration("ns"), [-(2**63), -1, 0, 1_500_000_000, 2**63 - 1]),
        (pa.time64("ns"), [0, 1, 999_999_999, 86_399_999_999_999]),
        (pa.float64(), [float("nan"), float("inf"), -float("inf"), -0.0, 5e-324, 1.7976931348623157e308, None]),
        (pa.float32(), [float("nan"), 0.10000000149011612, 1.401298464324817e-45, 3.4028234663852886e38]),
        (pa.binary(), [b"", b"NA", b"\xff", b"\x00", b"\r", b'{"base64":"/w=="}', None]),
    ):
        array = ColumnOfValues(stored_type(kind)).array(values).cast(kind)
        for schema, columns in (
            (pa.schema([pa.field("a", kind)]), [array]),
            (pa.schema([pa.field("a", kind), pa.field("n", pa.int8())]), [array, pa.nulls(len(array), pa.int8())]),
        ):
            batch = pa.RecordBatch.from_arrays(columns, schema=schema)
            assert stored(round_trip(tmp_path / name, batch)) == stored(pa.Table.from_batches([batch])), kind


def test_a_time_that_parquet_cannot_hold_is_refused(tmp_path: Path) -> None:
    batch = pa.RecordBatch.from_arrays([pa.array([2**62], pa.timestamp("s"))], names=["a"])
    with pytest.raises(ConfigError, match="Parquet: Integer overflow"):
        round_trip(tmp_path / "r.parquet", batch)
    assert stored(round_trip(tmp_path / "r.csv", batch)) == stored(pa.Table.from_batches([batch]))


@pytest.mark.parametrize("kind", [kind.value for kind in OutputFormat if kind is not OutputFormat.TEXT])
def test_a_topic_survives_a_pipe(cli: Cli, fake: FakeCluster, kind: str) -> None:
    """The records are also those that Kafka allows: keys that are not UTF-8, headers, nulls."""
    typed = pa.schema([pa.field("m", pa.map_(pa.string(), pa.timestamp("us", "UTC"))), pa.field("x", pa.float32())])
    for name in ("t", "copy"):
        fake.create(name)
        fake.create(f"{name}-typed", schema=typed)
    with Producer(fake.bootstrap) as producer:
        producer.send("t", b"\xff", key=b"\x00k", headers=[("h", b"\xfe"), ("h", None)], timestamp=2**62)
        producer.send("t", None, key="", timestamp=-1)
        producer.send("t", "NA", timestamp=0)
        producer.send("t-typed", {"m": [("k", None), ("k", None)], "x": float("nan")})
        producer.send("t-typed", {})
    for name in ("t", "t-typed"):
        done = cli("consume", name, "-f", kind)
        assert done.code == 0
        target = name.replace("t", "copy", 1)
        read = cli("produce", target, "-f", kind, stdin=done.out)
        assert read.code == 0, read.err
        assert stored(table_of(fake, target)) == stored(table_of(fake, name))
    assert table_of(fake, "copy").schema.equals(DEFAULT_SCHEMA)
