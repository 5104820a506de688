"""``sparklog.configure``: register the source with a session, with default brokers for queries that set none.

Session settings do not reach the processes in which Spark plans a Python source, but a class does, because Spark
pickles it. So the default is an attribute of a subclass created here, which replaces the source that pyspark
discovered. ``spark.newSession()`` does not inherit it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, ClassVar

from sparklog.client.cluster.bootstrap import parse_bootstrap
from sparklog.spark.source import SparklogSource
from sparklog.spark.worker_python import choose_worker_python

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

#: Session setting in which ``configure`` stores the addresses.
BOOTSTRAP_SETTING = "spark.sparklog.bootstrap.servers"


def configure(spark: SparkSession, *, bootstrap: str | Iterable[str]) -> None:
    """Make ``format("sparklog")`` of this session use ``bootstrap`` unless an option sets other brokers.

    If no Python is configured for Spark's workers, workers on this machine use the program's own Python from then on;
    for workers on other hosts a warning says what to set.

    Raises:
        ConfigError: ``bootstrap`` contains no address.
    """
    addresses = ",".join(str(address) for address in parse_bootstrap(bootstrap))

    # Must precede the registration of the source. A Spark Connect session has no context: its server chooses the
    # Python.
    if (context := getattr(spark, "sparkContext", None)) is not None:
        choose_worker_python(context)

    class ConfiguredSource(SparklogSource):
        """Source with default brokers. Local to the call, so that it is pickled by value, with its default."""

        defaults: ClassVar[Mapping[str, str]] = {"bootstrap.servers": addresses}

    spark.dataSource.register(ConfiguredSource)
    # For functions that plan a read in the session's own process.
    spark.conf.set(BOOTSTRAP_SETTING, addresses)
