"""Files and pipes as Arrow tables, piece by piece: lines, JSON lines, CSV, Parquet, Arrow.

Input that may never end (lines, JSON lines) is handed on as it arrives, in blocks of whole lines; nothing waits for a
block to fill. Broken input is a ConfigError that names file and reason.
"""

from __future__ import annotations

import contextlib
import io
import sys
from collections.abc import Iterator
from enum import Enum
from pathlib import Path
from typing import BinaryIO, NamedTuple

import pyarrow as pa
import pyarrow.csv
import pyarrow.json
import pyarrow.parquet
from pyarrow import types

from sparklog.errors import ConfigError
from sparklog.record.schema import plain_schema

_READ_BYTES = 1 << 20
_BATCH_ROWS = 65_536
#: Continuation mark of an encapsulated message.
_STREAM_START = b"\xff\xff\xff\xff"


class Format(str, Enum):
    """Formats of input."""

    LINES = "lines"
    JSON = "json"
    CSV = "csv"
    PARQUET = "parquet"
    ARROW = "arrow"


_BY_SUFFIX = {
    ".json": Format.JSON,
    ".jsonl": Format.JSON,
    ".ndjson": Format.JSON,
    ".csv": Format.CSV,
    ".parquet": Format.PARQUET,
    ".pq": Format.PARQUET,
    ".arrow": Format.ARROW,
    ".arrows": Format.ARROW,
    ".feather": Format.ARROW,
    ".ipc": Format.ARROW,
}


class Input(NamedTuple):
    """Tables to come, and how many rows there will be where that is known."""

    tables: Iterator[pa.Table]
    total_rows: int | None


def format_of(path: Path | None) -> Format:
    """The format a file's name stands for; lines for standard input and unknown names."""
    return _BY_SUFFIX.get(path.suffix.lower(), Format.LINES) if path is not None else Format.LINES


@contextlib.contextmanager
def open_input(path: Path | None, kind: Format, *, schema: pa.Schema, separator: str | None) -> Iterator[Input]:
    """A file, or standard input, open within the block. ``schema`` is the topic's: it says what text is read as.

    Raises:
        ConfigError: the content is not of the format; also while the tables are taken.
        OSError: the file cannot be opened.
    """
    name = "standard input" if path is None else str(path)
    with contextlib.nullcontext(sys.stdin.buffer) if path is None else path.open("rb") as source:
        try:
            if kind is Format.PARQUET:
                found = _parquet(source)
            elif kind is Format.ARROW:
                found = _arrow(source)
            elif kind is Format.CSV:
                found = Input(_csv(source, schema), None)
            elif kind is Format.JSON:
                found = Input(_json_lines(source, schema), None)
            else:
                found = Input(_lines(source, separator), None)
        except (pa.ArrowException, ValueError) as error:
            raise _broken(name, error) from None
        yield Input(_telling(name, found.tables), found.total_rows)


def schema_of_file(path: Path) -> pa.Schema:
    """The columns of a Parquet, Arrow or CSV file, in types that a topic can have.

    Raises:
        ConfigError: the file is of another kind, or broken.
    """
    kind = format_of(path)
    if kind not in {Format.PARQUET, Format.ARROW, Format.CSV}:
        raise ConfigError(f"{path}: a Parquet, Arrow or CSV file is expected (by its name)")
    try:
        with path.open("rb") as source:
            if kind is Format.PARQUET:
                schema = pa.parquet.read_schema(source)
            elif kind is Format.CSV:
                with pa.csv.open_csv(source) as reader:
                    schema = reader.schema
            else:
                with _arrow_reader(source) as arrow:
                    schema = arrow.schema
    except (pa.ArrowException, ValueError) as error:
        raise _broken(str(path), error) from None
    return plain_schema(schema)


def _telling(name: str, tables: Iterator[pa.Table]) -> Iterator[pa.Table]:
    try:
        yield from tables
    except (pa.ArrowException, ValueError) as error:
        raise _broken(name, error) from None


def _broken(name: str, error: Exception) -> ConfigError:
    return ConfigError(f"{name}: {str(error).partition(chr(10))[0][:300]}")


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
    """A file and a stream differ in their first bytes; what is neither is called so, not by what Arrow makes of it."""
    if not source.seekable():
        return pa.ipc.open_stream(source)
    start = source.read(6)
    source.seek(0)
    if start == b"ARROW1":
        return pa.ipc.open_file(source)
    if start[:4] != _STREAM_START:
        raise ValueError(f"neither an Arrow file nor an Arrow stream: it begins with {start!r}")
    return pa.ipc.open_stream(source)


def _csv(source: BinaryIO, schema: pa.Schema) -> Iterator[pa.Table]:
    options = pa.csv.ConvertOptions(
        column_types=_as_text(schema), strings_can_be_null=True, quoted_strings_can_be_null=False
    )
    with pa.csv.open_csv(source, convert_options=options) as reader:
        for batch in reader:
            yield pa.Table.from_batches([batch])


def _json_lines(source: BinaryIO, schema: pa.Schema) -> Iterator[pa.Table]:
    # Nested: the reader takes no binary and no decimals, so those are read as text and converted with the rest.
    options = pa.json.ParseOptions(explicit_schema=_as_text(schema), unexpected_field_behavior="infer")
    for block in _blocks_of_lines(source):
        if block.isspace():
            continue  # Arrow's reader skips empty lines, but wants one that is not
        read = pa.json.ReadOptions(block_size=len(block) + 1, use_threads=False)
        yield pa.json.read_json(io.BytesIO(block), parse_options=options, read_options=read)


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


def _blocks_of_lines(source: BinaryIO) -> Iterator[bytes]:
    """Whole lines, as many as there are; the last one need not end with a line feed."""
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


def _as_text(schema: pa.Schema) -> pa.Schema:
    return pa.schema([pa.field(field.name, _text_type(field.type)) for field in schema])


def _text_type(kind: pa.DataType) -> pa.DataType:
    if types.is_binary(kind) or types.is_large_binary(kind) or types.is_fixed_size_binary(kind):
        return pa.string()
    if types.is_struct(kind):
        fields = [kind.field(index) for index in range(kind.num_fields)]
        return pa.struct([pa.field(field.name, _text_type(field.type)) for field in fields])
    if types.is_list(kind) or types.is_large_list(kind):
        return pa.list_(_text_type(kind.value_type))
    return kind
