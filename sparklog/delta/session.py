"""The settings of a Spark session for Delta: packages, extensions, and settings for archives."""

from __future__ import annotations

import sys

#: The value for ``spark.jars.packages``: the jar that fits the installed Python package.
PACKAGE = "io.delta:delta-spark_4.2_2.13:4.4.0"

#: The settings to apply before the session is created.
SETTINGS: dict[str, str] = {
    "spark.sql.extensions": "io.delta.sql.DeltaSparkSessionExtension",
    "spark.sql.catalog.spark_catalog": "org.apache.spark.sql.delta.catalog.DeltaCatalog",
    # The number of tasks with which Delta reads its own log. With the default of 50 a commit takes seconds.
    "spark.databricks.delta.snapshotPartitions": "2",
    # Spark's default is a type without a unit that other readers take for nanoseconds, which end in the year 2262.
    "spark.sql.parquet.outputTimestampType": "TIMESTAMP_MICROS",
}


def submit_arguments(packages: str = "") -> list[str]:
    """Return the arguments of ``spark-submit`` that load Delta and set what archives need.

    ``packages`` are additional packages, separated by commas.
    """
    settings = [word for name, value in SETTINGS.items() for word in ("--conf", f"{name}={value}")]
    return ["--packages", ",".join(filter(None, (PACKAGE, packages))), *settings]


if __name__ == "__main__":
    sys.stdout.write("\n".join(submit_arguments(*sys.argv[1:])) + "\n")
