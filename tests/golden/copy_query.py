"""The query of ``make_0_1_0.py``, from its checkpoint: ``python copy_query.py BOOTSTRAP CHECKPOINT``."""

from __future__ import annotations

import sys

from pyspark.sql import SparkSession

import sparklog

bootstrap, checkpoint = sys.argv[1:]
spark = (
    SparkSession.builder.master("local[1]")
    .config("spark.ui.enabled", "false")
    .config("spark.sql.shuffle.partitions", "1")
    .getOrCreate()
)
sparklog.configure(spark, bootstrap=bootstrap)
frame = spark.readStream.format("sparklog").options(subscribe="default", startingOffsets="earliest").load()
writer = (
    frame.select("key", "value", "timestamp")
    .writeStream.format("sparklog")
    .option("topic", "copy")
    .option("checkpointLocation", checkpoint)
)
assert writer.trigger(availableNow=True).start().awaitTermination(180)
spark.stop()
