"""Tests of JSON and CSV as records: nulls, times, and the column and row that an error names."""

from __future__ import annotations

import csv
import gzip
import io
import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sparklog.cli.files import InputFormat, open_input
from sparklog.cli.json_documents import flat_objects
from sparklog.errors import ConfigError
from sparklog.record.exact_values import ValueRefusedError
from sparklog.record.format_values import _stored, json_values
from sparklog.record.parse_values import _from_cells, from_csv, from_json, parse_json
from tests.cli.in_process import Cli
from tests.cli.rows import TYPED, table_of
from tests.client.fake_cluster import FakeCluster

STAMP = pa.timestamp("us", "UTC")
WORDS = pa.schema([pa.field("country", pa.string()), pa.field("name", pa.string()), pa.field("n", pa.float64())])


def us(array: pa.Array) -> Any:
    return array.cast(pa.int64()).to_pylist()


def us64(array: pa.Array) -> Any:
    return _stored(array).to_pylist()


def cells(*found: bytes | None, kind: pa.DataType) -> pa.Array:
    """Parse cells as from CSV's reader. The parser of whole columns and the parser of single cells must agree."""
    try:
        array = from_csv(pa.array(found, pa.binary()), kind)
    except ValueRefusedError:
        with pytest.raises(ValueRefusedError):
            _from_cells(found, kind)
        raise
    assert _stored(array).equals(_stored(_from_cells(found, kind))) or "nan" in repr(array.to_pylist())
    return array


# --- CSV ---


def test_only_an_empty_field_is_null(cli: Cli, fake: FakeCluster) -> None:
    fake.create("t", schema=WORDS)
    text = b'country,name,n\nNA,Null,1\nDE,nan,2\nFR,N/A,\n"NA","",nan\n,#N/A,4\n'
    assert cli("produce", "t", "-", "-f", "csv", stdin=text).code == 0
    table = table_of(fake, "t")
    assert table["country"].to_pylist() == ["NA", "DE", "FR", "NA", None]
    assert table["name"].to_pylist() == ["Null", "nan", "N/A", "", "#N/A"]
    assert repr(table["n"].to_pylist()) == "[1.0, 2.0, None, nan, 4.0]"


@pytest.mark.parametrize("block_bytes", range(500, 516))
def test_a_quoted_value_may_have_newlines_wherever_blocks_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, block_bytes: int
) -> None:
    """At one of these block sizes a block ends between a carriage return and a line feed."""
    monkeypatch.setattr("sparklog.cli.files._CSV_BLOCK_BYTES", block_bytes)
    schema = pa.schema([pa.field("text", pa.string()), pa.field("i", pa.int64())])
    text = io.StringIO(newline="")
    writer = csv.writer(text)
    writer.writerow(["text", "i"])
    values = [("line\n" * (index % 3) + '"\r\n\r\r\n\r', index) for index in range(200)]
    writer.writerows(values)
    (tmp_path / "f.csv").write_bytes(text.getvalue().encode())
    with open_input(tmp_path / "f.csv", InputFormat.CSV, schema=schema, separator=None) as found:
        table = pa.concat_tables(found.tables)
    assert list(zip(table["text"].to_pylist(), table["i"].to_pylist(), strict=True)) == values


def test_a_file_of_rows_with_newlines_is_read_completely(cli: Cli, fake: FakeCluster) -> None:
    """The file is larger than one block of the reader, 1 MB."""
    fake.create("t", schema=pa.schema([pa.field("text", pa.string()), pa.field("i", pa.int64())]))
    text = "text,i\n" + "".join(f'"ab\ncd",{index}\n' for index in range(120_000))
    assert cli("produce", "t", "-", "-f", "csv", "-q", stdin=text.encode()).code == 0
    table = table_of(fake, "t")
    assert table["i"].to_pylist() == list(range(120_000)) and set(table["text"].to_pylist()) == {"ab\ncd"}


def csv_rows(path: Path, text: bytes) -> list[tuple[str | None, ...]]:
    """Return the rows of a CSV file with columns of text, which its first line names."""
    path.write_bytes(text)
    schema = pa.schema([pa.field(name, pa.string()) for name in text.split(b"\n")[0].decode().split(",")])
    with open_input(path, InputFormat.CSV, schema=schema, separator=None) as found:
        return [tuple(row.values()) for table in found.tables for row in table.to_pylist()]


@pytest.mark.parametrize(
    ("text", "row"),
    [
        (b'a\n"x\n', 2),
        (b'a\n"x', 2),
        (b'a\n"', 2),
        (b'a\n"x""\n', 2),
        (b'a,b\n1,2\n3,"4\n5,6\n7,8\n', 3),
        (b'a,b\n1,"2\r\n3,4\r\n', 2),
        pytest.param(b'a,b\n1,"' + b"z\n" * 100_000, 2, id="longer than the compared end"),
    ],
)
def test_a_csv_file_that_ends_within_quotes_is_refused(tmp_path: Path, text: bytes, row: int) -> None:
    """Otherwise one missing quote, or a file that was cut off, would make one value of all rows after it."""
    with pytest.raises(ConfigError, match=f"f.csv: row {row}: the file ends within a quoted value"):
        csv_rows(tmp_path / "f.csv", text)


@pytest.mark.parametrize(
    ("text", "last"),
    [
        (b'a\n"x"', ("x",)),
        (b'a\n"x\n"\n', ("x\n",)),
        (b'a\n""""\n', ('"',)),
        (b"a\n5'6\"\n", ("5'6\"",)),
        (b'a,b\n19",2', ('19"', "2")),
        (b'a,b\n19",""\n', ('19"', "")),
        (b'a,b\n19","x""y"\n', ('19"', 'x"y')),
    ],
)
def test_quotes_within_other_values_are_text(tmp_path: Path, text: bytes, last: tuple[str, ...]) -> None:
    assert csv_rows(tmp_path / "f.csv", text)[-1] == last


@pytest.mark.parametrize("suffix", [".gz", ".zst"])
@pytest.mark.parametrize("kind", ["csv", "json", "txt", "parquet", "arrow"])
def test_compressed_files_are_recognized_by_their_extension(
    cli: Cli, fake: FakeCluster, tmp_path: Path, suffix: str, kind: str
) -> None:
    schema = TYPED if kind != "txt" else pa.schema([])
    fake.create("t", schema=TYPED) if len(schema) else fake.create("t")
    rows = pa.table({"carrier": ["UA", None], "delay": [1.5, 2.0]}, schema=TYPED)
    plain = tmp_path / f"rows.{kind}"
    if kind == "parquet":
        pa.parquet.write_table(rows, plain)
    elif kind == "arrow":
        with pa.ipc.new_file(plain, TYPED) as writer:
            writer.write_table(rows)
    else:
        plain.write_text(
            {
                "csv": "carrier,delay\nUA,1.5\n,2\n",
                "json": '{"carrier":"UA","delay":1.5}\n{"delay":2}\n',
                "txt": "a\nb\n",
            }[kind]
        )
    packed = plain.with_suffix(plain.suffix + suffix)
    if suffix == ".gz":
        packed.write_bytes(gzip.compress(plain.read_bytes()))
    else:
        with packed.open("wb") as file, pa.CompressedOutputStream(file, "zstd") as stream:
            stream.write(plain.read_bytes())
    done = cli("produce", "t", packed)
    assert done.code == 0, done.err
    if kind == "txt":
        assert table_of(fake, "t")["value"].to_pylist() == [b"a", b"b"]
        again = cli("consume", "t", "-o", tmp_path / f"out.txt{suffix}")
    else:
        assert table_of(fake, "t").equals(rows)
        again = cli("consume", "t", "-o", tmp_path / f"out.{kind}{suffix}")
    assert again.code == (2 if kind in {"parquet", "arrow"} else 0)
    if again.code == 0 and kind == "csv":
        assert cli("produce", "t", tmp_path / f"out.csv{suffix}").code == 0
        assert table_of(fake, "t").num_rows == 4


def test_a_broken_compressed_file_is_named(cli: Cli, fake: FakeCluster, tmp_path: Path) -> None:
    fake.create("t", schema=TYPED)
    whole = gzip.compress(b"carrier,delay\n" + b"UA,1\n" * 10_000)
    for name, content in (("cut.csv.gz", whole[:-20]), ("no.csv.gz", b"no gzip"), ("no.csv.zst", b"no zstd")):
        (tmp_path / name).write_bytes(content)
        done = cli("produce", "t", tmp_path / name)
        assert done.code in {1, 2} and name in done.err and done.err.count("\n") == 1, done.err


@pytest.mark.parametrize(
    ("cell", "kind", "expected"),
    [
        (b"5", pa.int8(), 5),
        (b" 5 ", pa.int8(), 5),
        (b"5.0", pa.int8(), 5),
        (b"1e3", pa.float64(), 1000.0),
        (b"0.1", pa.float64(), 0.1),
        (b"12345678901234567000", pa.float64(), 12345678901234567000.0),
        (b"-0", pa.float64(), -0.0),
        (b"0.1", pa.float32(), 0.10000000149011612),
        (b"-Infinity", pa.float64(), -float("inf")),
        (b"TRUE", pa.bool_(), True),
        (b"0", pa.bool_(), False),
        (b"[1,null]", pa.list_(pa.int8()), [1, None]),
        (b'{"a":"2024-01-31"}', pa.struct([pa.field("a", pa.string())]), {"a": "2024-01-31"}),
    ],
)
def test_cells_become_values(cell: bytes, kind: pa.DataType, expected: Any) -> None:
    assert cells(cell, None, kind=kind).to_pylist() == [expected, None]


@pytest.mark.parametrize(
    ("cell", "kind"),
    [
        (b"late", pa.float64()),
        (b"1_000", pa.int64()),
        (b"0x10", pa.int64()),
        (b"300", pa.int8()),
        (b"1.5", pa.int8()),
        (b"1e400", pa.float64()),
        (b"9007199254740993", pa.float64()),
        (b"1e39", pa.float32()),
        (b"yes", pa.bool_()),
        (b"1.555", pa.decimal128(5, 2)),
        (b"\xff", pa.string()),
        (b"2024-02-30", pa.date32()),
        (b"2024-01-01 25:00", STAMP),
        (b"{1}", pa.list_(pa.int8())),
        (b"[300]", pa.list_(pa.int8())),
    ],
)
def test_cells_that_do_not_fit_are_refused(cell: bytes, kind: pa.DataType) -> None:
    with pytest.raises(ValueRefusedError) as caught:
        cells(None, cell, kind=kind)
    assert caught.value.row == 1


# --- one rule for times ---


@pytest.mark.parametrize("kind", [STAMP, pa.timestamp("us")])
@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("2024-01-01T00:00:00", 1_704_067_200_000_000),
        ("2024-01-01 00:00:00", 1_704_067_200_000_000),
        ("2024-01-01T00:00:00Z", 1_704_067_200_000_000),
        ("2024-01-01T02:00:00+02:00", 1_704_067_200_000_000),
        ("2023-12-31T19:00-0500", 1_704_067_200_000_000),
        ("2024-01-01", 1_704_067_200_000_000),
        ("2024-01-01T00:00:00.1234567Z", None),
        ("2024-01-01T00:00:00.123456000Z", 1_704_067_200_123_456),
        ("9999-12-31T23:59:59.999999Z", 253_402_300_799_999_999),
        ("0001-01-01T00:00:00Z", -62_135_596_800_000_000),
        ("9223372036854775807 us", 2**63 - 1),
        ("9223372036854775808 us", None),
        ("1704067200 s", 1_704_067_200_000_000),
        ("yesterday", None),
        ("2024-01-01T00:00:60Z", None),
    ],
)
def test_a_time_is_the_same_in_csv_and_json(text: str, expected: int | None, kind: pa.DataType) -> None:
    if expected is None:
        with pytest.raises(ValueRefusedError):
            cells(text.encode(), kind=kind)
        with pytest.raises(ValueRefusedError):
            from_json([text], kind)
        return
    assert us(cells(text.encode(), kind=kind)) == us(from_json([text], kind)) == [expected]


def test_a_time_beyond_python_is_printed_as_a_number(cli: Cli, fake: FakeCluster) -> None:
    fake.create("t")
    times = [1_700_000_000_123_000, 2**63 - 1, -62_200_000_000_000_000, -1]
    assert us(from_json([f"{time} us" for time in times], STAMP)) == times
    lines = "".join(json.dumps({"value": "v", "timestamp": f"{time} us"}) + "\n" for time in times)
    assert cli("produce", "t", "-f", "json", stdin=lines.encode()).code == 0
    found = [json.loads(line)["timestamp"] for line in cli("consume", "t", "--json").text.splitlines()]
    assert found == [
        "2023-11-14T22:13:20.123000Z",
        "9223372036854775807 us",
        "-62200000000000000 us",
        "1969-12-31T23:59:59.999999Z",
    ]
    assert cli("consume", "t", "-t", "%T ").text == " ".join(str(time // 1000) for time in times) + " "
    assert cli("consume", "t", "-t", "%{timestamp};").text.startswith(
        "2023-11-14T22:13:20.123000+00:00;9223372036854775807 us;"
    )


_SOME = {
    pa.int8(): r"-?[0-9]{1,3}|\+1|1\.0|",
    pa.int64(): r"-?[0-9]{1,20}|-0|007| 5 |1e3|1_0|0x1",
    pa.uint16(): r"-?[0-9]{1,6}",
    pa.float64(): r"-?[0-9]{1,20}(\.[0-9]{1,25})?|-?0\.0|1e[0-9]{1,3}|\.5|5\.|nan|-inf",
    pa.date32(): r"(0000|0001|1969|2024|9999)-[01][0-9]-[0-3][0-9]|[0-9]{1,3} d",
    STAMP: r"(0000|0001|1600|2024|9999)-(01|02|12)-(00|01|29|31)[T ][0-2][0-9]:[0-6][0-9]:[0-6][0-9]"
    r"(\.[0-9]{1,9})?(Z|\+02:00|)",
    pa.timestamp("ns"): r"(1600|1700|2024|2300)-12-31[T ]23:59:59(\.[0-9]{1,9})?Z?",
}


@pytest.mark.parametrize("kind", _SOME, ids=str)
@given(data=st.data())
@settings(max_examples=50, suppress_health_check=list(HealthCheck))  # the health checks depend on the clock
def test_columns_parsed_together_equal_cell_by_cell_parsing(kind: pa.DataType, data: st.DataObject) -> None:
    pattern = st.from_regex(_SOME[kind], fullmatch=True).filter(str.isascii)
    found = data.draw(st.lists(st.none() | pattern.map(str.encode), max_size=3))
    try:
        cells(*found, kind=kind)
    except ValueRefusedError as error:
        assert found[error.row] is not None
    texts = [None if cell is None else cell.decode() for cell in found]
    if pa.types.is_temporal(kind):
        try:
            expected = from_json(texts, kind)
        except ValueRefusedError:
            return
        assert us64(cells(*found, kind=kind)) == us64(expected)


# --- JSON ---


@pytest.mark.parametrize(
    ("stdin", "expected"),
    [
        (b'{"carrier":"a"} {"carrier":"b"}\n', ["a", "b"]),
        (b'{\n "carrier": "{"\n}\n{"carrier":"b"}\n', ["{", "b"]),
        (b'\xef\xbb\xbf{"carrier":"a"}\r\n{"carrier":"b"}', ["a", "b"]),
        (b'{"carrier":"a"}{\n"carrier":\n"b"}{"carrier":"c"}\n', ["a", "b", "c"]),
        (b"{}\n", [None]),
    ],
)
def test_objects_need_not_be_on_separate_lines(cli: Cli, fake: FakeCluster, stdin: bytes, expected: list[str]) -> None:
    fake.create("t", schema=TYPED)
    assert cli("produce", "t", "-f", "json", stdin=stdin).code == 0
    assert table_of(fake, "t")["carrier"].to_pylist() == expected


@pytest.mark.parametrize(
    ("kind", "stdin", "expected"),
    [
        ("json", b'{"carrier":"a"}\nnull\n', "line 2: null found, expected a JSON object"),
        ("json", b'\n{"carrier":"b"', "line 2: "),
        ("json", b'{"carrier":"a"}\n{\n"carrier":"b\n"}\n', "line 2: "),
        ("json", b'{"carrier":"a","carrier":"b"}\n', "line 1: an object has two values for 'carrier'"),
        ("json", b'{"carrier":"a"}\n\n{"delay":"late"}\n', "column 'delay', line 3: 'late' (str)"),
        ("json", b'{"carrier":"a"}\n{"speed":1}\n', "line 2: column 'speed' is not among"),
        ("json", b'{"carrier":"\xff"}\n', "line 1: "),
        ("json", b'{"delay":1e400}\n', "column 'delay', line 1: "),
        pytest.param("json", b'{"delay":' + b"[" * 100_000 + b"]" * 100_000 + b"}\n", "recursion", id="nested"),
        ("csv", b"carrier,delay\na,1\nb,late\n", "column 'delay', row 3: 'late' (str): expected a number"),
        ("csv", b"carrier,speed\na,1\n", "column 'speed' is not among"),
        ("csv", b"carrier,delay\na,1\nb\n", "Row #3: Expected 2 columns, got 1"),
        ("csv", b"carrier,carrier\na,b\n", "'carrier' occurs 2 times"),
    ],
)
def test_an_error_names_file_column_and_row(
    cli: Cli, fake: FakeCluster, kind: str, stdin: bytes, expected: str
) -> None:
    fake.create("t", schema=TYPED)
    done = cli("produce", "t", "-f", kind, stdin=stdin)
    assert done.code in {1, 2} and "standard input: " in done.err and expected in done.err, done.err
    assert fake.records("t") == []


def test_a_null_in_a_required_column_is_named_by_line(cli: Cli, fake: FakeCluster) -> None:
    fake.create("t", schema=pa.schema([pa.field("id", pa.int64(), nullable=False), pa.field("n", pa.int64())]))
    done = cli("produce", "t", "-f", "json", stdin=b'{"id":1}\n{"n":2}\n')
    assert "column 'id', line 2: it cannot be null" in done.err


@pytest.mark.parametrize(
    ("value", "kind", "expected"),
    [
        ("1.50", pa.decimal128(5, 2), "1.50"),
        (parse_json("1.5"), pa.decimal128(5, 2), "1.50"),
        (parse_json("NaN"), pa.float64(), "NaN"),
        (parse_json("-1.50"), pa.float64(), -1.5),
        ("-inf", pa.float64(), "-Infinity"),
        ({"base64": "/w=="}, pa.binary(), {"base64": "/w=="}),
        ("aGk=", pa.binary(), "aGk="),
        ({"k": 1}, pa.map_(pa.string(), pa.int8()), [["k", 1]]),
        ([["k", 1], ["k", None]], pa.map_(pa.string(), pa.int8()), [["k", 1], ["k", None]]),
        ("12:34", pa.time32("s"), "12:34:00"),
        ("PT1H", pa.duration("s"), "PT3600S"),
        ("P1DT1.5S", pa.duration("ms"), "P1DT1.5S"),
        ("-PT0.000000001S", pa.duration("ns"), "-1 ns"),
        ("2932897 d", pa.date32(), "2932897 d"),
    ],
)
def test_types_unknown_to_json_have_a_json_form(value: Any, kind: pa.DataType, expected: Any) -> None:
    assert json_values(from_json([value, None], kind)) == [expected, None]


@pytest.mark.parametrize(
    ("value", "kind"),
    [
        ({"base64": "x"}, pa.binary()),
        ({"base64": "", "more": 1}, pa.binary()),
        (5, STAMP),
        ("5", pa.int8()),
        (5, pa.string()),
        ("true", pa.bool_()),
        ("1.5", pa.float64()),
        (parse_json("-1e400"), pa.float64()),
        ([[1]], pa.map_(pa.int8(), pa.int8())),
        ([[None, 1]], pa.map_(pa.int8(), pa.int8())),
        ({"a": 1, "b": 2}, pa.struct([pa.field("a", pa.int8())])),
        ("PT", pa.duration("s")),
        ("1ns", pa.duration("us")),
    ],
)
def test_json_that_does_not_fit_is_refused(value: Any, kind: pa.DataType) -> None:
    with pytest.raises(ValueRefusedError):
        from_json([value], kind)


@given(
    st.lists(
        st.dictionaries(
            st.sampled_from(["a", "b", 'q"', "\\"]),
            st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3) | st.lists(st.integers()),
            max_size=3,
        ),
        max_size=4,
    ),
    st.sampled_from(["", "\n", "\n\n", ' {"a":1,"a":2}', '{"a":"","a":"\\""}', "\n[1]", "\n1e99999", "\n{}{}"]),
)
@settings(suppress_health_check=list(HealthCheck))
def test_blocks_parsed_together_equal_line_by_line_parsing(rows: list[dict[str, Any]], more: str) -> None:
    block = ("\n".join(map(json.dumps, rows)) + more).encode()
    at_once = flat_objects(block)
    if at_once is not None:
        lines = [parse_json(line) for line in block.decode().removesuffix("\n").split("\n")]
        assert repr(at_once) == repr(lines)


def test_a_block_of_plain_objects_is_parsed_together() -> None:
    assert flat_objects(b'{"a":1,"b":"x:"}\n{"b":null,"c":1.50}\n') is not None
    assert flat_objects(b'{"a":1,"a":2}\n') is None
