"""Typed columns instead of binary values: a query over the flights, and reads of some columns of a wide table.
Through Spark."""

from __future__ import annotations

import functools
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from bench.measure import Contestant, Figures, Lost, Ratio, Row
from bench.rows.spark import PARTITIONS, TUNED, address, source, to_noop, write
from bench.sides import Bench, Side
from sparklog import Producer
from sparklog.demo.flights import load_flights

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

_COPIES = 20
_ASKED = ("carrier", "dep_delay")

#: A number at which reading the narrowest column takes longer than planning and starting the tasks.
_WIDE_ROWS = 2_000_000
_WIDE_COLUMNS = 20
_TEXT_BYTES = 105
_CHOSEN = (1, 5, 10, 20)


# --- the flights ---


def ask(flights: DataFrame) -> dict[str, float]:
    found = flights.groupBy("carrier").avg("dep_delay").collect()
    return {row[0]: round(row[1], 6) for row in found}


def one_question(bench: Bench, side: Side, topic: str, fields: Any, expected: dict[str, float]) -> Figures:
    began = time.perf_counter()
    reader = source(bench, side, topic)
    if side is bench.ours:
        flights = reader.schema(", ".join(f"{name} {fields[name].dataType.simpleString()}" for name in _ASKED)).load()
    else:
        from pyspark.sql import functions as sf

        parsed = sf.from_json(sf.col("value").cast("string"), fields)
        flights = reader.load().select(parsed.alias("flight")).select("flight.*")
    found = ask(flights)
    took = time.perf_counter() - began
    if found != expected:
        raise Lost(f"{side.name}: {found} found, {expected} expected")
    return {"seconds": took}


def flights_in_spark(bench: Bench, copies: int) -> DataFrame:
    """Return all flights, ``copies`` times."""
    path = bench.scratch() / "flights.parquet"
    table = load_flights()
    pq.write_table(table, path, row_group_size=table.num_rows // 8)
    return bench.spark.range(copies).crossJoin(bench.spark.read.parquet(str(path))).drop("id")


@contextmanager
def open_flights(bench: Bench) -> Iterator[list[Contestant]]:
    copies = 1 if bench.quick else bench.count(_COPIES, 1)
    table = load_flights()
    flights = flights_in_spark(bench, copies)
    expected = ask(flights)
    with ExitStack() as ends:
        ours = ends.enter_context(bench.topic(bench.ours, partitions=PARTITIONS, schema=table.schema))
        with Producer(bench.ours.bootstrap) as producer:
            for _ in range(copies):
                producer.write(ours, table)
        run = functools.partial(one_question, bench, fields=flights.schema, expected=expected)
        contestants = [Contestant("sparklog", functools.partial(run, bench.ours, ours), bench.ours)]
        if bench.kafka is not None and bench.connector:
            theirs = ends.enter_context(bench.topic(bench.kafka, partitions=PARTITIONS))
            write(flights.selectExpr("to_json(struct(*)) as value"), bench.kafka, theirs, TUNED)
            run_theirs = functools.partial(run, bench.kafka, theirs)
            contestants.append(Contestant("JSON in Kafka", run_theirs, bench.kafka))
        yield contestants


# --- some columns of many ---


def wide_table(rows: int) -> pa.Table:
    """Return a table with one column of integers and 19 of text, 2 kB a row."""
    text = np.random.default_rng(1).integers(ord("a"), ord("z"), rows * _TEXT_BYTES, dtype=np.uint8)
    offsets = np.arange(0, rows * _TEXT_BYTES + 1, _TEXT_BYTES, dtype=np.int32)  # up to 20 million rows
    column = pa.StringArray.from_buffers(rows, pa.py_buffer(offsets), pa.py_buffer(text))
    columns = {"c0": pa.array(np.arange(rows)), **{f"c{number}": column for number in range(1, _WIDE_COLUMNS)}}
    return pa.table(columns)


def one_projection(bench: Bench, topic: str, rows: int, columns: int, reads: str) -> Figures:
    fields = ", ".join(f"c{number} {'string' if number else 'bigint'}" for number in range(columns))
    reader = bench.spark.read.format("sparklog").options(**address(bench.ours), subscribe=topic, localReads=reads)
    return {"rate": rows / to_noop(reader.schema(fields).load())}


@contextmanager
def open_projection(bench: Bench, *, reads: str) -> Iterator[list[Contestant]]:
    rows = bench.count(_WIDE_ROWS, 2_000)
    table = wide_table(rows)
    # One replica: 4 GB are read, each byte at most once at a time.
    with bench.topic(bench.ours, partitions=PARTITIONS, replication_factor=1, schema=table.schema) as topic:
        with Producer(bench.ours.bootstrap) as producer:
            producer.write(topic, table)
        found = bench.spark.read.format("sparklog").options(**address(bench.ours), subscribe=topic).load()
        sums = found.selectExpr("count(1)", "sum(c0)").collect()[0]
        if tuple(sums) != (rows, rows * (rows - 1) // 2):
            raise Lost(f"{sums} found, {rows} rows expected")
        yield [
            Contestant(
                f"{columns} of 20", functools.partial(one_projection, bench, topic, rows, columns, reads), bench.ours
            )
            for columns in _CHOSEN
        ]


def _projection(reads: str, words: str) -> Row:
    everything = (("20 of 20", "rate"),)
    return Row(
        f"projection-{words}",
        tuple(
            Ratio(
                f"{columns} of 20 columns, {words}, against all",
                "rows/s",
                (f"{columns} of 20", "rate"),
                everything,
                goal,
            )
            for columns, goal in ((1, 8.0), (5, 3.5), (10, 1.9))
        ),
        functools.partial(open_projection, reads=reads),
    )


ROWS = (
    Row(
        "flights",
        (
            Ratio(
                "average delay by carrier of 6.7 million flights",
                "s",
                ("sparklog", "seconds"),
                (("JSON in Kafka", "seconds"),),
                0.1,
                lower=True,
            ),
        ),
        open_flights,
    ),
    _projection("require", "local"),
    _projection("never", "remote"),
)
