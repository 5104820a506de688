"""The benefit of compression: flights as JSON and as typed columns, uncompressed, with lz4 and with zstd, from Python.

For each GB of uncompressed data, the row has the saving (bytes on the disks, equal to the bytes on the network) and the
cost (processor time of client and brokers).
"""

from __future__ import annotations

import functools
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from bench.machine import CpuTime
from bench.measure import Contestant, Figures, Lost, Ratio, Row
from bench.rows.produce import PARTITIONS
from bench.sides import Bench, Kafka
from sparklog import Consumer, Producer
from sparklog.demo.flights import load_flights

_RECORDS = 1_000_000
_BATCH_ROWS = 100_000
CODECS = ("none", "lz4", "zstd")
JSON, TYPED = "JSON of flights", "typed flights"
#: By column: the number of rows that are not null, and the sum of the numbers or of the text's bytes.
Sums = Mapping[str, tuple[int, int]]


class Records(NamedTuple):
    """The records to write, of one kind."""

    kind: str
    pieces: Sequence[pa.Table]
    #: None: the values of a default topic.
    schema: pa.Schema | None
    sums: Sums

    @property
    def rows(self) -> int:
        return sum(piece.num_rows for piece in self.pieces)

    @property
    def volume(self) -> int:
        """Return the bytes of the columns."""
        return sum(piece.nbytes for piece in self.pieces)


def records(kind: str, table: pa.Table, schema: pa.Schema | None) -> Records:
    starts = range(0, table.num_rows, _BATCH_ROWS)
    return Records(kind, [table.slice(start, _BATCH_ROWS) for start in starts], schema, sums(table))


def sums(table: pa.Table) -> Sums:
    return {name: _sums(table.column(name)) for name in table.column_names}


def _sums(column: pa.ChunkedArray) -> tuple[int, int]:
    there = len(column) - column.null_count
    kind = column.type
    if pa.types.is_binary(kind) or pa.types.is_string(kind):
        return there, sum(_bytes_of(chunk) for chunk in column.chunks)
    if pa.types.is_timestamp(kind):
        column = column.cast(pa.int64())
    return there, int(pc.sum(column).as_py() or 0)


def _bytes_of(chunk: pa.Array) -> int:
    _, offsets, values = chunk.buffers()
    if values is None or not len(chunk):
        return 0
    at = np.frombuffer(offsets, dtype=np.int32)
    first, last = at[chunk.offset], at[chunk.offset + len(chunk)]
    return int(np.frombuffer(values, dtype=np.uint8)[first:last].sum(dtype=np.int64))


def as_json(table: pa.Table) -> list[bytes]:
    """Return one JSON object for each row, without nulls."""
    rows = table.set_column(
        table.schema.get_field_index("time_hour"), "time_hour", table.column("time_hour").cast(pa.string())
    ).to_pylist()
    return [
        json.dumps({name: value for name, value in row.items() if value is not None}, separators=(",", ":")).encode()
        for row in rows
    ]


def one_run(bench: Bench, data: Records, codec: str) -> Figures:
    """Write the records to a new topic and read them back. Raises Lost."""
    options = {} if data.schema is None else {"schema": data.schema}
    with bench.topic(bench.ours, partitions=PARTITIONS, **options) as topic:
        with CpuTime(bench.ours.pids()) as brokers, _Took() as writing, _producer(bench, codec) as producer:
            for piece in data.pieces:
                producer.write(topic, piece)
            producer.flush()
        disk = bench.ours.disk_bytes(topic)
        with _Took() as reading, Consumer(bench.ours.bootstrap, topic, columns=list(data.sums)) as consumer:
            found = consumer.to_table()
        _check(found, data)
    gb = data.volume / 1e9
    return {
        "write": data.rows / writing.wall_s,
        "read": data.rows / reading.wall_s,
        "disk": disk / data.volume,
        "cpu": (brokers.seconds + writing.cpu_s) / gb,
        "read_cpu": reading.cpu_s / gb,
    }


def _producer(bench: Bench, codec: str) -> Producer:
    return Producer(bench.ours.bootstrap, compression=codec)


def one_kafka_run(bench: Bench, kafka: Kafka, values: Sequence[bytes], codec: str) -> Figures:
    from bench.kafka_clients import consume_confluent, produce_confluent

    volume = sum(map(len, values))
    with bench.topic(kafka, partitions=PARTITIONS) as topic:
        with CpuTime(kafka.pids()) as brokers, _Took() as writing:
            produce_confluent(kafka.bootstrap, topic, values, **{"compression.type": codec})
        disk = kafka.disk_bytes(topic)
        found = consume_confluent(kafka.bootstrap, topic, len(values))[1]
        if sum(map(len, found)) != volume:
            raise Lost(f"kafka: {sum(map(len, found)):,} bytes found, {volume:,} expected")
    cpu_s = brokers.seconds + writing.cpu_s
    return {"write": len(values) / writing.wall_s, "disk": disk / volume, "cpu": cpu_s / volume * 1e9}


class _Took:
    """A stopwatch for elapsed time and for this process's processor time, as a context manager."""

    wall_s = cpu_s = 0.0

    def __enter__(self) -> _Took:
        self._began = time.perf_counter(), time.process_time()
        return self

    def __exit__(self, *_: object) -> None:
        began_s, cpu_s = self._began
        self.wall_s, self.cpu_s = time.perf_counter() - began_s, time.process_time() - cpu_s


def _check(found: pa.Table, data: Records) -> None:
    if (seen := sums(found.select(list(data.sums)))) != data.sums:
        raise Lost(f"{data.kind}: {seen} found, {data.sums} expected")


@contextmanager
def open_compression(bench: Bench, *, kind: str) -> Iterator[list[Contestant]]:
    flights = load_flights()
    count = bench.count(_RECORDS, 5_000)
    flights = pa.concat_tables([flights] * -(-count // flights.num_rows)).slice(0, count)
    run: Callable[..., Figures]
    if kind == TYPED:
        data = records(kind, flights, flights.schema)
    else:
        values = as_json(flights)
        data = records(kind, pa.table({"value": pa.array(values, pa.binary())}), None)
    found = [Contestant(codec, functools.partial(one_run, bench, data, codec), bench.ours) for codec in CODECS]
    if kind == JSON and bench.kafka is not None:
        for codec in CODECS:
            run = functools.partial(one_kafka_run, bench, bench.kafka, values, codec)
            found.append(Contestant(_theirs(codec), run, bench.kafka))
    yield found


def _theirs(codec: str) -> str:
    return f"confluent-kafka, {codec}"


def _ratios(kind: str, codec: str) -> Iterator[Ratio]:
    def ratio(words: str, unit: str, figure: str, *, lower: bool = False) -> Ratio:
        return Ratio(f"{kind}, {codec}: {words}, against none", unit, (codec, figure), (("none", figure),), lower=lower)

    yield ratio("written", "records/s", "write")
    yield ratio("read", "records/s", "read")
    yield ratio("bytes on disk, three replicas", "B/B", "disk", lower=True)
    yield ratio("processor of client and brokers", "s/GB", "cpu", lower=True)
    yield ratio("processor of a reader", "s/GB", "read_cpu", lower=True)


def _beside_kafka(codec: str) -> Iterator[Ratio]:
    def ratio(words: str, unit: str, figure: str, *, lower: bool = False) -> Ratio:
        title = f"{JSON}, {codec}: {words}, against Kafka's"
        return Ratio(title, unit, (codec, figure), ((_theirs(codec), figure),), lower=lower)

    yield ratio("written", "records/s", "write")
    yield ratio("bytes on disk, three replicas", "B/B", "disk", lower=True)
    yield ratio("processor of client and brokers", "s/GB", "cpu", lower=True)


def _row(name: str, kind: str) -> Row:
    ratios: list[Ratio] = [ratio for codec in CODECS[1:] for ratio in _ratios(kind, codec)]
    if kind == JSON:
        ratios += [ratio for codec in CODECS for ratio in _beside_kafka(codec)]
    return Row(name, tuple(ratios), functools.partial(open_compression, kind=kind))


ROWS = (_row("compression-json", JSON), _row("compression-typed", TYPED))
