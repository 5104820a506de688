"""Readers of files and pipes, which return streams of Arrow tables: lines, JSON lines, CSV, Parquet and Arrow.

A file name that ends with .gz or .zst means compression. Lines and JSON lines may come from a pipe that never ends, so
they are passed on as they arrive, in blocks of whole lines. Malformed input raises a ConfigError that names the file
and the reason. A value that its column cannot hold raises a BrokerError that names the column, the row and the value.
"""

from __future__ import annotations

import contextlib
import gzip
import io
import sys
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from enum import Enum
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, cast

import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet

from sparklog.cli.json_documents import JsonDocuments
from sparklog.client.producer.partitioning import PARTITION_COLUMN
from sparklog.errors import BrokerError, ConfigError, ErrorCode
from sparklog.record.exact_values import ValueRefusedError
from sparklog.record.parse_values import from_csv, from_json
from sparklog.record.required_columns import misplaced_null
from sparklog.record.schema import plain_schema

_READ_BYTES = 1 << 20
_BATCH_ROWS = 65_536
#: The highest value of a topic's ``max.message.bytes``.
_MOST_BYTES = 1 << 30
#: The maximum size of a record in a CSV file: twice the size that a topic accepts by default.
_CSV_BLOCK_BYTES = 32 << 20
#: The first bytes of an Arrow stream: the continuation marker of its first message.
_STREAM_START = b"\xff\xff\xff\xff"


class InputFormat(str, Enum):
    """The formats of files and pipes that a command can read."""

    LINES = "lines"
    #: The whole input becomes one record, as when kcat sends a file.
    WHOLE = "whole"
    JSON = "json"
    CSV = "csv"
    PARQUET = "parquet"
    ARROW = "arrow"


_BY_SUFFIX = {
    ".json": InputFormat.JSON,
    ".jsonl": InputFormat.JSON,
    ".ndjson": InputFormat.JSON,
    ".csv": InputFormat.CSV,
    ".parquet": InputFormat.PARQUET,
    ".pq": InputFormat.PARQUET,
    ".arrow": InputFormat.ARROW,
    ".arrows": InputFormat.ARROW,
    ".feather": InputFormat.ARROW,
    ".ipc": InputFormat.ARROW,
}
_COMPRESSED = {".gz": "gzip", ".gzip": "gzip", ".zst": "zstd", ".zstd": "zstd"}
#: The exceptions that malformed files raise. JSON that is nested too deeply raises RecursionError.
_BROKEN = (pa.ArrowException, ValueError, EOFError, zlib.error, gzip.BadGzipFile, RecursionError)


class Input(NamedTuple):
    """An open input: a stream of tables, and the total number of rows, or None if it is not known."""

    tables: Iterator[pa.Table]
    total_rows: int | None


def format_of(path: Path | None) -> InputFormat:
    """Return the input format that a file name implies.

    The format is lines for standard input and for unknown names.
    """
    return _BY_SUFFIX.get(plain_path(path).suffix.lower(), InputFormat.LINES) if path is not None else InputFormat.LINES


def compression_of(path: Path | None) -> str | None:
    """Return ``"gzip"`` or ``"zstd"`` if the file name implies this compression, otherwise None."""
    return _COMPRESSED.get(path.suffix.lower()) if path is not None else None


def plain_path(path: Path) -> Path:
    """Return ``path`` without a suffix that means compression."""
    return path.with_suffix("") if compression_of(path) else path


@contextlib.contextmanager
def open_input(path: Path | None, kind: InputFormat, *, schema: pa.Schema, separator: str | None) -> Iterator[Input]:
    """Open a file, or standard input, for a ``with`` block.

    ``schema`` is the topic's schema: CSV and JSON values are parsed to the types of its columns. ``separator`` is the
    text between key and value, for the formats lines and whole; with None there are no keys.

    Raises:
        ConfigError: the content does not have the format. The error may also be raised later, while the tables are
            read.
        OSError: the file cannot be opened.
    """
    name = "standard input" if path is None else str(path)
    with contextlib.ExitStack() as stack:
        try:
            source = sys.stdin.buffer if path is None else stack.enter_context(_opened(path))
            if compression_of(path) and kind in {InputFormat.PARQUET, InputFormat.ARROW}:
                source = io.BytesIO(source.read())  # the readers of these formats must seek to the end of the file
            if kind is InputFormat.PARQUET:
                found = _parquet(source)
            elif kind is InputFormat.ARROW:
                found = _arrow(source)
            elif kind is InputFormat.CSV:
                found = Input(_csv(source, schema), None)
            elif kind is InputFormat.JSON:
                found = Input(_json_lines(source, schema), None)
            elif kind is InputFormat.WHOLE:
                found = Input(_whole(source, separator), None)
            else:
                found = Input(_lines(source, separator), None)
        except _BROKEN as error:
            raise _broken(name, error) from None
        yield Input(_named_errors(name, found.tables), found.total_rows)


def schema_of_file(path: Path) -> pa.Schema:
    """Return the columns of a Parquet, Arrow or CSV file, with types that a topic supports.

    Raises:
        ConfigError: the file has another format, or is broken.
    """
    kind = format_of(path)
    if kind not in {InputFormat.PARQUET, InputFormat.ARROW, InputFormat.CSV}:
        raise ConfigError(f"{path}: expected the name of a Parquet, Arrow or CSV file")
    try:
        with _opened(path) as opened:
            if kind is InputFormat.CSV:
                with pa.csv.open_csv(opened, convert_options=_csv_options([]), parse_options=_CSV_PARSING) as reader:
                    schema = reader.schema
            else:
                source = io.BytesIO(opened.read()) if compression_of(path) else opened
                schema = pa.parquet.read_schema(source) if kind is InputFormat.PARQUET else _arrow_reader(source).schema
    except _BROKEN as error:
        raise _broken(str(path), error) from None
    return plain_schema(schema)


def _named_errors(name: str, tables: Iterator[pa.Table]) -> Iterator[pa.Table]:
    try:
        yield from tables
    except BrokerError as error:
        raise BrokerError(error.code, f"{name}: {error.detail}") from None
    except _BROKEN as error:
        raise _broken(name, error) from None
    except OSError as error:  # zstd raises OSError too
        raise _broken(name, error) from None


def _broken(name: str, error: Exception) -> ConfigError:
    return ConfigError(f"{name}: {str(error).partition(chr(10))[0][:300]}")


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[BinaryIO]:
    kind = compression_of(path)
    with path.open("rb") as file:
        if kind == "gzip":
            with gzip.open(file) as unpacked:
                yield cast("BinaryIO", unpacked)
        elif kind == "zstd":
            with pa.CompressedInputStream(file, "zstd") as stream:
                yield stream
        else:
            yield file


# --- formats ---


def _parquet(source: BinaryIO) -> Input:
    file = pa.parquet.ParquetFile(source if source.seekable() else io.BytesIO(source.read()))
    batches = (pa.Table.from_batches([batch]) for batch in file.iter_batches(batch_size=_BATCH_ROWS))
    return Input(batches, file.metadata.num_rows)


def _arrow(source: BinaryIO) -> Input:
    reader = _arrow_reader(source)
    if isinstance(reader, pa.RecordBatchFileReader):
        count = reader.num_record_batches
        return Input((pa.Table.from_batches([reader.get_batch(index)]) for index in range(count)), None)
    return Input((pa.Table.from_batches([batch]) for batch in reader), None)


def _arrow_reader(source: BinaryIO) -> pa.RecordBatchFileReader | pa.RecordBatchStreamReader:
    """Return a reader for an Arrow file or an Arrow stream, as its first bytes show.

    Raises ValueError with a clear message if the input is neither.
    """
    if not source.seekable():
        return pa.ipc.open_stream(source)
    start = source.read(6)
    source.seek(0)
    if start == b"ARROW1":
        return pa.ipc.open_file(source)
    if start[:4] != _STREAM_START:
        raise ValueError(f"neither an Arrow file nor an Arrow stream: it begins with {start!r}")
    return pa.ipc.open_stream(source)


#: The number of bytes at the end of a CSV file that are compared with its last value.
_CSV_TAIL_BYTES = 1 << 16
_CSV_PARSING = pa.csv.ParseOptions(newlines_in_values=True)


def _csv_options(binary: Sequence[str]) -> pa.csv.ConvertOptions:
    """Return options by which an unquoted empty field is null, and a quoted empty field is empty text."""
    return pa.csv.ConvertOptions(
        column_types=dict.fromkeys(binary, pa.binary()),
        null_values=[""],
        strings_can_be_null=True,
        quoted_strings_can_be_null=False,
    )


def _csv(source: BinaryIO, schema: pa.Schema) -> Iterator[pa.Table]:
    """Yield the rows as tables. The header counts as row 1, as in Arrow's reader."""
    # With one column, an empty line is a null. With several columns, an empty line is skipped.
    parsing = _CSV_PARSING
    if len(schema) == 1:
        parsing = pa.csv.ParseOptions(newlines_in_values=True, ignore_empty_lines=False)
    names = [*schema.names, PARTITION_COLUMN]
    reading = pa.csv.ReadOptions(block_size=_CSV_BLOCK_BYTES, use_threads=False)
    row = 2
    text = _CsvText(source)
    converting = _csv_options(names)
    with pa.csv.open_csv(text, convert_options=converting, parse_options=parsing, read_options=reading) as reader:
        for block in reader:
            for at in range(0, block.num_rows, _BATCH_ROWS):
                batch = block.slice(at, _BATCH_ROWS)
                _check_names(batch.schema.names, schema)
                if text.ends_within(batch.column(batch.num_columns - 1)[-1].as_py()):
                    raise ValueError(f"row {row + batch.num_rows - 1}: the file ends within a quoted value")
                values = dict(zip(batch.schema.names, batch.columns, strict=True))
                yield _table(schema, values, from_csv, partial(_row_after, row))
                row += batch.num_rows


class _CsvText(io.RawIOBase):
    """A binary source whose blocks do not end with a carriage return. It remembers how the source ended.

    Arrow's reader drops a line feed at the start of a block if the previous block ended with a carriage return, even
    inside quotes. It accepts a file that ends within quotes: the rest of the file is then one value.
    """

    def __init__(self, source: BinaryIO) -> None:
        self._source = source
        self._held = b""
        self._quotes = 0
        #: The last bytes of the source, and whether the source has ended.
        self._tail = b""
        self._ended = False

    def readable(self) -> bool:
        return True

    def read(self, size: int = -1) -> bytes:
        block = self._read(size)
        self._quotes += block.count(b'"')
        if len(block) >= _CSV_TAIL_BYTES:
            self._tail = block[-_CSV_TAIL_BYTES:]
        elif block:
            self._tail = (self._tail + block)[-_CSV_TAIL_BYTES:]
        self._ended = self._ended or not block
        return block

    def _read(self, size: int) -> bytes:
        held, self._held = self._held, b""
        block = held + self._source.read(size - len(held) if size >= 0 else -1)
        kept = block.rstrip(b"\r")
        if kept and len(block) > len(held):
            self._held = block[len(kept) :]
            return kept
        return block

    def ends_within(self, value: bytes | None) -> bool:
        """Return whether the source has ended within the quotes of ``value``, the last value that was parsed.

        Then the source has an odd number of quotes, and ends with a quote and the value. A value without quotes around
        it may have any number of quotes.
        """
        if value is None or not self._ended or not self._quotes % 2:
            return False
        written = b'"' + value.replace(b'"', b'""')
        return self._tail.endswith(written[-_CSV_TAIL_BYTES:])


def _row_after(first: int, row: int) -> str:
    return f"row {first + row}"


def _json_lines(source: BinaryIO, schema: pa.Schema) -> Iterator[pa.Table]:
    documents = JsonDocuments()
    for block in _blocks_of_lines(source):
        documents.feed(block)
        yield from _json_tables(documents, schema)
    documents.close()
    yield from _json_tables(documents, schema)


def _json_tables(documents: JsonDocuments, schema: pa.Schema) -> Iterator[pa.Table]:
    found, lines = documents.pop_objects()
    for at in range(0, len(found), _BATCH_ROWS):
        rows, numbers = found[at : at + _BATCH_ROWS], lines[at : at + _BATCH_ROWS]
        given = {name for row in rows for name in row}
        try:
            _check_names(given, schema)
        except BrokerError as error:
            unknown = given - {*schema.names, PARTITION_COLUMN}
            row = next(row for row, value in enumerate(rows) if unknown & value.keys())
            raise BrokerError(error.code, f"line {numbers[row]}: {error.detail}") from None
        values = {name: [row.get(name) for row in rows] for name in given}
        yield _table(schema, values, from_json, partial(_line_of, numbers), rows=len(rows))


def _line_of(lines: Sequence[int], row: int) -> str:
    return f"line {lines[row]}"


def _check_names(names: Iterable[str], schema: pa.Schema) -> None:
    """Raise BrokerError SCHEMA_MISMATCH for a name that is not a column, or that occurs twice."""
    found = list(names)
    unknown = sorted(set(found) - {*schema.names, PARTITION_COLUMN})
    problems = [f"column {name!r} is not among the topic's columns {schema.names}" for name in unknown]
    problems += [f"column {name!r} occurs {found.count(name)} times" for name in set(found) if found.count(name) > 1]
    if problems:
        raise BrokerError(ErrorCode.SCHEMA_MISMATCH, "; ".join(problems[:20]))


def _table(
    schema: pa.Schema,
    values: dict[str, Any],
    convert: Callable[[Any, pa.DataType], pa.Array],
    place: Callable[[int], str],
    *,
    rows: int | None = None,
) -> pa.Table:
    """Return the values of each column as a table of the topic's types.

    ``place`` returns the position of a row in the input, for errors.

    Raises:
        BrokerError: SCHEMA_MISMATCH; the message names the column, the row and the value.
    """
    fields = [field for field in schema if field.name in values]
    if PARTITION_COLUMN in values and PARTITION_COLUMN not in schema.names:
        fields.append(pa.field(PARTITION_COLUMN, pa.int64()))
    if not fields:
        fields = [schema.field(0)]  # objects without any member become records of nulls
        values = {fields[0].name: [None] * (rows or 0)}
    columns = []
    for field in fields:
        try:
            column = convert(values[field.name], field.type)
        except ValueRefusedError as error:
            detail = f"column {field.name + error.path!r}, {place(error.row)}: {error}"
            raise BrokerError(ErrorCode.SCHEMA_MISMATCH, detail) from None
        if path := misplaced_null(column, field):
            row = next(row for row in range(len(column)) if misplaced_null(column.slice(row, 1), field))
            raise BrokerError(ErrorCode.SCHEMA_MISMATCH, f"column {path!r}, {place(row)}: it cannot be null")
        columns.append(column)
    return pa.Table.from_arrays(columns, schema=pa.schema(fields))


def _lines(source: BinaryIO, separator: str | None) -> Iterator[pa.Table]:
    split = separator.encode() if separator else None
    for block in _blocks_of_lines(source):
        lines = block.removesuffix(b"\n").split(b"\n")
        if split is None:
            yield pa.table({"value": pa.array(lines, pa.binary())})
            continue
        parts = [line.partition(split) for line in lines]
        keys = [key if found else None for key, found, _ in parts]
        values = [value if found else key for key, found, value in parts]
        yield pa.table({"key": pa.array(keys, pa.binary()), "value": pa.array(values, pa.binary())})


def _whole(source: BinaryIO, separator: str | None) -> Iterator[pa.Table]:
    """Yield the input as one record, with all line ends.

    Yield nothing for empty input, which a failed command in a pipe produces.
    """
    content = source.read(_MOST_BYTES + 1)
    if len(content) > _MOST_BYTES:
        raise ValueError(f"the input is larger than {_MOST_BYTES} bytes, the maximum for one record")
    if not content:
        return
    before, found, after = content.partition(separator.encode()) if separator else (b"", b"", b"")
    key, value = [before if found else None], [after if found else content]
    yield pa.table({"key": pa.array(key, pa.binary()), "value": pa.array(value, pa.binary())})


def _blocks_of_lines(source: BinaryIO) -> Iterator[bytes]:
    """Yield blocks of whole lines as they arrive; the last line may lack a line feed."""
    rest = b""
    read = getattr(source, "read1", source.read)
    while block := read(_READ_BYTES):
        block = rest + block
        end = block.rfind(b"\n") + 1
        rest = block[end:]
        if end:
            yield block[:end]
    if rest:
        yield rest
