"""``sparklog.configure``: register the source with a session, with brokers to ask where a query names none.

Session settings do not reach the processes in which Spark plans a Python source; a class does, because Spark sends
it pickled. So the default travels as an attribute of a subclass made here, which overrides the source that pyspark
found by itself. ``spark.newSession()`` does not inherit it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, ClassVar

from sparklog.client.cluster.bootstrap import parse_bootstrap
from sparklog.spark.source import SparklogSource
from sparklog.spark.worker_python import choose_worker_python

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

#: Where ``configure`` leaves the addresses.
BOOTSTRAP_SETTING = "spark.sparklog.bootstrap.servers"


def configure(spark: SparkSession, *, bootstrap: str | Iterable[str]) -> None:
    """Make ``format("sparklog")`` of this session ask ``bootstrap`` unless an option says otherwise.

    Where no Python is named for Spark's workers, those on this machine run the program's own from then on; for others a
    warning says what to set.

    Raises:
        ConfigError: ``bootstrap`` holds no address.
    """
    addresses = ",".join(str(address) for address in parse_bootstrap(bootstrap))

    # Of Spark Connect's sessions, which have no context, the server chooses. Before the source is registered with it.
    if (context := getattr(spark, "sparkContext", None)) is not None:
        choose_worker_python(context)

    class ConfiguredSource(SparklogSource):
        """Local to the call, so that it is pickled by value, with its default."""

        defaults: ClassVar[Mapping[str, str]] = {"bootstrap.servers": addresses}

    spark.dataSource.register(ConfiguredSource)
    # For functions that plan a read themselves, in the session's own process.
    spark.conf.set(BOOTSTRAP_SETTING, addresses)
