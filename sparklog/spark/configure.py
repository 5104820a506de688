"""``sparklog.configure``, which registers the source with a session, with default brokers for queries that set none.

Spark does not pass session settings to the processes in which it plans a Python source, but it pickles the source's
class. So the default is an attribute of a subclass that is created here. The subclass replaces the source that pyspark
has found. ``spark.newSession()`` does not inherit it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, ClassVar

from sparklog.client.cluster.bootstrap import parse_bootstrap
from sparklog.spark.source import SparklogSource
from sparklog.spark.worker_python import choose_worker_python

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

#: The session setting in which ``configure`` stores the addresses.
BOOTSTRAP_SETTING = "spark.sparklog.bootstrap.servers"


def configure(spark: SparkSession, *, bootstrap: str | Iterable[str]) -> None:
    """Make ``format("sparklog")`` of this session use ``bootstrap`` unless an option sets other brokers.

    If no Python is configured for Spark's workers, workers on this machine use the program's own Python from then on.
    If workers run on other hosts, a warning says what to set.

    Raises:
        ConfigError: ``bootstrap`` contains no address.
    """
    addresses = ",".join(str(address) for address in parse_bootstrap(bootstrap))

    # This must precede the registration of the source. A Spark Connect session has no context, because its server
    # chooses the Python.
    if (context := getattr(spark, "sparkContext", None)) is not None:
        choose_worker_python(context)

    class ConfiguredSource(SparklogSource):
        """The source with default brokers.

        The class is local to the call, so that it is pickled by value, with its defaults.
        """

        defaults: ClassVar[Mapping[str, str]] = {"bootstrap.servers": addresses}

    spark.dataSource.register(ConfiguredSource)
    # Functions that plan a read in the session's own process use this setting.
    spark.conf.set(BOOTSTRAP_SETTING, addresses)
