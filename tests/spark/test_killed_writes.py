"""A streaming write whose parts are killed: its query, started again from its checkpoint, gives every row once."""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from pyspark.sql import Row, SparkSession
from pyspark.sql import functions as sf
from pyspark.sql.streaming.query import StreamingQuery

from sparklog.client.admin import Admin
from sparklog.client.errors import ProducerFenced
from sparklog.spark.sink import commit_run
from sparklog.testing.process_cluster import ProcessCluster, wait_until
from tests.broker.topics import leader
from tests.broker.transactions import find_coordinator
from tests.spark.holding_source import register_holding_source

pytestmark = [pytest.mark.integration, pytest.mark.timeout(400)]

ROOT = Path(__file__).resolve().parent.parent.parent
ROWS = 40


def fill(spark: SparkSession, topic: str, start: int, end: int) -> None:
    spark.range(start, end).withColumnRenamed("id", "x").write.format("sparklog").option("topic", topic).mode(
        "append"
    ).save()


def copy(spark: SparkSession, source: str, target: str, checkpoint: Path, **options: str) -> StreamingQuery:
    frame = spark.readStream.format("sparklog").options(subscribe=source, startingOffsets="earliest", **options).load()
    writer = frame.select("x").writeStream.format("sparklog").option("topic", target)
    return writer.option("checkpointLocation", str(checkpoint)).trigger(availableNow=True).start()


def counts(spark: SparkSession, topic: str) -> Row | None:
    frame = spark.read.format("sparklog").option("subscribe", topic).load()
    return frame.agg(sf.count("*").alias("rows"), sf.countDistinct("x").alias("different")).first()


@contextmanager
def driver(bootstrap: str, directory: Path, *topics: str) -> Iterator[subprocess.Popen[bytes]]:
    command = [sys.executable, "-m", "tests.spark.killed_writer", bootstrap, str(directory), *topics]
    with (directory / "output").open("wb") as output:
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


def test_a_driver_killed_before_its_commit_and_one_before_its_checkpoint(
    spark: SparkSession, brokers: ProcessCluster, admin: Admin, topic: str, tmp_path: Path
) -> None:
    """Also: a task that is killed once it has written, whose stage goes on; and what the first driver would
    have committed, once a second one has taken over the checkpoint."""
    before, after, task = targets = [f"{topic}-{point}" for point in ("before", "after", "task")]
    for name in (topic, *targets):
        admin.create_topic(name, partitions=2, schema="x bigint")
    fill(spark, topic, 0, ROWS)
    held, replay = tmp_path / f"{before}.hold-commit", tmp_path / f"{after}.hold-after"
    for point in (held, replay, tmp_path / f"{task}.kill-task"):
        point.touch()
    with driver(brokers.bootstrap, tmp_path, topic, *targets) as process:

        def all_there() -> bool:
            assert process.poll() is None, (tmp_path / "output").read_text()
            reached = all(Path(f"{point}.reached").exists() for point in (held, replay))
            return reached and (tmp_path / f"{task}.committed").exists()

        wait_until(all_there, 200, "all queries at their points")
        for pid in (int((tmp_path / "jvm").read_text()), process.pid):
            os.kill(pid, signal.SIGKILL)
        process.wait(20)
        assert counts(spark, before) == Row(rows=0, different=0)
        assert counts(spark, after) == Row(rows=ROWS, different=ROWS)
        assert (tmp_path / f"{task}.kill-task").with_suffix(".done").exists()
        for target in targets:
            assert copy(spark, topic, target, tmp_path / f"checkpoint-{target}").awaitTermination(60)
        with pytest.raises(ProducerFenced):  # as the first driver would, had it only been slow
            commit_run(brokers.bootstrap, pickle.loads((tmp_path / f"{before}.messages").read_bytes()))
    for target in targets:
        assert counts(spark, target) == Row(rows=ROWS, different=ROWS), target


def test_the_leader_and_then_the_coordinator_are_killed_under_a_write(
    spark: SparkSession, brokers: ProcessCluster, admin: Admin, topic: str, *, tmp_path: Path
) -> None:
    target = f"{topic}-copy"
    for name in (topic, target):
        admin.create_topic(name, partitions=1, replication_factor=3, schema="x bigint")
    fill(spark, topic, 0, ROWS)
    register_holding_source(spark, brokers.bootstrap, tmp_path)
    written, decided = tmp_path / f"{target}.hold-write", tmp_path / f"{target}.hold-commit"
    written.touch()
    decided.touch()
    query = copy(spark, topic, target, tmp_path / "checkpoint")
    with killed_at(written, brokers, lambda: leader(brokers, target, 0), query):
        pass
    with killed_at(decided, brokers, lambda: find_coordinator(brokers, "transaction", f"query:{query.id}"), query):
        assert query.awaitTermination(90)
    assert counts(spark, target) == Row(rows=ROWS, different=ROWS)
    fill(spark, topic, ROWS, 2 * ROWS)
    copy(spark, topic, target, tmp_path / "checkpoint").awaitTermination(60)
    assert counts(spark, target) == Row(rows=2 * ROWS, different=2 * ROWS)


@contextmanager
def killed_at(point: Path, brokers: ProcessCluster, who: Callable[[], int], query: StreamingQuery) -> Iterator[None]:
    """Kill a broker while the write holds at ``point``, let the write go on, and start the broker again afterwards."""
    wait_until(lambda: Path(f"{point}.reached").exists() or not query.isActive, 60, f"{point.name}")
    assert query.isActive, query.exception()
    victim = who()
    brokers.kill(victim)
    try:
        Path(f"{point}.go").touch()
        yield
    finally:
        brokers.start_broker(victim)
        brokers.wait_ready()
