"""Transactions of Kafka producers, read by Spark: its streams and batches, the reader of partitions and consumers of
Kafka see the same records, each once, and none of an aborted transaction."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType

import pytest
from pyspark.sql import DataFrame, Row, SparkSession
from pyspark.sql import functions as sf
from pyspark.sql.streaming.query import StreamingQuery

from sparklog.client.producer.producer import Producer
from sparklog.testing.final_logs import wait_in_sync
from sparklog.testing.process_cluster import ProcessCluster
from sparklog.testing.settled_admin import SettledAdmin
from tests.broker.transactions import find_coordinator
from tests.integration.kafka_records import PATIENCE_S, Written, read_confluent, read_partitions
from tests.integration.kafka_transactions import PYTHON
from tests.integration.test_kafka_transaction_faults import KEY, Writer, check, kill_all_in_turn
from tests.waiting import wait_until

pytestmark = [
    pytest.mark.integration,
    pytest.mark.extended,
    pytest.mark.timeout(600),
    pytest.mark.filterwarnings("ignore:(read|open)_text is deprecated:DeprecationWarning"),
]

ROOT = Path(__file__).resolve().parent.parent.parent
PARTITIONS = 3
SETTINGS = {"zookeeper.session.timeout.ms": "1000", "replica.lag.time.max.ms": "1500", "min.insync.replicas": "2"}


@pytest.fixture
def cluster() -> Iterator[ProcessCluster]:
    pytest.importorskip("confluent_kafka")
    with ProcessCluster(3, settings=SETTINGS, kafka=True) as running:
        with SettledAdmin(running.bootstrap) as admin:
            admin.create_topic("out", partitions=PARTITIONS, replication_factor=3)
        yield running


Place = tuple[int, int]


def as_written(rows: list[Row]) -> list[tuple[Place, Written]]:
    """Return rows of Spark with the columns of ``selected`` as records with their places."""
    found = []
    for row in rows:
        key, value = (None if one is None else bytes(one) for one in (row.key, row.value))
        headers = tuple((header.key, bytes(header.value)) for header in row.headers or ())
        found.append(((row.partition, row.offset), Written(key, value, headers, row.ms)))
    return found


def selected(frame: DataFrame) -> DataFrame:
    return frame.select("partition", "offset", "key", "value", "headers", sf.unix_millis("timestamp").alias("ms"))


class Streaming:
    """A streaming query that reads the topic ``out`` while it is written, and keeps each row."""

    def __init__(self, spark: SparkSession, bootstrap: str, checkpoint: Path) -> None:
        self._frame = selected(
            spark.readStream.format("sparklog")
            .option("kafka.bootstrap.servers", bootstrap)
            .options(subscribe="out", startingOffsets="earliest", includeHeaders="true")
            .load()
        )
        self._checkpoint = checkpoint
        self.batches: dict[int, list[tuple[Place, Written]]] = {}
        self._query = self._start()

    def __enter__(self) -> Streaming:
        # Spark gives a query's Python process ten seconds to start, which is not always enough on a busy machine.
        def begun() -> bool:
            if "failed to connect back" in str(self._query.exception()):
                self._query = self._start()
            return bool(self._query.recentProgress)

        wait_until(begun, "the query runs")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._query.stop()

    def _start(self) -> StreamingQuery:
        def keep(batch: DataFrame, number: int) -> None:
            self.batches[number] = as_written(batch.collect())

        writer = self._frame.writeStream.foreachBatch(keep).option("checkpointLocation", str(self._checkpoint))
        return writer.start()

    def finish(self) -> dict[Place, Written]:
        """Return all records after the query has read the end of the topic."""
        self._query.processAllAvailable()
        self._query.stop()
        rows = [row for _, batch in sorted(self.batches.items()) for row in batch]
        places = [place for place, _ in rows]
        assert len(set(places)) == len(places), "the stream has a record twice"
        for partition in range(PARTITIONS):
            offsets = [place[1] for place in places if place[0] == partition]
            assert offsets == sorted(offsets)
        return dict(rows)


def read_batch(spark: SparkSession, bootstrap: str) -> dict[Place, Written]:
    frame = (
        spark.read.format("sparklog")
        .option("kafka.bootstrap.servers", bootstrap)
        .options(subscribe="out", includeHeaders="true")
        .load()
    )
    rows = as_written(selected(frame).collect())
    assert len(dict(rows)) == len(rows)
    return dict(rows)


def agreed(spark: SparkSession, cluster: ProcessCluster, streaming: Streaming) -> dict[Place, Written]:
    """Return the records of the topic ``out`` that all readers of committed records agree on."""
    found = read_confluent(cluster.kafka_bootstrap, "out", PARTITIONS)
    assert read_batch(spark, cluster.bootstrap) == found
    assert read_partitions(cluster.bootstrap, "out") == found
    assert streaming.finish() == found
    return found


@pytest.mark.parametrize("library", ["confluent_kafka", "aiokafka"])
def test_spark_reads_the_transactions_that_kafka_consumers_read(
    plain_spark: SparkSession, cluster: ProcessCluster, tmp_path: Path, library: str
) -> None:
    """Transactions are committed and aborted while brokers die, and a stream reads them meanwhile."""
    pytest.importorskip(library)
    create = lambda: PYTHON[library](cluster.kafka_bootstrap, KEY)  # noqa: E731
    with Streaming(plain_spark, cluster.bootstrap, tmp_path) as streaming:
        with Writer(create) as writer:
            writer.wait_progress()
            kill_all_in_turn(cluster, writer)
        check(cluster, writer, create)
        agreed(plain_spark, cluster, streaming)
    stored = read_confluent(cluster.kafka_bootstrap, "out", PARTITIONS, **{"isolation.level": "read_uncommitted"})
    assert "aborted" in writer.outcomes.values() and len(stored) > 12 * writer.commits, "aborted records are stored"


COPIED = 2_000
#: The step after which SIGKILL ends each life of the copying client, and the transaction of that life.
LIVES = [("begun", 3), ("flushed", 4), ("positioned", 2), ("ending", 3), ("flushed", 1), ("ending", 5), ("ending", 2)]


def test_spark_reads_transactions_of_killed_kafka_clients_once(
    plain_spark: SparkSession, cluster: ProcessCluster, tmp_path: Path
) -> None:
    with SettledAdmin(cluster.bootstrap) as admin:
        admin.create_topic("in", partitions=1, replication_factor=3)
    with Producer(cluster.bootstrap) as producer:
        for number in range(COPIED):
            producer.send("in", b"%d" % number, partition=0)
    words = [cluster.kafka_bootstrap, KEY, "in", "out"]
    with Streaming(plain_spark, cluster.bootstrap, tmp_path) as streaming:
        for life, (step, transaction) in enumerate([*LIVES, ("", 0)]):
            steps: Counter[str] = Counter()
            with subprocess.Popen(
                [sys.executable, "-m", "tests.spark.killed_transactions", *words], cwd=ROOT, stdout=subprocess.PIPE
            ) as copier:
                assert copier.stdout is not None
                for line in copier.stdout:
                    steps[line.decode().strip()] += 1
                    if steps[step] == transaction and step:
                        os.kill(copier.pid, signal.SIGKILL)
                        break
                if step and life % 2:
                    broker = find_coordinator(cluster, "transaction", f"id:{KEY}")
                    cluster.kill(broker)
                    cluster.start_broker(broker)
                    wait_in_sync(cluster, ["in", "out", "__transaction_state", "__consumer_offsets"], PATIENCE_S)
            assert copier.returncode == (-signal.SIGKILL if step else 0)
        found = agreed(plain_spark, cluster, streaming)
    assert sorted(int(record.value or b"") for record in found.values()) == list(range(COPIED))
    assert all(record.key == record.value for record in found.values())
    stored = read_confluent(cluster.kafka_bootstrap, "out", PARTITIONS, **{"isolation.level": "read_uncommitted"})
    values = [record.value or b"" for record in stored.values()]
    assert sum(value.startswith(b"dropped") for value in values) >= 25, "aborted records are stored"
    assert len(values) - sum(value.startswith(b"dropped") for value in values) > COPIED, "and those of killed clients"
