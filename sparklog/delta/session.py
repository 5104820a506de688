"""What a Spark session needs to know Delta: packages, extensions and settings that suit tables of a log."""

from __future__ import annotations

import sys

#: For ``spark.jars.packages``: the jar of the installed Python package.
PACKAGE = "io.delta:delta-spark_4.2_2.13:4.4.0"

#: To be set before the session is made.
SETTINGS: dict[str, str] = {
    "spark.sql.extensions": "io.delta.sql.DeltaSparkSessionExtension",
    "spark.sql.catalog.spark_catalog": "org.apache.spark.sql.delta.catalog.DeltaCatalog",
    # Delta reads its own log with so many tasks, whatever its size: 50 unless told otherwise, seconds for each commit.
    "spark.databricks.delta.snapshotPartitions": "2",
    # Spark's default is a type without a unit that others read as nanoseconds, which end in the year 2262.
    "spark.sql.parquet.outputTimestampType": "TIMESTAMP_MICROS",
}


def submit_arguments(packages: str = "") -> list[str]:
    """What ``spark-submit`` is told; ``packages``: others that are wanted as well, separated by commas."""
    settings = [word for name, value in SETTINGS.items() for word in ("--conf", f"{name}={value}")]
    return ["--packages", ",".join(filter(None, (PACKAGE, packages))), *settings]


if __name__ == "__main__":
    sys.stdout.write("\n".join(submit_arguments(*sys.argv[1:])) + "\n")
