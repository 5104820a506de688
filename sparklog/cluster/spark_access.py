"""The protection of Spark's ports against other users and hosts, by a secret and, between hosts, by encryption.

A client that Spark accepts can run programs over the ports of the driver, Master, Workers and executors.
``spark_environment`` binds these ports to loopback before Spark's JVM starts, and authentication excludes other users
of the machine. With ``local`` and YARN Spark generates the secret itself. With every other master the configuration
must have one.

A secret in PYSPARK_SUBMIT_ARGS or in the settings of a session builder would be in the command line of Spark's JVM,
which every user of the machine can read. This module passes the secret to the JVM over py4j's authenticated connection.
The JVM passes it to executors in their environment (``_SPARK_AUTH_SECRET``), which only the same user can read.
"""

from __future__ import annotations

import secrets

from pyspark import SparkContext

from sparklog.cluster.options import LOOPBACK, is_one_machine
from sparklog.cluster.spark_environment import PRIVATE_CHANNEL
from sparklog.errors import ConfigError

_SECRET = "spark.authenticate.secret"
_SECRET_BYTES = 32


def share_secret() -> None:
    """Start Spark's JVM unless it already runs. If Spark needs a secret and has none, give the JVM a new secret.

    Call this before the process creates its SparkContext or SparkSession.
    """
    SparkContext._ensure_initialized()
    assert SparkContext._jvm is not None
    properties = SparkContext._jvm.java.lang.System
    if not str(properties.getProperty("spark.master") or "").startswith("local-cluster"):
        return
    if properties.getProperty("spark.authenticate") == "true" and not properties.getProperty(_SECRET):
        properties.setProperty(_SECRET, secrets.token_hex(_SECRET_BYTES))


def require_private_channel(context: SparkContext) -> None:
    """Check that Spark's processes authenticate each other, and encrypt what they send.

    Raises:
        ConfigError: they do not. The message names the settings.
    """
    settings = context.getConf()
    by_tls = settings.get("spark.ssl.rpc.enabled") == "true"
    by_spark = all(
        settings.get(name) == PRIVATE_CHANNEL[name] for name in PRIVATE_CHANNEL if name.startswith("spark.network.")
    )
    if settings.get("spark.authenticate") != "true" or not (by_tls or by_spark):
        wanted = ", ".join(
            f"{name}={PRIVATE_CHANNEL[name]}"
            for name in PRIVATE_CHANNEL
            if not name.startswith(("spark.io", "spark.ui"))
        )
        raise ConfigError(
            f"--secure on several hosts needs a Spark that authenticates its processes and encrypts what they send:"
            f" set {wanted}, and the same spark.authenticate.secret on the Master, the Workers and the driver"
        )


def executor_hosts(context: SparkContext) -> list[str]:
    """Return the hosts of the driver and of the executors, as Spark knows them."""
    found = context._jsc.sc().statusTracker().getExecutorInfos()
    return [str(executor.host()) for executor in found]


def exposure(context: SparkContext) -> str:
    """Return a warning if other users or hosts can run programs over the ports of ``context``, or an empty string.

    The warning names these users or hosts, and the settings that keep them out. This function covers only masters that
    run Spark on one machine (``local`` and ``local-cluster``). For any other master it returns an empty string.
    """
    assert context.master is not None and context._jvm is not None
    if not is_one_machine(context.master):
        return ""
    settings = context.getConf()
    address = settings.get("spark.driver.bindAddress") or settings.get("spark.driver.host") or ""
    is_loopback = context._jvm.java.net.InetAddress.getByName(address).isLoopbackAddress()
    if is_loopback and settings.get("spark.authenticate") == "true":
        return ""
    who = "other users of this machine" if is_loopback else "other hosts and other users of this machine"
    return (
        f"Spark listens on {address}, where {who} can run programs as the user of this process: before the session is"
        f" made, set SPARK_LOCAL_IP={LOOPBACK} in the environment, and spark.authenticate=true and"
        " spark.ui.killEnabled=false in its configuration"
    )
