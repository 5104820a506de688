"""``sparklog perf``: measure write throughput, read throughput and latency of a cluster."""

from __future__ import annotations

import itertools
import time
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Annotated, Any

import numpy as np
import pyarrow as pa
import typer

from sparklog.cli import options
from sparklog.cli.options import AsJson, Bootstrap, Timeout, Topic, byte_count, open_admin, servers
from sparklog.cli.output import human_bytes, print_json, print_line
from sparklog.cli.progress import bar
from sparklog.client.consumer.consumer import Consumer
from sparklog.client.errors import ClientTimeout
from sparklog.client.producer.producer import Producer
from sparklog.errors import ConfigError
from sparklog.model import TopicPartition
from sparklog.record.schema import DEFAULT_SCHEMA

perf = typer.Typer(help="Measure a cluster: writes, reads, latency.", no_args_is_help=True)

Acks = Annotated[str, typer.Option(help="Required acknowledgements: all in-sync replicas, 1 (leader only), 0.")]
Size = Annotated[str, typer.Option("--size", metavar="BYTES", help="Size of each value, such as 100 or 1kB.")]

#: The number of distinct values, which are used in turn. The values do not fit into a CPU cache, and are
#: generated in advance.
_VARIETY = 4096
_MAX_OPEN = 64


@perf.command("produce")
def produce(
    topic: Topic,
    *,
    records: Annotated[int, typer.Option("--records", "-n", min=1, help="Number of records.")] = 100_000,
    size: Size = "100",
    rate: Annotated[int, typer.Option("--rate", min=0, metavar="N", help="Records per second; 0: no limit.")] = 0,
    table: Annotated[int, typer.Option("--table", min=1, metavar="ROWS", help="Records per send call.")] = 1000,
    acks: Acks = "all",
    compression: Annotated[str | None, typer.Option(help="lz4 or zstd. Default: none.")] = None,
    bootstrap: Bootstrap = None,
    timeout: Timeout = 120.0,
    as_json: AsJson = False,
) -> None:
    """Write random records, and report throughput and acknowledgement latency. The records stay in the topic: use a
    topic created for this purpose.

    Example: sparklog perf produce bench --records 100000 --size 1kB
    """
    _check_columns(topic, bootstrap, timeout)
    value_bytes = byte_count(size, what="--size")
    tables = _tables(records, min(table, records), value_bytes)
    latencies: list[float] = []
    with (
        Producer(servers(bootstrap), acks=acks, compression=compression, delivery_timeout_s=timeout) as producer,
        bar(topic, records) as progress,
    ):
        began = time.perf_counter()
        waiting: deque[Any] = deque()
        sent = done = 0
        for piece in tables:
            if rate:
                time.sleep(max(0.0, began + sent / rate - time.perf_counter()))
            at = time.perf_counter()
            writing = producer.write(topic, piece)
            writing.add_done_callback(lambda _, at=at: latencies.append(time.perf_counter() - at))  # type: ignore[misc]
            waiting.append(writing)
            sent += piece.num_rows
            while waiting and (waiting[0].done() or len(waiting) > _MAX_OPEN):
                done += waiting.popleft().result().record_count
                progress.show(done)
        for writing in waiting:
            done += writing.result().record_count
            progress.show(done)
        seconds = time.perf_counter() - began
    _print_result({**_throughput(done, done * value_bytes, seconds), "ack_ms": _spread(latencies)}, as_json=as_json)


@perf.command("consume")
def consume(
    topic: Topic,
    *,
    records: Annotated[
        int | None, typer.Option("--records", "-n", min=1, help="Number of records; default: all.")
    ] = None,
    bootstrap: Bootstrap = None,
    timeout: Timeout = 30.0,
    as_json: AsJson = False,
) -> None:
    """Read a topic from its start to its current end, and report records and bytes per second.

    Example: sparklog perf consume bench
    """
    with open_admin(bootstrap, timeout) as admin:
        admin.describe_topic(topic)
    with Consumer(servers(bootstrap), topic, timeout_s=timeout, first_contact_s=options.FIRST_CONTACT_S) as consumer:
        ends = consumer.end_offsets()
        there = sum(end - consumer.position(tp) for tp, end in ends.items())
        count = size = 0
        first_s: float | None = None
        with bar(topic, min(there, records or there)) as progress:
            began = heard = time.perf_counter()
            while count < (records or there) and any(consumer.position(tp) < end for tp, end in ends.items()):
                found = consumer.poll(1.0)
                now = time.perf_counter()
                if found:
                    heard = now
                    first_s = now - began if first_s is None else first_s
                elif now - heard > timeout:
                    raise ClientTimeout(f"received no records for {timeout:g} s before reaching the end")
                count += sum(batch.num_rows for batch in found)
                size += sum(batch.nbytes for batch in found)
                progress.show(count)
            seconds = time.perf_counter() - began
    first_ms = None if first_s is None else round(first_s * 1000, 3)
    _print_result({**_throughput(count, size, seconds), "first_record_ms": first_ms}, as_json=as_json)


@perf.command("latency")
def latency(
    topic: Topic,
    *,
    records: Annotated[
        int, typer.Option("--records", "-n", min=1, help="Number of records, sent one after the other.")
    ] = 1000,
    size: Size = "100",
    partition: Annotated[int, typer.Option("--partition", min=0, help="Partition to write to and read from.")] = 0,
    acks: Acks = "all",
    bootstrap: Bootstrap = None,
    timeout: Timeout = 30.0,
    as_json: AsJson = False,
) -> None:
    """Send one record at a time, and report the time until it was acknowledged and until a consumer received it.

    Example: sparklog perf latency bench --records 1000
    """
    _check_columns(topic, bootstrap, timeout)
    place = TopicPartition(topic, partition)
    (value,) = _values(1, byte_count(size, what="--size"))
    acked: list[float] = []
    seen: list[float] = []
    with (
        Consumer(servers(bootstrap), [place], start="latest", timeout_s=timeout) as consumer,
        Producer(servers(bootstrap), acks=acks, linger_ms=0, delivery_timeout_s=timeout) as producer,
        bar(topic, records) as progress,
    ):
        for number in range(records):
            key = b"%d" % number
            at = time.perf_counter()
            sending = producer.send(topic, value, key=key, partition=partition)
            sending.add_done_callback(lambda _, at=at: acked.append(time.perf_counter() - at))  # type: ignore[misc]
            _await(consumer, key, value, timeout)
            seen.append(time.perf_counter() - at)
            sending.result()
            progress.show(number + 1)
    _print_result({"records": records, "ack_ms": _spread(acked), "end_to_end_ms": _spread(seen)}, as_json=as_json)


def _await(consumer: Consumer, key: bytes, value: bytes, timeout_s: float) -> None:
    """Read until the record with this key and value arrives, and ignore other records. Raises ClientTimeout."""
    deadline = time.perf_counter() + timeout_s
    while time.perf_counter() < deadline:
        for batch in consumer.poll(min(1.0, timeout_s)):
            if key in batch.column("key").to_pylist() and value in batch.column("value").to_pylist():
                return
    raise ClientTimeout(f"the record was not received within {timeout_s:g} s")


def _check_columns(topic: str, bootstrap: str | None, timeout_s: float) -> None:
    with open_admin(bootstrap, timeout_s) as admin:
        schema = admin.describe_topic(topic).schema
    if not schema.equals(DEFAULT_SCHEMA):
        raise ConfigError(f"topic {topic!r} has columns {schema.names}: expected a topic with key and value")


def _values(count: int, size: int) -> list[bytes]:
    """Return random values of printable characters, which compress no better than any random text."""
    letters = np.frombuffer(b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_", np.uint8)
    drawn = letters[np.random.default_rng(7).integers(0, len(letters), (count, size))]
    return [row.tobytes() for row in drawn]


def _tables(records: int, rows: int, size: int) -> Iterator[pa.Table]:
    kinds = [
        pa.table({"value": pa.array(_values(rows, size), pa.binary())}) for _ in range(max(1, min(8, _VARIETY // rows)))
    ]
    left = records
    for table in itertools.cycle(kinds):
        if left <= 0:
            return
        yield table.slice(0, left)
        left -= rows


def _throughput(records: int, size: int, seconds: float) -> dict[str, Any]:
    return {
        "records": records,
        "bytes": size,
        "seconds": round(seconds, 3),
        "records_per_s": round(records / max(seconds, 1e-9)),
        "bytes_per_s": round(size / max(seconds, 1e-9)),
    }


def _spread(seconds: Sequence[float]) -> dict[str, float]:
    """Return percentiles in milliseconds; empty if ``seconds`` is empty."""
    if not seconds:
        return {}
    in_ms = np.array(seconds) * 1000
    cuts = {"p50": 50, "p95": 95, "p99": 99, "p99.9": 99.9}
    found = {name: round(float(np.percentile(in_ms, cut)), 3) for name, cut in cuts.items()}
    return {**found, "max": round(float(in_ms.max()), 3)}


def _print_result(found: dict[str, Any], *, as_json: bool) -> None:
    if as_json:
        print_json(found)
        return
    for name, value in found.items():
        if isinstance(value, dict):
            print_line(f"{name:<16} {'  '.join(f'{cut} {amount:g}' for cut, amount in value.items()) or '-'}")
        elif name.startswith("bytes"):
            print_line(f"{name:<16} {human_bytes(value)}")
        else:
            print_line(f"{name:<16} {'-' if value is None else f'{value:,}'}")
