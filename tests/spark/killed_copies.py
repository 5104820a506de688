"""A driver that a test kills: each of its queries copies the topic ``source`` to a topic of its own.

A query has the name ``<source format>-<sink format>``, such as ``kafka-sparklog``. Its target has the same name.
A record keeps its key, its value and its partition.

python -m tests.spark.killed_copies <bootstrap> <Kafka bootstrap> <directory> <mode> <query> ...

The mode is ``continuous``, or ``once`` to copy the existing records and end.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

from pyspark.sql import SparkSession
from pyspark.sql.streaming.query import StreamingQuery

SOURCE = "source"


def main(bootstrap: str, kafka_bootstrap: str, directory: Path, mode: str, names: list[str]) -> None:
    threading.Thread(target=_end_with, args=(os.getppid(),), daemon=True).start()
    spark = (
        SparkSession.builder.master("local[2,8]")  # a task has eight attempts, as on a cluster
        .config("spark.driver.extraJavaOptions", "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC")
        .config("spark.driver.memory", "640m")
        .config("spark.ui.enabled", "false")
        .config("spark.python.authenticate.socketTimeout", "60s")  # a busy machine needs more than the default
        .config("spark.local.dir", str(directory / "local"))
        .getOrCreate()
    )
    addresses = {"kafka": kafka_bootstrap, "sparklog": bootstrap}

    def start(name: str) -> StreamingQuery:
        source, sink = name.split("-")
        frame = (
            spark.readStream.format(source)
            .option("kafka.bootstrap.servers", addresses[source])
            .option("subscribe", SOURCE)
            .option("startingOffsets", "earliest")
            .option("maxOffsetsPerTrigger", "2000")
            .load()
        )
        writer = (
            frame.select("key", "value", "partition")
            .writeStream.format(sink)
            .option("kafka.bootstrap.servers", addresses[sink])
            .option("topic", name)
            .option("checkpointLocation", str(directory / f"checkpoint-{name}"))
        )
        return (writer.trigger(availableNow=True) if mode == "once" else writer).start()

    _run(names, start)
    spark.stop()


def _run(names: list[str], start: Callable[[str], StreamingQuery]) -> None:
    """Run the queries until all have ended. Raise the error of the first query that fails."""
    queries = {name: start(name) for name in names}
    while queries:
        for name, query in list(queries.items()):
            if query.isActive:
                continue
            error = query.exception()
            if error is None:
                del queries[name]
            elif "failed to connect back" in str(error):
                # Spark gives a query's Python process ten seconds to start, which is not always enough.
                queries[name] = start(name)
            else:
                raise RuntimeError(f"query {name} failed") from error
        time.sleep(0.1)


def _end_with(parent: int) -> None:
    """Exit when the test that would kill this process has ended."""
    while os.getppid() == parent:
        time.sleep(0.5)
    os._exit(1)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], Path(sys.argv[3]), sys.argv[4], sys.argv[5:])
