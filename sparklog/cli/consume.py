"""``sparklog consume``: records of topics to the terminal, a pipe or a file."""

from __future__ import annotations

import base64
import contextlib
import datetime as dt
import sys
from collections.abc import Iterator
from enum import Enum
from pathlib import Path
from typing import Annotated, Any, BinaryIO, Protocol

import msgspec
import pyarrow as pa
import typer
from pyarrow import types

from sparklog.cli.options import FIRST_CONTACT_S, Bootstrap, Timeout, moment, servers
from sparklog.client.consumer import Consumer
from sparklog.client.errors import ClientTimeout
from sparklog.client.origin import origin
from sparklog.errors import BrokerError, ConfigError, ErrorCode
from sparklog.model import TopicPartition


class Level(str, Enum):
    """What is seen of transactions."""

    COMMITTED = "read_committed"
    UNCOMMITTED = "read_uncommitted"


class Format(str, Enum):
    """Formats of output."""

    TEXT = "text"
    JSON = "json"
    ARROW = "arrow"


def consume(
    topics: Annotated[list[str], typer.Argument(metavar="TOPIC...", show_default=False)],
    *,
    start: Annotated[
        str, typer.Option("--from", metavar="WHERE", help="earliest, latest, an offset, or a time (2026-01-31T12:00).")
    ] = "earliest",
    partition: Annotated[list[int] | None, typer.Option("--partition", help="Only this one; repeatable.")] = None,
    count: Annotated[int | None, typer.Option("--count", "-n", min=0, help="Stop after so many records.")] = None,
    follow: Annotated[bool, typer.Option("--follow", help="Wait for records to come, instead of ending.")] = False,
    kind: Annotated[
        Format | None, typer.Option("--format", "-f", help="Default: text; arrow where --output says so.")
    ] = None,
    output: Annotated[Path | None, typer.Option("--output", "-o", metavar="FILE", help="Not to stdout.")] = None,
    keys: Annotated[bool, typer.Option("--keys", help="Text: the key and a tab before each value.")] = False,
    places: Annotated[bool, typer.Option("--places", help="JSON and Arrow: topic, partition and offset too.")] = False,
    isolation: Annotated[
        Level,
        typer.Option("--isolation", help="Only committed records, or also those of open and aborted transactions."),
    ] = Level.COMMITTED,
    bootstrap: Bootstrap = None,
    timeout: Timeout = 30.0,
) -> None:
    """Read records, up to where the topics end now.

    Text prints values, of typed topics the columns with tabs between. JSON prints one object a line; bytes that are no
    UTF-8 are base64. Arrow writes a file, or a stream to standard output. --timeout is for the next record to come.

    Example: sparklog consume flights --from earliest --count 10 --format json
    """
    kind = kind or (Format.ARROW if output is not None and output.suffix == ".arrow" else Format.TEXT)
    if kind is Format.ARROW and output is None and sys.stdout.isatty():
        raise ConfigError("Arrow to a terminal: give --output, or pipe it somewhere")
    wanted: Any = topics
    if partition:
        wanted = [TopicPartition(topic, number) for topic in topics for number in partition]
    with (
        _consumer(
            servers(bootstrap), wanted, start=start, places=places, isolation=isolation, timeout_s=timeout
        ) as consumer,
        _sink(kind, output, keys=keys) as sink,
    ):
        for batch in _batches(consumer, count, follow=follow, timeout_s=timeout):
            sink.write(batch)


def _consumer(bootstrap: str, wanted: Any, *, start: str, places: bool, isolation: Level, timeout_s: float) -> Consumer:
    offset = int(start) if start.isascii() and start.isdigit() else None
    place: Any = start if start in {"earliest", "latest"} or offset is not None else moment(start)
    if place is None:
        raise ConfigError(f"--from {start!r}: expected earliest, latest, an offset, or a time like 2026-01-31T12:00")
    consumer = Consumer(
        bootstrap,
        wanted,
        start="earliest" if offset is not None else place,
        log_columns=places,
        isolation=isolation.value,
        timeout_s=timeout_s,
        first_contact_s=FIRST_CONTACT_S,
    )
    if offset is not None:
        for tp in consumer.assignment:
            consumer.seek(tp, offset)
    return consumer


def _batches(consumer: Consumer, count: int | None, *, follow: bool, timeout_s: float) -> Iterator[pa.RecordBatch]:
    """Batches up to the ends there are now, or for ever; at most ``count`` records."""
    left = count
    starts = {tp: consumer.position(tp) for tp in consumer.assignment}  # before the ends, which may move on
    ends = None if follow else consumer.end_offsets()
    for tp, end in (ends or {}).items():
        if starts[tp] > end:
            # Nothing would be fetched from there, so no broker could say so.
            raise BrokerError(ErrorCode.OFFSET_OUT_OF_RANGE, f"{tp}: offset {starts[tp]} found, its end is {end}")
    waited_s = 0.0
    while left is None or left > 0:
        if ends is not None and all(consumer.position(tp) >= end for tp, end in ends.items()):
            return
        found = consumer.poll(1.0)
        waited_s = 0.0 if found or follow else waited_s + 1.0
        if waited_s > timeout_s:
            raise ClientTimeout(f"no records for {timeout_s:g} s before the end was reached")
        for batch in found:
            if ends is not None:
                batch = _up_to(batch, ends)
            if left is not None:
                batch = batch.slice(0, left)
                left -= batch.num_rows
            if batch.num_rows:
                yield batch


def _up_to(batch: pa.RecordBatch, ends: dict[TopicPartition, int]) -> pa.RecordBatch:
    """Without what has been written since the start."""
    place = origin(batch)
    end = ends[TopicPartition(place.topic, place.partition)]
    return batch.slice(0, max(0, end - place.offset))


class _Sink(Protocol):
    def write(self, batch: pa.RecordBatch) -> None: ...


@contextlib.contextmanager
def _sink(kind: Format, output: Path | None, *, keys: bool) -> Iterator[_Sink]:
    stream: BinaryIO
    with contextlib.ExitStack() as stack:
        stream = sys.stdout.buffer if output is None else stack.enter_context(output.open("wb"))
        if kind is Format.ARROW:
            arrow = _ArrowSink(stream, as_file=output is not None)
            stack.callback(arrow.close)
            yield arrow
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
