"""Tests of writes whose processes are killed.

A query that is started again from its checkpoint writes every row once. So does a named batch write that is run again.
"""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path

import pyarrow as pa
import pytest
from pyspark.sql import SparkSession
from pyspark.sql import functions as sf
from pyspark.sql.streaming.query import StreamingQuery

from sparklog.client.admin.admin import Admin
from sparklog.client.cluster.isolation_level import Isolation
from sparklog.client.consumer.partition_reader import PartitionReader
from sparklog.client.errors import ProducerFenced
from sparklog.client.producer.producer import Producer
from sparklog.model import TopicPartition
from sparklog.spark.sink import commit_run
from sparklog.testing.process_cluster import ProcessCluster, wait_until
from sparklog.testing.standalone_spark import StandaloneSpark
from tests.broker.topics import leader
from tests.broker.transactions import find_coordinator
from tests.spark.holding_source import register_holding_source
from tests.spark.killed_writer import spread
from tests.spark.queries import drained

pytestmark = [pytest.mark.integration, pytest.mark.extended, pytest.mark.timeout(900)]

ROOT = Path(__file__).resolve().parent.parent.parent
ROWS = 40


def fill(brokers: ProcessCluster, topic: str, start: int, end: int, *, partitions: int = 1) -> None:
    with Producer(brokers.bootstrap) as producer:
        for number in range(partitions):
            producer.write(topic, pa.table({"x": range(start + number, end, partitions)}), partition=number).result(60)


def copy(spark: SparkSession, source: str, target: str, checkpoint: Path, *, partitions: int = 1) -> StreamingQuery:
    frame = spark.readStream.format("sparklog").options(subscribe=source, startingOffsets="earliest").load()
    place = (sf.col("x") % partitions).cast("int").alias("partition")
    chosen = frame.select("x", place) if partitions > 1 else frame.select("x")
    writer = chosen.writeStream.format("sparklog").option("topic", target)
    return writer.option("checkpointLocation", str(checkpoint)).trigger(availableNow=True).start()


def rows(admin: Admin, brokers: ProcessCluster, topic: str, isolation: Isolation = "read_committed") -> list[int]:
    """Return the topic's values, sorted."""
    partitions = [TopicPartition(topic, part.partition) for part in admin.describe_topic(topic).partitions]
    found: list[int] = []
    for tp, end in admin.list_offsets(partitions, isolation=isolation).items():
        with PartitionReader(brokers.bootstrap, tp, 0, end, isolation=isolation) as reader:
            for _, batch in reader:
                found += batch.column("x").to_pylist()
    return sorted(found)


def settled_rows(admin: Admin, brokers: ProcessCluster, topic: str) -> list[int]:
    """Return the topic's values, sorted, after its last transaction has ended. A query may end before its markers
    are written."""
    partitions = [TopicPartition(topic, part.partition) for part in admin.describe_topic(topic).partitions]

    def settled() -> bool:
        ends = admin.list_offsets(partitions, isolation="read_uncommitted")
        return admin.list_offsets(partitions, isolation="read_committed") == ends

    wait_until(settled, 60, f"the end of all transactions in {topic}")
    return rows(admin, brokers, topic)


@contextmanager
def driver(bootstrap: str, directory: Path, *topics: str) -> Iterator[subprocess.Popen[bytes]]:
    """Start an application that Spark sees on two hosts: Spark starts no second attempt of a task on the host of the
    first."""
    hosts = ("127.0.0.1", "127.0.0.2")
    standalone = StandaloneSpark(directory / "standalone", workers=2, cores=3, keep_state=False, hosts=hosts)
    with standalone as cluster, (directory / "output").open("wb") as output:
        command = [sys.executable, "-m", "tests.spark.killed_writer", cluster.url, bootstrap, str(directory), *topics]
        process = subprocess.Popen(
            command, cwd=ROOT, stdout=output, stderr=subprocess.STDOUT, start_new_session=True,
            env={**os.environ, "PYTHONPATH": str(ROOT), "PYSPARK_PYTHON": sys.executable},
        )  # fmt: skip
        try:
            yield process
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait(10)


def test_writes_survive_drivers_killed_before_commit_and_checkpoint(
    spark: SparkSession, brokers: ProcessCluster, admin: Admin, topic: str, tmp_path: Path
) -> None:
    """Kill drivers and tasks at every point of two streaming writes and one batch write, and run the writes again.

    The second query also has a task that is killed after it has written, whose stage continues, and a task whose second
    attempt is faster than the first, which has also written. Another driver is still alive when a new one has taken
    over its checkpoint. The rows of the batch write name two topics: one of its tasks is killed between the two, and
    then the driver before its decision on both.
    """
    before, after, taken = targets = [f"{topic}-{point}" for point in ("before", "after", "taken")]
    halves = [f"{topic}-even", f"{topic}-odd"]
    pair = "+".join(halves)
    for name in (topic, *targets, *halves):
        admin.create_topic(name, partitions=2, schema="x bigint")
    for target, point in [
        (before, "hold-commit"), (after, "kill-task"), (after, "hold-write"), (after, "hold-after"),
        (taken, "hold-commit"), (pair, "kill-between"), (pair, "hold-commit"),
    ]:  # fmt: skip
        (tmp_path / f"{target}.{point}").touch()
    with driver(brokers.bootstrap, tmp_path, topic, *targets, pair) as process:
        fill(brokers, topic, 0, ROWS, partitions=2)
        (tmp_path / "filled").touch()
        reached = [tmp_path / f"{before}.hold-commit.reached", tmp_path / f"{after}.hold-after.reached"]
        reached += [tmp_path / f"{taken}.hold-commit.reached", tmp_path / f"{pair}.hold-commit.reached"]

        def all_there() -> bool:
            assert process.poll() is None, (tmp_path / "output").read_text()
            return all(point.exists() for point in reached)

        wait_until(all_there, 600, "all queries at their points")
        drained(partial(copy, spark, topic, taken, tmp_path / f"checkpoint-{taken}"))
        (tmp_path / f"{taken}.hold-commit.go").touch()
        failed = tmp_path / f"{taken}.failed"
        wait_until(lambda: failed.exists() and failed.read_text(), 180, "the driver that lingers to be refused")
        assert "ProducerFenced" in failed.read_text()
        for pid in (int((tmp_path / "jvm").read_text()), process.pid):
            os.kill(pid, signal.SIGKILL)
        process.wait(60)
    assert [rows(admin, brokers, name) for name in (before, *halves)] == [[], [], []]
    assert (tmp_path / f"{pair}.done").exists()
    for name in halves:
        assert rows(admin, brokers, name, "read_uncommitted"), (
            "an uncommitted row must exist for the test to prove anything"
        )
    assert settled_rows(admin, brokers, after) == [*range(ROWS)]
    assert (tmp_path / f"{after}.done").exists() and (tmp_path / f"{after}.hold-write.reached").exists()
    stored = rows(admin, brokers, after, "read_uncommitted")
    assert len(stored) >= 2 * ROWS, "both attempts of both tasks must have written"
    for target in (before, after):
        drained(partial(copy, spark, topic, target, tmp_path / f"checkpoint-{target}"))
    with pytest.raises(ProducerFenced):  # as a first driver would that was only slow
        commit_run(brokers.bootstrap, pickle.loads((tmp_path / f"{before}.messages").read_bytes()))
    for target in targets:
        assert settled_rows(admin, brokers, target) == [*range(ROWS)], target
    for _ in range(2):  # the second run is a user's mistake
        spread(spark, topic, pair, tmp_path / "filled")
    with pytest.raises(ProducerFenced):
        commit_run(brokers.bootstrap, pickle.loads((tmp_path / f"{pair}.messages").read_bytes()))
    assert [settled_rows(admin, brokers, name) for name in halves] == [[*range(0, ROWS, 2)], [*range(1, ROWS, 2)]]


def test_a_write_survives_the_death_of_leader_and_coordinator(
    spark: SparkSession, brokers: ProcessCluster, admin: Admin, topic: str, *, tmp_path: Path
) -> None:
    target = f"{topic}-copy"
    for name in (topic, target):
        admin.create_topic(name, partitions=1, replication_factor=3, schema="x bigint")
    fill(brokers, topic, 0, ROWS)
    register_holding_source(spark, brokers.bootstrap, tmp_path)
    written, decided = tmp_path / f"{target}.hold-write", tmp_path / f"{target}.hold-commit"
    written.touch()
    decided.touch()
    query = copy(spark, topic, target, tmp_path / "checkpoint")
    with killed_at(written, brokers, lambda: leader(brokers, target, 0), query):
        pass
    with killed_at(decided, brokers, lambda: find_coordinator(brokers, "transaction", f"query:{query.id}"), query):
        assert query.awaitTermination(180)
    assert settled_rows(admin, brokers, target) == [*range(ROWS)]
    fill(brokers, topic, ROWS, 2 * ROWS)
    drained(partial(copy, spark, topic, target, tmp_path / "checkpoint"))
    assert settled_rows(admin, brokers, target) == [*range(2 * ROWS)]


def test_a_coordinator_dies_between_its_decision_and_its_markers(
    spark: SparkSession, brokers: ProcessCluster, admin: Admin, topic: str, *, tmp_path: Path
) -> None:
    """Kill a coordinator after its decision. One partition of the target has no leader, so its marker cannot be
    written earlier."""
    target = f"{topic}-copy"
    admin.create_topic(topic, partitions=1, schema="x bigint")
    admin.create_topic(target, partitions=3, replication_factor=1, schema="x bigint")
    fill(brokers, topic, 0, ROWS)
    register_holding_source(spark, brokers.bootstrap, tmp_path)
    point = tmp_path / f"{target}.hold-commit"
    point.touch()
    query = copy(spark, topic, target, tmp_path / "checkpoint", partitions=3)
    wait_until(lambda: Path(f"{point}.reached").exists() or not query.isActive, 180, "the write at its commit")
    assert query.isActive, query.exception()
    key = f"query:{query.id}"
    coordinator = find_coordinator(brokers, "transaction", key)
    leaders = {leader(brokers, target, number) for number in range(3)}
    silent = min(leaders - {coordinator})
    brokers.kill(silent)
    Path(f"{point}.go").touch()

    def decided() -> bool:
        assert query.exception() is None  # the query may have ended: it waits for the decision, not for the markers
        return any(found.key == key and found.state == "committing" for found in admin.transactions())

    try:
        wait_until(decided, 180, "the decision")
        brokers.kill(coordinator)
    finally:
        brokers.start_brokers()
    assert query.awaitTermination(180)
    assert settled_rows(admin, brokers, target) == [*range(ROWS)]
    fill(brokers, topic, ROWS, 2 * ROWS)
    drained(partial(copy, spark, topic, target, tmp_path / "checkpoint", partitions=3))
    assert settled_rows(admin, brokers, target) == [*range(2 * ROWS)]


@contextmanager
def killed_at(point: Path, brokers: ProcessCluster, who: Callable[[], int], query: StreamingQuery) -> Iterator[None]:
    """Kill a broker while the write waits at ``point``, resume the write, and start the broker again afterwards."""
    wait_until(lambda: Path(f"{point}.reached").exists() or not query.isActive, 180, f"{point.name}")
    assert query.isActive, query.exception()
    victim = who()
    brokers.kill(victim)
    try:
        Path(f"{point}.go").touch()
        yield
    finally:
        brokers.start_broker(victim)
        brokers.wait_ready()
