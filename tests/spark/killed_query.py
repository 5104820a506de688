"""A driver that a test kills: it starts one query for each set of options, and stays in their first batches.

python -m tests.spark.killed_query <bootstrap> <JSON: [[checkpoint, {option: value}], ...]>

It prints a line when all queries are in their first batch.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time

from pyspark.sql import DataFrame, SparkSession

from sparklog.spark.configure import configure


def main(bootstrap: str, queries: str) -> None:
    spark = (
        SparkSession.builder.master("local[1]")
        .config("spark.driver.extraJavaOptions", "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC")
        .config("spark.ui.enabled", "false")
        .getOrCreate()
    )
    configure(spark, bootstrap=bootstrap)
    for checkpoint, options in json.loads(queries):
        _enter(spark, checkpoint, options)
    print("in their first batches", flush=True)
    parent = os.getppid()
    while os.getppid() == parent:  # the driver exits with the test that would kill it
        time.sleep(0.5)
    os._exit(1)


def _enter(spark: SparkSession, checkpoint: str, options: dict[str, str]) -> None:
    entered = threading.Event()

    def stay(_: DataFrame, batch_id: int) -> None:
        assert batch_id == 0
        entered.set()
        time.sleep(900)

    frame = spark.readStream.format("sparklog").options(**options).load()
    query = frame.writeStream.foreachBatch(stay).option("checkpointLocation", checkpoint).start()
    while not entered.wait(0.1):
        if (error := query.exception()) is not None:
            # Spark gives a Python process ten seconds to start, which is not always enough on a busy machine.
            if "failed to connect back" not in str(error):
                raise error
            _enter(spark, checkpoint, options)
            return


if __name__ == "__main__":
    main(*sys.argv[1:])
