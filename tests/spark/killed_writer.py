"""A driver that a test kills: it copies one topic to others, with writers that stop where the test says.

Slow tasks get a second attempt. ``<to>`` is one topic for a streaming query. ``a+b`` is a batch write of that name to
two topics, whose rows name their topic: even values ``a``, odd values ``b``. The batch write begins when the file
``<directory>/filled`` exists.

python -m tests.spark.killed_writer <master> <bootstrap> <directory> <from> <to> ...

``<directory>/<to>.failed`` receives the error of a failed query.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from pathlib import Path

from pyspark.sql import SparkSession
from pyspark.sql import functions as sf
from pyspark.sql.streaming.query import StreamingQuery

from tests.spark.holding_source import register_holding_source

_QUICK_JVM = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"


def main(master: str, bootstrap: str, directory: Path, source: str, targets: list[str]) -> None:
    spark = (
        SparkSession.builder.master(master)
        .config("spark.driver.extraJavaOptions", _QUICK_JVM)
        .config("spark.executor.extraJavaOptions", _QUICK_JVM)
        .config("spark.executor.memory", "512m")
        .config("spark.driver.host", "127.0.0.1")
        .config("spark.ui.enabled", "false")
        .config("spark.python.authenticate.socketTimeout", "60s")  # a busy machine needs more than the default
        .config("spark.speculation", "true")
        .config("spark.speculation.quantile", "0.5")
        .config("spark.speculation.multiplier", "1")
        .config("spark.speculation.efficiency.enabled", "false")
        .config("spark.speculation.interval", "200ms")
        .getOrCreate()
    )
    register_holding_source(spark, bootstrap, directory)
    jvm = spark.sparkContext._jvm
    assert jvm is not None
    (directory / "jvm").write_text(str(jvm.java.lang.ProcessHandle.current().pid()))
    queries = {
        target: begin(spark, source, target, directory / f"checkpoint-{target}")
        for target in targets
        if "+" not in target
    }
    watcher = threading.Thread(target=watch, args=(directory, queries))
    watcher.start()
    for pair in targets:
        if "+" in pair:  # in the session's thread: Spark does not find the source in another one
            spread(spark, source, pair, directory / "filled")
    watcher.join()


def watch(directory: Path, queries: dict[str, StreamingQuery]) -> None:
    parent = os.getppid()
    while os.getppid() == parent:  # the driver exits with the test that would kill it
        for target, query in queries.items():
            if (error := query.exception()) is not None:
                (directory / f"{target}.failed").write_text(str(error))
        time.sleep(0.2)
    os._exit(1)


def begin(spark: SparkSession, source: str, target: str, checkpoint: Path) -> StreamingQuery:
    """Start one query and wait for its first batch.

    Spark gives a query's Python process 10 s to start. That is not always enough for several at once on a busy machine,
    so the query is started again until it has begun a batch.
    """
    while True:
        frame = spark.readStream.format("sparklog").option("subscribe", source).option("startingOffsets", "earliest")
        writer = frame.load().select("x").writeStream.format("sparklog").option("topic", target)
        query = writer.option("checkpointLocation", str(checkpoint)).start()
        while query.isActive and not (checkpoint / "offsets" / "0").exists():
            time.sleep(0.1)
        if (checkpoint / "offsets" / "0").exists():
            return query


def spread(spark: SparkSession, source: str, pair: str, filled: Path) -> None:
    """Write all records of ``source`` to the pair's two topics, in a batch write with the name ``pair`` and version
    1."""
    while not filled.exists():
        time.sleep(0.1)
    even, odd = pair.split("+")
    topic = sf.when(sf.col("x") % 2 == 0, even).otherwise(odd).alias("topic")
    rows = spark.read.format("sparklog").option("subscribe", source).load().select("x", topic)
    rows.write.format("sparklog").options(txnAppId=pair, txnVersion="1").mode("append").save()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], Path(sys.argv[3]), sys.argv[4], sys.argv[5:])
