"""A driver to be killed: copies one topic to others, with writers that stop where the test says.

python -m tests.spark.killed_writer <bootstrap> <directory> <from> <to> ...
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

from pyspark.sql import SparkSession

from tests.spark.holding_source import register_holding_source


def main(bootstrap: str, directory: Path, source: str, targets: list[str]) -> None:
    spark = (
        SparkSession.builder.master("local[3,2]")  # a task may fail once
        .config("spark.driver.extraJavaOptions", "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC")
        .config("spark.ui.enabled", "false")
        .config("spark.python.authenticate.socketTimeout", "60s")  # of a busy machine
        .getOrCreate()
    )
    register_holding_source(spark, bootstrap, directory)
    jvm = spark.sparkContext._jvm
    assert jvm is not None
    (directory / "jvm").write_text(str(jvm.java.lang.ProcessHandle.current().pid()))
    for target in targets:
        begin(spark, source, target, directory / f"checkpoint-{target}")
    parent = os.getppid()
    while os.getppid() == parent:  # nobody may be left to kill it
        time.sleep(1)
    os._exit(1)


def begin(spark: SparkSession, source: str, target: str, checkpoint: Path) -> None:
    """Start one query, and wait for its first batch: Spark gives a query's Python process 10 s to come up, which is
    little for several at once on a busy machine, and not always enough for one."""
    while not (checkpoint / "offsets" / "0").exists():
        frame = spark.readStream.format("sparklog").option("subscribe", source).option("startingOffsets", "earliest")
        writer = frame.load().select("x").writeStream.format("sparklog").option("topic", target)
        query = writer.option("checkpointLocation", str(checkpoint)).start()
        while query.isActive and not (checkpoint / "offsets" / "0").exists():
            time.sleep(0.1)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), sys.argv[3], sys.argv[4:])
