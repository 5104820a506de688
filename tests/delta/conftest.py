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

# With one compiler Java has 48 MB for compiled code, and compiles nothing more after Spark's plans have filled them.
QUICK_JVM = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC -XX:ReservedCodeCacheSize=240m"
#: Spark generates and compiles a Java class for each plan. That is a fifth of the processor time of tests whose tables
#: have a few rows. Only the tests of killed archives and those of tests/spark keep it.
INTERPRETED = {"spark.sql.codegen.wholeStage": "false", "spark.sql.codegen.factoryMode": "NO_CODEGEN"}
_numbers = itertools.count()


@pytest.fixture(scope="package")
def brokers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ProcessCluster]:
    with ProcessCluster(1, base_dir=tmp_path_factory.mktemp("brokers") / "data") as cluster:
        yield cluster


@pytest.fixture(scope="package")
def plain_spark(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SparkSession]:
    """Yield a session with Delta and without broker addresses. Its time zone is not UTC, so a missing conversion of
    a timestamp changes the result."""
    builder = (
        SparkSession.builder.master("local[2]")
        .config("spark.jars.packages", PACKAGE)
        .config("spark.driver.extraJavaOptions", QUICK_JVM)
        .config("spark.ui.enabled", "false")
        .config("spark.ui.showConsoleProgress", "false")
        .config("spark.python.authenticate.socketTimeout", "60s")  # a busy machine needs more than the default
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
    """Stop Java, so that the next session starts it again.

    The first session of a process starts Java with its jars. Jars that a later session names are not loaded, and the
    settings of the first session stay for all later ones.
    """
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
    """Return a topic name that no other test uses."""
    return f"topic-{next(_numbers)}"


@pytest.fixture
def lake(tmp_path: Path) -> str:
    """Return the directory of a test's tables."""
    return str(tmp_path / "lake")
