"""What records look like on their way out: text, lines by a template, JSON, Arrow."""

from __future__ import annotations

import base64
import contextlib
import datetime as dt
import sys
from collections.abc import Iterator
from enum import Enum
from pathlib import Path
from typing import Any, BinaryIO, Protocol

import msgspec
import pyarrow as pa
from pyarrow import types

from sparklog.cli.template import Template
from sparklog.errors import ConfigError


class Format(str, Enum):
    """Formats of output."""

    TEXT = "text"
    JSON = "json"
    ARROW = "arrow"


class Sink(Protocol):
    def write(self, batch: pa.RecordBatch) -> None: ...


@contextlib.contextmanager
def open_sink(kind: Format, output: Path | None, *, keys: bool, template: Template | None) -> Iterator[Sink]:
    stream: BinaryIO
    with contextlib.ExitStack() as stack:
        stream = sys.stdout.buffer if output is None else stack.enter_context(output.open("wb"))
        if kind is Format.ARROW:
            arrow = _ArrowSink(stream, as_file=output is not None)
            stack.callback(arrow.close)
            yield arrow
        elif template is not None:
            yield _TemplateSink(stream, template)
        else:
            yield _JsonSink(stream) if kind is Format.JSON else _TextSink(stream, keys=keys)
        stream.flush()


class _TextSink:
    """Values line by line."""

    def __init__(self, stream: BinaryIO, *, keys: bool) -> None:
        self._stream = stream
        self._keys = keys

    def write(self, batch: pa.RecordBatch) -> None:
        names = batch.schema.names
        if names[:4] == ["key", "value", "headers", "timestamp"]:
            chosen = ["key", "value"] if self._keys else ["value"]
        else:
            chosen = names
        columns = [[_text(value) for value in batch.column(names.index(name)).to_pylist()] for name in chosen]
        for row in zip(*columns, strict=True):
            self._stream.write(b"\t".join(row) + b"\n")
        self._stream.flush()


class _TemplateSink:
    """A template's text for each record."""

    def __init__(self, stream: BinaryIO, template: Template) -> None:
        self._stream = stream
        self._template = template

    def write(self, batch: pa.RecordBatch) -> None:
        self._stream.writelines(self._template.render(batch))
        self._stream.flush()


class _JsonSink:
    """One object a line."""

    def __init__(self, stream: BinaryIO) -> None:
        self._stream = stream
        self._encoder = msgspec.json.Encoder(enc_hook=str)

    def write(self, batch: pa.RecordBatch) -> None:
        rows = batch.to_pylist()
        for name in (field.name for field in batch.schema if _has_bytes(field.type)):
            for row in rows:
                row[name] = _readable(row[name])
        self._stream.write(self._encoder.encode_lines(rows))
        self._stream.flush()


class _ArrowSink:
    """An Arrow file, or a stream where there is no going back."""

    def __init__(self, stream: BinaryIO, *, as_file: bool) -> None:
        self._stream = stream
        self._as_file = as_file
        self._writer: pa.RecordBatchFileWriter | pa.RecordBatchStreamWriter | None = None
        self._schema: pa.Schema | None = None

    def write(self, batch: pa.RecordBatch) -> None:
        batch = batch.replace_schema_metadata(None)
        if self._writer is None:
            make = pa.ipc.new_file if self._as_file else pa.ipc.new_stream
            self._schema = batch.schema
            self._writer = make(self._stream, batch.schema)
        if not batch.schema.equals(self._schema):
            raise ConfigError("the records have different columns: an Arrow file takes one topic and schema")
        self._writer.write_batch(batch)

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()


def _has_bytes(kind: pa.DataType) -> bool:
    if types.is_binary(kind) or types.is_large_binary(kind) or types.is_fixed_size_binary(kind):
        return True
    return any(_has_bytes(kind.field(index).type) for index in range(kind.num_fields)) if kind.num_fields else False


def _readable(value: Any) -> Any:
    if isinstance(value, bytes):
        try:
            return value.decode()
        except UnicodeDecodeError:
            return base64.b64encode(value).decode()
    if isinstance(value, list):
        return [_readable(item) for item in value]
    if isinstance(value, dict):
        return {name: _readable(item) for name, item in value.items()}
    return value


def _text(value: Any) -> bytes:
    if isinstance(value, bytes):
        return value
    if value is None:
        return b""
    if isinstance(value, dt.datetime):
        return value.isoformat().encode()
    return str(value).encode()
