"""``sparklog consume``: print records of topics to the terminal, or write them to a pipe or a file."""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from enum import Enum
from pathlib import Path
from typing import Annotated, Any

import pyarrow as pa
import typer

from sparklog.cli import options
from sparklog.cli.newest_columns import NewestColumns
from sparklog.cli.options import TIMES, Bootstrap, Timeout, Topics, open_admin, point_in_time, servers
from sparklog.cli.progress import bar
from sparklog.cli.sinks import OutputFormat, format_of, open_sink
from sparklog.cli.template import Template
from sparklog.client.consumer.consumer import Consumer
from sparklog.client.consumer.origin import origin
from sparklog.client.errors import ClientTimeout
from sparklog.errors import BrokerError, ConfigError, ErrorCode
from sparklog.model import TopicPartition


class Level(str, Enum):
    """The isolation level of a consumer."""

    COMMITTED = "read_committed"
    UNCOMMITTED = "read_uncommitted"


def consume(
    topics: Topics,
    *,
    start: Annotated[
        str,
        typer.Option(
            "--from",
            metavar="WHERE",
            help="earliest, latest, an offset, -N (N records before the end), a time (2026-01-31T12:00), an age (-1h).",
        ),
    ] = "earliest",
    until: Annotated[
        str | None, typer.Option("--until", metavar="TIME", help="Stop before the first record at or after this time.")
    ] = None,
    partition: Annotated[
        list[int] | None, typer.Option("--partition", help="Read only this partition; repeatable.")
    ] = None,
    count: Annotated[
        int | None, typer.Option("--count", "-n", min=0, help="Stop after this number of records.")
    ] = None,
    follow: Annotated[
        bool,
        typer.Option("--follow/--exit", " /-e", help="Wait for new records, or stop at the current end of the topics."),
    ] = False,
    kind: Annotated[
        OutputFormat | None,
        typer.Option("--format", "-f", help="Default: derived from the name of --output, otherwise text."),
    ] = None,
    template: Annotated[
        str | None,
        typer.Option(
            "--template",
            "-t",
            metavar="TEXT",
            help="Format string as in kcat: %t %p %o %k %s %T %h %K %S %{column} %% \\n \\t.",
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Same as --format json.")] = False,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", metavar="FILE", help="Write to this file instead of stdout.")
    ] = None,
    keys: Annotated[bool, typer.Option("--keys", help="With text, print the key and a tab before each value.")] = False,
    places: Annotated[bool, typer.Option("--places", help="Add topic, partition and offset to each record.")] = False,
    isolation: Annotated[
        Level,
        typer.Option(
            "--isolation", help="Read only committed records, or also those of open and aborted transactions."
        ),
    ] = Level.COMMITTED,
    bootstrap: Bootstrap = None,
    timeout: Timeout = 30.0,
) -> None:
    """Read records up to the current end of the topics.

    --from and --until take a record time, or an age: -90s, -15m, -1h, -7d. --from -100 starts 100 records before the
    end of each partition. Text prints values; typed topics print their columns separated by tabs. JSON prints one
    object per line. Arrow writes a file, or a stream to standard output. The produce command can write JSON, CSV,
    Arrow and Parquet output to a topic with the same schema. A column is null in records written before it was added.
    Text, JSON and CSV are compressed if the file name ends with .gz or .zst. --timeout limits the wait for the next
    record.

    Example: sparklog consume flights --from earliest --count 10 --format json
    """
    if follow and until is not None:
        raise ConfigError("--until and --follow exclude each other")
    kind = _format(kind, output, as_json=as_json, template=template)
    wanted: Any = topics
    if partition:
        wanted = [TopicPartition(topic, number) for topic in topics for number in partition]
    watched = follow or (output is None and sys.stdout.isatty())
    places = places or template is not None
    with _consumer(
        servers(bootstrap), wanted, start=start, places=places, isolation=isolation, timeout_s=timeout
    ) as consumer:
        starts = {
            tp: consumer.position(tp) for tp in consumer.assignment
        }  # the start offsets are read before the end offsets, which may grow
        ends = None if follow else consumer.end_offsets()
        if ends is not None and until is not None:
            ends = _first_of(servers(bootstrap), ends, until, isolation=isolation, timeout_s=timeout)
        total = None if ends is None else sum(max(0, end - starts[tp]) for tp, end in ends.items())
        # The schemas are read after the end offsets, so that they have every column of the records below these offsets.
        newest = NewestColumns(topics, _schema_of(bootstrap, timeout), places=places)
        with (
            open_sink(
                kind, output, schema=newest.common, keys=keys, template=Template(template) if template else None
            ) as sink,
            bar("reading", total if count is None else min(total or count, count), hidden=watched) as progress,
        ):
            read = 0
            for batch in _batches(consumer, starts, ends, count, timeout_s=timeout):
                sink.write(newest.fit(batch))
                read += batch.num_rows
                progress.show(read)


def _schema_of(bootstrap: str | None, timeout_s: float) -> Callable[[str], pa.Schema]:
    def ask(topic: str) -> pa.Schema:
        with open_admin(bootstrap, timeout_s) as admin:
            return admin.describe_topic(topic).schema

    return ask


def _format(kind: OutputFormat | None, output: Path | None, *, as_json: bool, template: str | None) -> OutputFormat:
    if template is not None and (as_json or kind not in {None, OutputFormat.TEXT}):
        raise ConfigError("--template requires --format text")
    if as_json:
        if kind not in {None, OutputFormat.JSON}:
            raise ConfigError(f"--json and --format {kind.value if kind else ''} exclude each other")
        return OutputFormat.JSON
    if kind is None:
        return OutputFormat.TEXT if template is not None else format_of(output)
    if kind in {OutputFormat.ARROW, OutputFormat.PARQUET} and output is None and sys.stdout.isatty():
        raise ConfigError(f"{kind.value} cannot be written to a terminal; pass --output or pipe the output")
    return kind


def _consumer(bootstrap: str, wanted: Any, *, start: str, places: bool, isolation: Level, timeout_s: float) -> Consumer:
    number = int(start) if re.fullmatch(r"-?[0-9]+", start, re.ASCII) else None
    place: Any = start if start in {"earliest", "latest"} or number is not None else point_in_time(start)
    if place is None:
        raise ConfigError(
            f"--from {start!r}: expected earliest, latest, an offset, -N for N records before the end, {TIMES}"
        )
    try:
        consumer = Consumer(
            bootstrap,
            wanted,
            start="earliest" if number is not None else place,
            log_columns=places,
            isolation=isolation.value,
            timeout_s=timeout_s,
            first_contact_s=options.FIRST_CONTACT_S,
        )
    except BrokerError as error:
        if error.code == ErrorCode.UNKNOWN_TOPIC_OR_PARTITION:
            with open_admin(bootstrap, timeout_s):
                raise  # ``open_admin`` adds the name of a similar topic to the error
        raise
    if number is not None:
        _seek(consumer, number)
    return consumer


def _seek(consumer: Consumer, number: int) -> None:
    """Seek to an offset.

    A negative number counts back from the end of each partition, at most to the start of the partition.
    """
    ends = consumer.end_offsets() if number < 0 else {}
    for tp in consumer.assignment:
        consumer.seek(tp, number if number >= 0 else max(consumer.position(tp), ends[tp] + number))


def _first_of(
    bootstrap: str, ends: Mapping[TopicPartition, int], until: str, *, isolation: Level, timeout_s: float
) -> dict[TopicPartition, int]:
    """Return the offset of each partition's first record at or after ``until``, or its end if there is none.

    Raises:
        ConfigError: ``until`` is not a time.
        ClientTimeout: the first record at or after ``until`` was not found in time.
    """
    at = point_in_time(until)
    if at is None:
        raise ConfigError(f"--until {until!r}: expected {TIMES}")
    # Brokers resolve a time only to a batch. A consumer that starts at the time finds the record in the batch.
    found: dict[TopicPartition, int] = {}
    with Consumer(bootstrap, list(ends), start=at, isolation=isolation.value, timeout_s=timeout_s) as ahead:
        deadline = time.monotonic() + timeout_s
        while any(tp not in found and ahead.position(tp) < end for tp, end in ends.items()):
            if time.monotonic() > deadline:
                raise ClientTimeout(f"the offsets of {until} were not found within {timeout_s:g} s")
            for batch in ahead.poll(1.0):
                place = origin(batch)
                found.setdefault(TopicPartition(place.topic, place.partition), place.offset)
    return {tp: min(end, found.get(tp, end)) for tp, end in ends.items()}


def _batches(
    consumer: Consumer,
    starts: Mapping[TopicPartition, int],
    ends: Mapping[TopicPartition, int] | None,
    count: int | None,
    *,
    timeout_s: float,
) -> Iterator[pa.RecordBatch]:
    """Yield batches up to the offsets ``ends``, or forever if ``ends`` is None.

    The batches have at most ``count`` records together.
    """
    left = count
    for tp, end in (ends or {}).items():
        if starts[tp] > end and starts[tp] > (now := consumer.end_offsets()[tp]):
            # The consumer would send no fetch for this partition, so no broker could report the error.
            raise BrokerError(
                ErrorCode.OFFSET_OUT_OF_RANGE, f"{tp}: offset {starts[tp]} is beyond the log end offset {now}"
            )
    waited_s = 0.0
    while left is None or left > 0:
        if ends is not None and all(consumer.position(tp) >= end for tp, end in ends.items()):
            return
        found = consumer.poll(1.0)
        waited_s = 0.0 if found or ends is None else waited_s + 1.0
        if waited_s > timeout_s:
            raise ClientTimeout(f"received no records for {timeout_s:g} s before reaching the end")
        for batch in found:
            if ends is not None:
                batch = _up_to(batch, ends)
            if left is not None:
                batch = batch.slice(0, left)
                left -= batch.num_rows
            if batch.num_rows:
                yield batch


def _up_to(batch: pa.RecordBatch, ends: Mapping[TopicPartition, int]) -> pa.RecordBatch:
    """Return ``batch`` without the records at or after its partition's offset in ``ends``."""
    place = origin(batch)
    end = ends[TopicPartition(place.topic, place.partition)]
    return batch.slice(0, max(0, end - place.offset))
