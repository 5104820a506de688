"""One Spark session and three real brokers for all tests of this directory."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator

import pytest
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession

from sparklog.client.admin.admin import Admin
from sparklog.spark.configure import configure
from sparklog.testing.process_cluster import ProcessCluster

_QUICK_JVM = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"
_numbers = itertools.count()


@pytest.fixture(scope="package")
def brokers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ProcessCluster]:
    with ProcessCluster(base_dir=tmp_path_factory.mktemp("brokers") / "data") as cluster:
        yield cluster


@pytest.fixture(scope="package")
def plain_spark() -> Iterator[SparkSession]:
    """Yield a session without broker addresses. Its time zone is not UTC, so a missing conversion of a timestamp
    changes the result."""
    spark = (
        SparkSession.builder.master("local[2]")
        .config("spark.driver.extraJavaOptions", _QUICK_JVM)
        .config("spark.ui.enabled", "false")
        .config("spark.python.authenticate.socketTimeout", "60s")  # a busy machine needs more than the default
        .config("spark.sql.shuffle.partitions", "2")
        .config("spark.sql.session.timeZone", "America/New_York")
        .getOrCreate()
    )
    yield spark
    spark.stop()


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
def fails() -> Callable[[Callable[[], object]], str]:
    """Return a function that calls an action, requires that Spark fails it, and returns the error message."""

    def call(action: Callable[[], object]) -> str:
        with pytest.raises(PySparkException) as caught:
            action()
        return str(caught.value)

    return call
