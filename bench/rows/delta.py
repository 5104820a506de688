"""Topics archived to Delta tables, against Kafka's source and Delta's sink, and reads of a topic and its archive."""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

import pyarrow.compute as pc

from bench.measure import Contestant, Figures, Lost, Ratio, Row
from bench.rows.spark import PARTITIONS, TUNED, address, filled, frame, sides, source, to_noop, write
from bench.rows.typed import flights_in_spark
from bench.sides import Bench, Side
from sparklog import Producer, read_history
from sparklog.demo.flights import load_flights

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

_RECORDS = 5_000_000
_COPIES = 10


def archive(bench: Bench, topic: str, to: str) -> None:
    """Archive all existing records."""
    from sparklog.delta.job import run_archives
    from sparklog.delta.options import ArchiveOptions

    asked = ArchiveOptions(
        bootstrap=bench.ours.bootstrap, topic=topic, to=to, group=f"archive-{topic}", interval=None, max_offsets=10**8
    )
    failed = run_archives(bench.spark, [asked], stopping=threading.Event(), tell=lambda _: None)
    for error in failed.values():
        raise error


def stream_to_delta(bench: Bench, rows: DataFrame, to: str) -> None:
    """Copy all existing records exactly once: Delta's sink stores the query's batches."""
    writer = rows.writeStream.format("delta").partitionBy("_date").option("checkpointLocation", str(bench.scratch()))
    writer.trigger(availableNow=True).start(to).awaitTermination()


def one_archive(
    bench: Bench, side: Side, topic: str, *, sums: tuple[str, ...], expected: Any, fields: Any = None
) -> Figures:
    """Run one archive. ``fields`` are the fields of the JSON in Kafka's values. If None, the values are bytes."""
    from pyspark.sql import functions as sf

    table = f"{bench.scratch()}/{topic}"
    began = time.perf_counter()
    if side is bench.ours:
        archive(bench, topic, table.rpartition("/")[0])
    else:
        read = source(bench, side, topic, stream=True).option("includeHeaders", "true").load()
        place = [sf.col(name).alias(f"_{name}") for name in ("partition", "offset", "timestamp")]
        if fields is None:
            rows = read.select("key", "value", "headers", *place)
        else:
            rows = read.select(sf.from_json(sf.col("value").cast("string"), fields).alias("flight"), *place)
            rows = rows.select("flight.*", "_partition", "_offset", "_timestamp")
        stream_to_delta(bench, rows.withColumn("_date", sf.to_date("_timestamp")), table)
    took = time.perf_counter() - began
    found = bench.spark.read.format("delta").load(table).selectExpr(*sums).collect()
    if found != expected:
        raise Lost(f"{side.name}: {found} found, {expected} expected")
    return {"rate": expected[0][0] / took}


@contextmanager
def open_archive(bench: Bench) -> Iterator[list[Contestant]]:
    data, sums = frame(bench, bench.count(_RECORDS, 20_000), 100), ("count(1)", "sum(crc32(value))")
    run = functools.partial(one_archive, bench, sums=sums, expected=data.selectExpr(*sums).collect())
    with ExitStack() as ends:
        yield [
            Contestant(side.name, functools.partial(run, side, filled(bench, side, data, ends)), side)
            for side in sides(bench)
        ]


@contextmanager
def open_archive_of_flights(bench: Bench) -> Iterator[list[Contestant]]:
    copies = 1 if bench.quick else bench.count(_COPIES, 1)
    table, flights = load_flights(), flights_in_spark(bench, copies)
    sums = ("count(1)", "sum(dep_delay)", "count(distinct carrier)")
    run = functools.partial(one_archive, bench, sums=sums, expected=flights.selectExpr(*sums).collect())
    with ExitStack() as ends:
        ours = ends.enter_context(bench.topic(bench.ours, partitions=PARTITIONS, schema=table.schema))
        with Producer(bench.ours.bootstrap) as producer:
            for _ in range(copies):
                producer.write(ours, table)
        contestants = [Contestant("sparklog", functools.partial(run, bench.ours, ours), bench.ours)]
        if bench.kafka is not None and bench.connector:
            theirs = ends.enter_context(bench.topic(bench.kafka, partitions=PARTITIONS))
            write(flights.selectExpr("to_json(struct(*)) as value"), bench.kafka, theirs, TUNED)
            run_theirs = functools.partial(run, bench.kafka, theirs, fields=flights.schema)
            contestants.append(Contestant("JSON in Kafka", run_theirs, bench.kafka))
        yield contestants


# --- history ---


def history(bench: Bench, topic: str, path: str, **borders: Any) -> DataFrame:
    return read_history(bench.spark, topic, history=path, **borders, **address(bench.ours))


def one_history(bench: Bench, topic: str, path: str, rows: int, **borders: Any) -> Figures:
    found = history(bench, topic, path, **borders)
    return {"rate": rows / to_noop(found)}


@contextmanager
def open_history(bench: Bench) -> Iterator[list[Contestant]]:
    """Open a topic with equal numbers of flights in the archive and in the log above it."""
    copies = 1 if bench.quick else bench.count(_COPIES, 1)
    table, path = load_flights(), str(bench.scratch())
    half = copies * table.num_rows
    with bench.topic(bench.ours, partitions=PARTITIONS, schema=table.schema) as topic:
        with Producer(bench.ours.bootstrap) as producer:
            for _ in range(copies):
                producer.write(topic, table)
        archive(bench, topic, path)
        with Producer(bench.ours.bootstrap) as producer:
            for _ in range(copies):
                producer.write(topic, table)
        found = history(bench, topic, path).selectExpr("count(1)", "sum(distance)").collect()[0]
        expected = (2 * half, 2 * copies * pc.sum(table["distance"]).as_py())
        if tuple(found) != expected:
            raise Lost(f"{tuple(found)} found, {expected} expected")
        seam = _ends(path, topic)
        plain = bench.spark.read.format("delta").load(f"{path}/{topic}")
        run = functools.partial(one_history, bench, topic, path)
        yield [
            Contestant("both", functools.partial(run, 2 * half), bench.ours),
            Contestant("below the seam", functools.partial(run, half, end=seam), bench.ours),
            Contestant("behind it", functools.partial(run, half, start=seam), bench.ours),
            Contestant("the Delta table", lambda: {"rate": half / to_noop(plain)}, bench.ours),
        ]


def _ends(path: str, topic: str) -> dict[int, int]:
    from sparklog.delta.archive_progress import read_progress

    found = read_progress(f"{path}/{topic}")
    assert found is not None
    return found.progress.ends


ROWS = (
    Row(
        "delta-archive",
        (Ratio("archived to Delta, 5 million x 100 B", "records/s", ("sparklog", "rate"), (("kafka", "rate"),), None),),
        open_archive,
        needs_delta=True,
    ),
    Row(
        "delta-archive-flights",
        (
            Ratio(
                "archived to Delta, 3.4 million flights",
                "records/s",
                ("sparklog", "rate"),
                (("JSON in Kafka", "rate"),),
                None,
            ),
        ),
        open_archive_of_flights,
        needs_delta=True,
    ),
    Row(
        "delta-history",
        (
            Ratio("history, half in Delta, half in the log", "rows/s", ("both", "rate")),
            Ratio(
                "history below the seam, against the Delta table",
                "rows/s",
                ("below the seam", "rate"),
                (("the Delta table", "rate"),),
            ),
            Ratio("history behind the seam", "rows/s", ("behind it", "rate")),
        ),
        open_history,
        needs_delta=True,
    ),
)
