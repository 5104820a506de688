"""Batches and streams through Spark, two cores: DataFrames into six partitions, and topics to the sink ``noop``."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

from py4j.protocol import Py4JJavaError

from bench.measure import Contestant, Figures, Lost, Ratio, Row
from bench.sides import Bench, Side
from bench.values import DIGITS, FILLER, check_topic

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

PARTITIONS = 6
_RECORDS = {100: 5_000_000, 1000: 1_000_000}
#: The settings that experienced users give to Kafka's connector.
TUNED = {"kafka.linger.ms": "5", "kafka.batch.size": "262144"}
_NOTHING: Mapping[str, str] = {}
#: Spark ends Python workers when none of them has been used for a minute, and checks that every ten seconds. Source:
#: org.apache.spark.api.python.PythonWorkerFactory.
_WORKERS_END_AFTER_S = 75.0


def frame(bench: Bench, count: int, size: int) -> DataFrame:
    """Return the numbered values, created by Spark."""
    numbers = bench.spark.range(count, numPartitions=4)
    filler = FILLER.decode() * (size - DIGITS)
    return numbers.selectExpr(f"cast(concat(lpad(cast(id as string), {DIGITS}, '0'), '{filler}') as binary) as value")


def address(side: Side) -> Mapping[str, str]:
    return {"kafka.bootstrap.servers": side.bootstrap}


def source(bench: Bench, side: Side, topic: str, *, stream: bool = False) -> Any:
    reader = bench.spark.readStream if stream else bench.spark.read
    options = {**address(side), "subscribe": topic, "startingOffsets": "earliest"}
    return reader.format(side.name).options(**options)


def to_noop(data: DataFrame) -> float:
    began = time.perf_counter()
    data.write.format("noop").mode("overwrite").save()
    return time.perf_counter() - began


def write(data: DataFrame, side: Side, topic: str, options: Mapping[str, str] = _NOTHING) -> float:
    writer = data.write.format(side.name).options(**address(side), **options).option("topic", topic)
    began = time.perf_counter()
    writer.mode("append").save()
    return time.perf_counter() - began


def sides(bench: Bench) -> Iterator[Side]:
    """Yield sparklog, and Kafka if Spark has its connector."""
    yield bench.ours
    if bench.kafka is not None and bench.connector:
        yield bench.kafka


# --- writing ---


class Writes:
    """Writes of one DataFrame, each to a new topic.

    Spark caches Kafka's producers, which stall when their topic is recreated. Owner: the main thread.
    """

    def __init__(self, bench: Bench, *, size: int) -> None:
        self._bench = bench
        self._size = size
        self._count = bench.count(_RECORDS[size], 20_000)
        self._data = frame(bench, self._count, size)
        #: The time of the last use of the session's Python workers, in seconds of the monotonic clock.
        self._used_at = time.monotonic()

    def one(self, side: Side, options: Mapping[str, str] = _NOTHING) -> Figures:
        """Run one write. If Kafka's producer gives up, run it again.

        Kafka's producer gives up a batch that was stalled for two minutes, which happens directly after a pause of its
        brokers. The failed run is not counted.
        """
        try:
            return self._once(side, options)
        except Py4JJavaError as error:
            if side is self._bench.ours or "org.apache.kafka.common.errors.TimeoutException" not in str(error):
                raise
            self._bench.say(f"  {side.name} gave up a write, which is repeated")
            return self._once(side, options)

    def _once(self, side: Side, options: Mapping[str, str]) -> Figures:
        with self._bench.topic(side, partitions=PARTITIONS) as topic:
            took = write(self._data, side, topic, options)
            if side is self._bench.ours:
                self._used_at = time.monotonic()
            check_topic(side, topic, self._count, self._size)
        return {"rate": self._count / took}

    def pause(self) -> None:
        """Wait until Spark has ended its Python workers. Kafka runs during most of this time."""
        time.sleep(max(0.0, self._used_at + _WORKERS_END_AFTER_S - time.monotonic()))


@contextmanager
def open_write(bench: Bench, *, size: int) -> Iterator[list[Contestant]]:
    writes = Writes(bench, size=size)
    ours = functools.partial(writes.one, bench.ours)
    found = [
        Contestant("after a pause", ours, bench.ours, before=writes.pause),
        Contestant(bench.ours.name, ours, bench.ours),
    ]
    for side in sides(bench):
        if side is not bench.ours:
            found.append(Contestant("default", functools.partial(writes.one, side), side))
            found.append(Contestant("tuned", functools.partial(writes.one, side, TUNED), side))
    yield found


# --- reading ---


def one_read(bench: Bench, side: Side, topic: str, count: int) -> Figures:
    return {"rate": count / to_noop(source(bench, side, topic).load())}


def one_stream(bench: Bench, side: Side, topic: str, count: int) -> Figures:
    return streamed(bench, source(bench, side, topic, stream=True).load(), side.name, count)


def streamed(bench: Bench, data: DataFrame, name: str, count: int) -> Figures:
    writer = data.writeStream.format("noop")
    writer = writer.option("checkpointLocation", str(bench.scratch())).trigger(availableNow=True)
    began = time.perf_counter()
    query = writer.start()
    query.awaitTermination()
    took = time.perf_counter() - began
    rows = sum(progress["numInputRows"] for progress in query.recentProgress)
    if rows != count:
        raise Lost(f"{name}: a stream read {rows:,} rows, {count:,} expected")
    return {"rate": count / took}


def filled(bench: Bench, side: Side, data: DataFrame, ends: ExitStack) -> str:
    """Create a topic with ``data``, and check that Spark reads every byte of it. Raises Lost."""
    topic = ends.enter_context(bench.topic(side, partitions=PARTITIONS))
    write(data, side, topic, TUNED if side.name == "kafka" else _NOTHING)
    sums = ("count(1)", "sum(crc32(value))")
    found, expected = (rows.selectExpr(*sums).collect() for rows in (source(bench, side, topic).load(), data))
    if found != expected:
        raise Lost(f"{side.name}: {found} found, {expected} expected")
    return topic


@contextmanager
def open_read(bench: Bench, *, size: int, one: Callable[..., Figures]) -> Iterator[list[Contestant]]:
    count = bench.count(_RECORDS[size], 20_000)
    data = frame(bench, count, size)
    with ExitStack() as ends:
        yield [
            Contestant(side.name, functools.partial(one, bench, side, filled(bench, side, data, ends), count), side)
            for side in sides(bench)
        ]


@contextmanager
def open_stream(bench: Bench, *, size: int) -> Iterator[list[Contestant]]:
    from bench.at_hand import AtHand

    bench.spark.dataSource.register(AtHand)
    count = bench.count(_RECORDS[size], 20_000)
    options = {"records": count, "size": size, "partitions": PARTITIONS}
    at_hand = bench.spark.readStream.format(AtHand.name()).options(**options).load()
    with open_read(bench, size=size, one=one_stream) as both:
        run = functools.partial(streamed, bench, at_hand, AtHand.name(), count)
        yield [*both, Contestant("at hand", run, bench.ours)]


def _write_row(size: int, words: str, *, default: float, tuned: float) -> Row:
    ours, theirs = ("sparklog", "rate"), (("tuned", "rate"),)
    return Row(
        f"spark-write-{size}",
        (
            Ratio(f"Spark batch write, {words}", "records/s", ours, (("default", "rate"),), default),
            Ratio("the same, Kafka tuned", "records/s", ours, theirs, tuned),
            Ratio("the same, ours a minute after its last one", "records/s", ("after a pause", "rate"), theirs),
        ),
        functools.partial(open_write, size=size),
    )


def _read_row(size: int, goal: float) -> Row:
    title = f"Spark batch read to noop, {size} B"
    return Row(
        f"spark-read-{size}",
        (Ratio(title, "records/s", ("sparklog", "rate"), (("kafka", "rate"),), goal),),
        functools.partial(open_read, size=size, one=one_read),
    )


def _stream_row(size: int, goal: float) -> Row:
    title, ours = f"Spark stream, AvailableNow to noop, {size} B", ("sparklog", "rate")
    return Row(
        f"spark-stream-{size}",
        (
            Ratio(title, "records/s", ours, (("kafka", "rate"),), goal),
            Ratio(f"{title}, of a source that reads nothing", "records/s", ours, (("at hand", "rate"),)),
            Ratio(f"{title}: a source that reads nothing", "records/s", ("at hand", "rate"), (("kafka", "rate"),)),
        ),
        functools.partial(open_stream, size=size),
    )


ROWS = (
    _write_row(100, "5 million x 100 B", default=3.0, tuned=2.0),
    _write_row(1000, "1 million x 1 kB", default=3.0, tuned=1.5),
    _read_row(100, 2.5),
    _read_row(1000, 3.0),
    _stream_row(100, 2.0),
    _stream_row(1000, 3.0),
)
