"""``sparklog produce``: write files or standard input to a topic."""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Annotated

import pyarrow as pa
import typer

from sparklog.cli.files import InputFormat, format_of, open_input
from sparklog.cli.options import AsJson, Bootstrap, Timeout, Topic, open_admin, servers
from sparklog.cli.output import note, print_json
from sparklog.cli.progress import Bar, bar
from sparklog.client.producer.producer import Producer
from sparklog.client.producer.results import WriteResult
from sparklog.errors import ConfigError
from sparklog.record.schema import DEFAULT_SCHEMA

#: The maximum number of unacknowledged tables. The producer's buffer limits their bytes.
_MAX_OPEN = 256


def produce(
    topic: Topic,
    file: Annotated[
        Path | None,
        typer.Argument(metavar="[FILE]", show_default=False, help="Input file; default and '-': standard input."),
    ] = None,
    *,
    kind: Annotated[
        InputFormat | None,
        typer.Option("--format", "-f", help="Default: derived from the file's name, otherwise lines."),
    ] = None,
    key_separator: Annotated[
        str | None,
        typer.Option(
            "--key-separator", "-K", metavar="TEXT", help="Separator of key and value in lines; \\t is a tab."
        ),
    ] = None,
    partition: Annotated[int | None, typer.Option("--partition", help="Write all records to this partition.")] = None,
    acks: Annotated[
        str, typer.Option(help="Required acknowledgements: all in-sync replicas, 1 (leader only), 0.")
    ] = "all",
    compression: Annotated[str | None, typer.Option(help="lz4 or zstd. Default: none.")] = None,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Print no progress and no summary.")] = False,
    bootstrap: Bootstrap = None,
    timeout: Timeout = 120.0,
    as_json: AsJson = False,
) -> None:
    """Write records to a topic: lines, JSON lines, CSV, or a Parquet or Arrow file. With --format whole, the whole
    input is one record. Columns are matched by name.

    --timeout limits the wait for each record's acknowledgement. --json prints a summary of the written records.

    Example: sparklog produce flights flights.parquet
    """
    path = None if file is None or str(file) == "-" else file
    kind = kind or format_of(path)
    started = time.monotonic()
    with open_admin(bootstrap, timeout) as admin:
        schema = admin.describe_topic(topic).schema
    if kind in {InputFormat.LINES, InputFormat.WHOLE} and not schema.equals(DEFAULT_SCHEMA):
        raise ConfigError(
            f"topic {topic!r} has columns {schema.names}: it does not accept lines; pass --format json or csv"
        )
    if key_separator is not None and kind not in {InputFormat.LINES, InputFormat.WHOLE}:
        raise ConfigError("--key-separator requires --format lines or whole")
    separator = key_separator.replace("\\t", "\t") if key_separator else None
    with (
        open_input(path, kind, schema=schema, separator=separator) as source,
        # A progress bar would disturb a user who types lines.
        bar(topic, source.total_rows, hidden=quiet or (path is None and sys.stdin.isatty())) as progress,
        Producer(servers(bootstrap), acks=acks, compression=compression, delivery_timeout_s=timeout) as producer,
    ):
        count = _write_all(producer, topic, source.tables, partition=partition, progress=progress)
    seconds = time.monotonic() - started
    if as_json:
        print_json({"topic": topic, "records": count, "seconds": round(seconds, 3)})
    elif not quiet:
        note(f"{count:,} records written to {topic} in {seconds:.1f} s ({count / max(seconds, 1e-6):,.0f}/s)")


def _write_all(
    producer: Producer, topic: str, tables: Iterator[pa.Table], *, partition: int | None, progress: Bar
) -> int:
    """Send all tables and return the number of acknowledged records. Stop at the first failure."""
    open_writes: deque[Future[WriteResult]] = deque()
    count = 0
    for table in tables:
        if table.num_rows:
            open_writes.append(producer.write(topic, table, partition=partition))
        while open_writes and (open_writes[0].done() or len(open_writes) > _MAX_OPEN):
            count += open_writes.popleft().result().record_count
            progress.show(count)
    for writing in open_writes:
        count += writing.result().record_count
        progress.show(count)
    return count
