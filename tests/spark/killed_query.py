"""A driver to be killed: starts a query with each set of options given, and stays in their first batches.

python -m tests.spark.killed_query <bootstrap> <JSON: [[checkpoint, {option: value}], ...]>
"""

from __future__ import annotations

import json
import os
import sys
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
    started = []
    for checkpoint, options in json.loads(queries):
        frame = spark.readStream.format("sparklog").options(**options).load()
        started.append(frame.writeStream.foreachBatch(_stay).option("checkpointLocation", checkpoint).start())
    parent = os.getppid()
    while os.getppid() == parent and all(query.isActive for query in started):
        time.sleep(0.5)
    # A query has failed, or nobody is left to kill this process.
    print(*(query.exception() for query in started), flush=True)
    os._exit(1)


def _stay(_: DataFrame, batch_id: int) -> None:
    print("in batch", batch_id, flush=True)
    time.sleep(300)


if __name__ == "__main__":
    main(*sys.argv[1:])
