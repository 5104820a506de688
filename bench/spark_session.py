"""The Spark session that all rows share: two cores, and Kafka's connector if it is available."""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from pathlib import Path

from pyspark.sql import SparkSession

from sparklog.delta.session import PACKAGE, SETTINGS

_CONF = Path(__file__).resolve().parent.parent / "conf"


def open_session(jars: Sequence[Path], scratch: Path, *, with_delta: bool = False) -> SparkSession:
    os.environ.setdefault("SPARK_CONF_DIR", str(_CONF))
    builder = (
        SparkSession.builder.master("local[2]")
        .appName("sparklog-bench")
        .config("spark.driver.memory", "2g")
        .config("spark.ui.enabled", "false")
        .config("spark.ui.showConsoleProgress", "false")
        .config("spark.driver.host", "127.0.0.1")
        .config("spark.driver.bindAddress", "127.0.0.1")
        .config("spark.local.dir", str(scratch))
        .config("spark.sql.warehouse.dir", str(scratch / "warehouse"))
        .config("spark.sql.shuffle.partitions", "2")
        .config("spark.sql.session.timeZone", "UTC")
    )
    if jars:
        builder = builder.config("spark.jars", ",".join(map(str, jars)))
    if with_delta:
        builder = builder.config("spark.jars.packages", PACKAGE)
        for name, value in SETTINGS.items():
            builder = builder.config(name, value)
    on_interrupt = signal.getsignal(signal.SIGINT)
    spark = builder.getOrCreate()
    signal.signal(signal.SIGINT, on_interrupt)  # Spark's own handler would raise again while clusters stop
    spark.sparkContext.setLogLevel("ERROR")
    return spark
