"""One Spark session with Delta and one small cluster for all tests of this directory."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path

import pytest
from pyspark import SparkContext
from pyspark.sql import SparkSession

from sparklog.client.admin.admin import Admin
from sparklog.delta.session import PACKAGE, SETTINGS
from sparklog.spark.configure import configure
from sparklog.testing.process_cluster import ProcessCluster

# With one compiler Java keeps 48 MB for what it compiles, and compiles no more when Spark's plans have filled them.
QUICK_JVM = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC -XX:ReservedCodeCacheSize=240m"
#: Spark makes a Java class for each plan and compiles it: a fifth of the processor time of tests whose tables have a
#: few rows. Tests of killed archives and those of tests/spark have it compile them.
INTERPRETED = {"spark.sql.codegen.wholeStage": "false", "spark.sql.codegen.factoryMode": "NO_CODEGEN"}
_numbers = itertools.count()


@pytest.fixture(scope="package")
def brokers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ProcessCluster]:
    with ProcessCluster(1, base_dir=tmp_path_factory.mktemp("brokers") / "data") as cluster:
        yield cluster


@pytest.fixture(scope="package")
def plain_spark(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SparkSession]:
    """A session that knows Delta and no brokers. Its zone is not UTC, so that times that are not converted show."""
    builder = (
        SparkSession.builder.master("local[2]")
        .config("spark.jars.packages", PACKAGE)
        .config("spark.driver.extraJavaOptions", QUICK_JVM)
        .config("spark.ui.enabled", "false")
        .config("spark.ui.showConsoleProgress", "false")
        .config("spark.python.authenticate.socketTimeout", "60s")  # of a busy machine
        .config("spark.sql.shuffle.partitions", "2")
        .config("spark.sql.session.timeZone", "America/New_York")
        .config("spark.sql.warehouse.dir", str(tmp_path_factory.mktemp("warehouse")))
    )
    for name, value in {**SETTINGS, **INTERPRETED}.items():
        builder = builder.config(name, value)
    _end_java()
    spark = builder.getOrCreate()
    yield spark
    spark.stop()
    _end_java()


def _end_java() -> None:
    """A process's first session starts Java, with the jars that it names; what later ones name it gets no more. And
    settings of the first stay those of all that follow."""
    gateway = SparkContext._gateway
    if gateway is not None:
        gateway.shutdown()
        gateway.proc.stdin.close()
        gateway.proc.wait(60)
        SparkContext._gateway = SparkContext._jvm = None


@pytest.fixture
def spark(plain_spark: SparkSession, brokers: ProcessCluster) -> SparkSession:
    configure(plain_spark, bootstrap=brokers.bootstrap)
    return plain_spark


@pytest.fixture(scope="package")
def admin(brokers: ProcessCluster) -> Iterator[Admin]:
    with Admin(brokers.bootstrap) as client:
        yield client


@pytest.fixture
def topic() -> str:
    """A name that no other test uses."""
    return f"topic-{next(_numbers)}"


@pytest.fixture
def lake(tmp_path: Path) -> str:
    """Where a test's tables lie."""
    return str(tmp_path / "lake")
