"""The demonstration: it writes rows with Spark, kills two processes meanwhile, reads the rows, and compares them."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
from pyspark.sql import SparkSession

from sparklog.client.admin.admin import Admin
from sparklog.demo.evidence import Duplicates, await_replicas, compare_rows, compare_segments
from sparklog.demo.faults import FaultThread, replicated_rows
from sparklog.demo.flights import EVENT_TIME, KEY_COLUMNS, load_flights, write_slices
from sparklog.demo.story import Story

TOPIC = "flights"
PARTITIONS = 6
REPLICAS = 3
#: The number of tasks of the write. There are many, so that only a few of them run when an executor is killed.
SLICES = 48
#: The size of segments: small, so that there are sealed segments to compare.
SEGMENT_BYTES = 1024 * 1024
_WAIT_S = 90.0
_JOB_GROUP = "sparklog-demo-write"


def run(spark: SparkSession, bootstrap: str, *, scratch: Path, story: Story) -> bool:
    """Run the demonstration on the cluster at ``bootstrap``; return whether all comparisons found no difference.

    ``scratch`` is an empty directory that all executors see. The Spark session must be configured with ``bootstrap``.

    Raises:
        SparklogError: the run is not complete: a process was not killed, replicas did not catch up, or there is no
            executor.
    """
    source = load_flights()
    slice_rows = write_slices(source, scratch / "flights", SLICES)
    with Admin(bootstrap, client_id="sparklog-demo") as admin:
        admin.create_topic(
            TOPIC,
            partitions=PARTITIONS,
            replication_factor=REPLICAS,
            schema=source.schema,
            key=KEY_COLUMNS,
            event_time=EVENT_TIME,
            # No retention, because it uses the event time and the flights are of 2013.
            config={"segment.bytes": SEGMENT_BYTES, "retention.ms": -1},
        )
        story.tell(
            "topic created", f"{TOPIC}, {PARTITIONS} partitions, {REPLICAS} replicas, {len(source.schema)} columns"
        )
        run_again = _write(spark, bootstrap, scratch / "flights", rows=source.num_rows, story=story)
        story.tell(
            "write over", f"{replicated_rows(admin, TOPIC):,} offsets in the log; tasks run again by Spark: {run_again}"
        )
        found = _read(spark)
        story.tell("read back", f"{found.num_rows:,} rows")
        duplicates = compare_rows(source, found, slice_rows=slice_rows, story=story)
        waited = await_replicas(admin, TOPIC, within_s=_WAIT_S)
        story.tell("replicas in sync", f"{REPLICAS} of {REPLICAS} on every partition, {waited:.1f} s after the read")
        compare_segments(admin, TOPIC, within_s=_WAIT_S, story=story)
    story.print_tables()
    story.console.print(_explain(duplicates, run_again), highlight=False)
    return story.all_equal


def _write(spark: SparkSession, bootstrap: str, slices: Path, *, rows: int, story: Story) -> int:
    """Write the slices in one Spark job, and kill processes meanwhile; return the number of retried tasks."""
    context = spark.sparkContext
    context.setJobGroup(_JOB_GROUP, "flights into the log")
    spark.conf.set("spark.sql.files.maxPartitionBytes", "4m")  # opening a file counts as 4 MB: one file a task
    flights = spark.read.parquet(str(slices))
    faults = FaultThread(spark, bootstrap, TOPIC, first=rows // 6, second=rows // 2, story=story)
    faults.start()
    story.tell("write started", f"{rows:,} rows in {flights.rdd.getNumPartitions()} tasks, acks=all")
    flights.write.format("sparklog").option("topic", TOPIC).mode("append").save()
    faults.finish()
    tracker = context.statusTracker()
    jobs = [tracker.getJobInfo(job) for job in tracker.getJobIdsForGroup(_JOB_GROUP)]
    stages = [tracker.getStageInfo(stage) for job in jobs if job for stage in job.stageIds]
    return sum(stage.numFailedTasks for stage in stages if stage)


def _read(spark: SparkSession) -> pa.Table:
    return spark.read.format("sparklog").option("subscribe", TOPIC).load().toArrow()


def _explain(duplicates: Duplicates, run_again: int) -> str:
    if duplicates.rows:
        return (
            f"{duplicates.rows:,} rows are in the log twice, from {duplicates.slices} of {SLICES} tasks; {run_again} "
            "tasks were run again by Spark. The write is exactly once: that is a defect."
        )
    return (
        f"No row is in the log twice. Spark ran {run_again} tasks again, and the commit has aborted the rows of their "
        "earlier attempts. The retries of a producer have sequence numbers."
    )
