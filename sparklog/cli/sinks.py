"""The output formats of consumed records: text, templates, JSON, CSV, Arrow and Parquet.

A file name that ends with .gz or .zst means compression. Tables (CSV, Arrow, Parquet) have the columns that the topic
has when the read begins, even if there is no record.
"""

from __future__ import annotations

import contextlib
import gzip
import re
import sys
from collections.abc import Iterator
from enum import Enum
from pathlib import Path
from typing import Any, BinaryIO, Protocol, cast

import msgspec
import pyarrow as pa
import pyarrow.parquet

from sparklog.cli import files
from sparklog.cli.output import on_terminal
from sparklog.cli.template import Show, Template
from sparklog.errors import ConfigError
from sparklog.escaping import escaped_json, shown_bytes
from sparklog.record.format_values import csv_values, json_values, text_values

#: The number of rows, and the approximate size, at which a row group of a Parquet file is written.
_GROUP_ROWS, _GROUP_BYTES = 1 << 20, 64 << 20
_SPECIAL = re.compile(rb'[",\r\n]')


class OutputFormat(str, Enum):
    """The formats in which a command can write consumed records."""

    TEXT = "text"
    JSON = "json"
    CSV = "csv"
    ARROW = "arrow"
    PARQUET = "parquet"


TABLES = frozenset({OutputFormat.CSV, OutputFormat.ARROW, OutputFormat.PARQUET})


def format_of(path: Path | None) -> OutputFormat:
    """Return the output format that a file name implies.

    The format is text for standard output and for unknown names.
    """
    found = files.format_of(path).value
    return OutputFormat(found) if found in {kind.value for kind in OutputFormat} else OutputFormat.TEXT


class Sink(Protocol):
    def write(self, batch: pa.RecordBatch) -> None: ...


@contextlib.contextmanager
def open_sink(
    kind: OutputFormat, output: Path | None, *, schema: pa.Schema | None, keys: bool, template: Template | None
) -> Iterator[Sink]:
    """Open a file, or standard output, for a ``with`` block that writes records to it.

    ``schema`` has the columns of the table, for formats that are tables. ``schema`` is None if the topics have
    different columns. On a terminal, unprintable characters of values are escaped.

    Raises:
        ConfigError: the topics have different columns, which one table cannot have, or the format cannot be compressed.
    """
    if kind in TABLES and schema is None:
        raise ConfigError(
            f"the topics have different columns: {kind.value} requires one topic, or topics with the same columns"
        )
    compression = files.compression_of(output)
    if compression and kind in {OutputFormat.ARROW, OutputFormat.PARQUET}:
        raise ConfigError(f"{output}: {kind.value} files cannot be compressed as a whole; remove the suffix")
    is_shown = output is None and on_terminal()
    show: Show = shown_bytes if is_shown else bytes
    with contextlib.ExitStack() as stack:
        stream = sys.stdout.buffer if output is None else stack.enter_context(_opened(output, compression))
        if kind is OutputFormat.ARROW:
            as_file = output is not None and output.suffix != ".arrows"
            yield stack.enter_context(contextlib.closing(_ArrowSink(stream, schema, as_file=as_file)))
        elif kind is OutputFormat.PARQUET:
            yield stack.enter_context(contextlib.closing(_ParquetSink(stream, schema)))
        elif kind is OutputFormat.CSV:
            yield _CsvSink(stream, schema, show, flushed=not compression)
        elif template is not None:
            yield _TemplateSink(stream, template, show, flushed=not compression)
        elif kind is OutputFormat.JSON:
            yield _JsonSink(stream, is_shown=is_shown, flushed=not compression)
        else:
            yield _TextSink(stream, show, keys=keys, flushed=not compression)
        if not compression:
            stream.flush()


@contextlib.contextmanager
def _opened(output: Path, compression: str | None) -> Iterator[BinaryIO]:
    with output.open("wb") as file:
        if compression == "gzip":
            with gzip.open(file, "wb") as packed:
                yield cast("BinaryIO", packed)
        elif compression == "zstd":
            with pa.CompressedOutputStream(file, "zstd") as stream:
                yield stream
        else:
            yield file


class _TextSink:
    """The output that writes one value per line."""

    def __init__(self, stream: BinaryIO, show: Show, *, keys: bool, flushed: bool) -> None:
        self._stream = stream
        self._show = show
        self._keys = keys
        self._flushed = flushed

    def write(self, batch: pa.RecordBatch) -> None:
        names = batch.schema.names
        if names[:4] == ["key", "value", "headers", "timestamp"]:
            chosen = ["key", "value"] if self._keys else ["value"]
        else:
            chosen = names
        columns = [
            [self._show(value or b"") for value in text_values(batch.column(names.index(name)))] for name in chosen
        ]
        self._stream.write(b"".join(b"\t".join(row) + b"\n" for row in zip(*columns, strict=True)))
        if self._flushed:
            self._stream.flush()


class _TemplateSink:
    """The output that writes the text of a template for each record."""

    def __init__(self, stream: BinaryIO, template: Template, show: Show, *, flushed: bool) -> None:
        self._stream = stream
        self._show = show
        self._template = template
        self._flushed = flushed

    def write(self, batch: pa.RecordBatch) -> None:
        self._stream.write(b"".join(self._template.render(batch, show=self._show)))
        if self._flushed:
            self._stream.flush()


class _JsonSink:
    """The output that writes one JSON object per line."""

    def __init__(self, stream: BinaryIO, *, is_shown: bool = False, flushed: bool = True) -> None:
        self._stream = stream
        self._is_shown = is_shown
        self._encoder = msgspec.json.Encoder()
        self._flushed = flushed

    def write(self, batch: pa.RecordBatch) -> None:
        names = batch.schema.names
        columns = [json_values(column) for column in batch.columns]
        rows = [dict(zip(names, row, strict=True)) for row in zip(*columns, strict=True)]
        lines = self._encoder.encode_lines(rows)
        self._stream.write(escaped_json(lines.decode()).encode() if self._is_shown else lines)
        if self._flushed:
            self._stream.flush()


class _CsvSink:
    """The output that writes a header line and one row per record. A null is an empty field; empty text is ``""``."""

    def __init__(self, stream: BinaryIO, schema: pa.Schema, show: Show, *, flushed: bool) -> None:
        self._stream = stream
        self._schema = schema
        self._show = show
        self._flushed = flushed
        self._stream.write(b",".join(show(_cell(name.encode())) for name in schema.names) + b"\n")

    def write(self, batch: pa.RecordBatch) -> None:
        _check(batch, self._schema)
        columns = [[self._show(_cell(value)) for value in csv_values(column)] for column in batch.columns]
        self._stream.write(b"".join(b",".join(row) + b"\n" for row in zip(*columns, strict=True)))
        if self._flushed:
            self._stream.flush()


def _cell(value: bytes | None) -> bytes:
    if value is None:
        return b""
    return value if value and not _SPECIAL.search(value) else b'"' + value.replace(b'"', b'""') + b'"'


class _ArrowSink:
    """The output that writes an Arrow file, or an Arrow stream if the output cannot seek."""

    def __init__(self, stream: BinaryIO, schema: pa.Schema, *, as_file: bool) -> None:
        self._schema = schema
        self._writer = (pa.ipc.new_file if as_file else pa.ipc.new_stream)(stream, schema)

    def write(self, batch: pa.RecordBatch) -> None:
        _check(batch, self._schema)
        self._writer.write_batch(batch.replace_schema_metadata(None))

    def close(self) -> None:
        self._writer.close()


class _ParquetSink:
    """The output that writes a Parquet file. Its row groups are larger than the received batches."""

    def __init__(self, stream: BinaryIO, schema: pa.Schema) -> None:
        self._schema = schema
        self._writer = pa.parquet.ParquetWriter(stream, schema)
        self._waiting: list[pa.RecordBatch] = []
        self._waiting_bytes = 0

    def write(self, batch: pa.RecordBatch) -> None:
        _check(batch, self._schema)
        self._waiting.append(batch.replace_schema_metadata(None))
        self._waiting_bytes += batch.nbytes
        if self._waiting_bytes >= _GROUP_BYTES or sum(found.num_rows for found in self._waiting) >= _GROUP_ROWS:
            self._write_group()

    def close(self) -> None:
        if self._waiting:
            self._write_group()
        self._writer.close()

    def _write_group(self) -> None:
        table = pa.Table.from_batches(self._waiting, self._schema)
        self._waiting, self._waiting_bytes = [], 0
        try:
            self._writer.write_table(table, row_group_size=_GROUP_ROWS)
        except pa.ArrowException as error:  # for example, seconds outside the range of Parquet's milliseconds
            raise ConfigError(f"Parquet: {str(error).partition(chr(10))[0]}; use another format") from None


def _check(batch: pa.RecordBatch, schema: Any) -> None:
    if not batch.schema.equals(schema):
        new = [name for name in batch.schema.names if name not in schema.names]
        raise ConfigError(f"columns {new} were added to the topic after this output began: run the command again")
