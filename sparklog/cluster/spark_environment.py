"""The default Spark settings of the cluster job, which are set before Spark's JVM starts.

The settings are put at the front of PYSPARK_SUBMIT_ARGS, so the user's arguments, which come later, override them.
Settings of a session builder in Python would override the user's arguments.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import shutil
from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path

from sparklog.cluster.options import LOOPBACK, create_data_dir, is_in_driver, is_one_machine
from sparklog.cluster.process import identify
from sparklog.errors import ClusterError
from sparklog.net.user_directory import user_directory
from sparklog.storage.disk import PRIVATE_DIRECTORY

#: Options that make JVMs start fast. In the cluster job the JVMs only start brokers, which are separate processes, so
#: the speed of the JVMs after their start does not matter. The options would slow down Spark SQL, so only the cluster
#: job uses them.
_QUICK_JVM = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"
#: The environment variable with the port of the JVM that started this process. spark-submit sets it.
_GATEWAY = "PYSPARK_GATEWAY_PORT"
#: The settings with which Spark's processes on several hosts authenticate each other and encrypt what they send. The
#: default cipher does not notice changed bytes, and the fallback would permit a login without encryption. Spark writes
#: the closures of tasks, which have the cluster's secret, to local disks; so these files are encrypted too.
PRIVATE_CHANNEL = {
    "spark.authenticate": "true",
    "spark.network.crypto.enabled": "true",
    "spark.network.crypto.cipher": "AES/GCM/NoPadding",
    "spark.network.crypto.saslFallback": "false",
    "spark.io.encryption.enabled": "true",
    "spark.ui.killEnabled": "false",
}
#: Spark's default master.
_SPARKS_OWN_MASTER = "local[*]"


def submitted_master(environment: Mapping[str, str]) -> str | None:
    """Return the Spark master that the user set by option or in a configuration file, or None."""
    found: str | None = None
    properties: str | None = None
    arguments = _options(shlex.split(environment.get("PYSPARK_SUBMIT_ARGS", "")))
    for option, value in arguments:
        if option == "--master":
            return value
        if option in {"--conf", "-c"} and value.startswith("spark.master="):
            found = value.partition("=")[2]
        if option == "--properties-file":
            properties = value
    if found is None:
        conf_dir = environment.get("SPARK_CONF_DIR", "")
        path = Path(properties) if properties else Path(conf_dir) / "spark-defaults.conf" if conf_dir else None
        if path is not None and path.is_file():
            for line in path.read_text().splitlines():
                words = line.replace("=", " ", 1).split(maxsplit=1)
                if len(words) == 2 and words[0] == "spark.master":
                    found = words[1].strip()
    return found


def _running_master() -> str:
    """Return the master of the JVM that started this process. Only the configuration of that JVM has it."""
    from py4j.protocol import Py4JError
    from pyspark import SparkConf, SparkContext

    try:
        SparkContext._ensure_initialized()
        return SparkConf().get("spark.master") or _SPARKS_OWN_MASTER
    except (Py4JError, OSError) as error:
        raise ClusterError(f"the JVM that started this process does not respond: {error}") from error


def _options(words: list[str]) -> Iterator[tuple[str, str]]:
    following = iter(words)
    for word in following:
        option, equals, value = word.partition("=")
        if word.startswith("-"):
            yield (option, value) if equals else (word, next(following, ""))


def prepare(
    environment: dict[str, str] | os._Environ[str], *, brokers: int, data_dir: Path, secure: bool = False
) -> str:
    """Set the cluster job's default Spark settings in ``environment``. Return the master that Spark will use.

    With ``secure``, Spark's processes on several hosts authenticate each other and encrypt what they send.

    If a JVM started this process, as with ``spark-submit`` and ``--deploy-mode cluster``, that JVM already has its
    settings, and this function sets nothing.

    Raises:
        ClusterError: that JVM does not respond.
    """
    if _GATEWAY in environment:
        return _running_master()
    master = submitted_master(environment)
    settings = {
        "spark.app.name": "sparklog",
        "spark.driver.extraJavaOptions": _QUICK_JVM,
        "spark.executor.extraJavaOptions": _QUICK_JVM,
    }
    if master is None:
        master = f"local-cluster[{brokers},2,1024]"
        settings["spark.master"] = master
    if master.startswith("local-cluster"):
        environment["SPARK_HOME"] = str(spark_home(data_dir / "spark", environment.get("SPARK_HOME")))
    if secure and not is_one_machine(master):
        settings |= PRIVATE_CHANNEL | _private_sockets()
    _submit(environment, settings | _closed_to_others(environment, master))
    return master


def close_to_others(environment: dict[str, str] | os._Environ[str]) -> None:
    """Set in ``environment`` the settings that close Spark's ports to other hosts and users.

    This function is for jobs that change no other Spark settings. It closes no ports if Spark may use other machines,
    or if Spark's JVM already runs.
    """
    if _GATEWAY in environment:
        return
    # Spark uses this variable if no option or file sets the master.
    master = submitted_master(environment) or environment.get("MASTER") or _SPARKS_OWN_MASTER
    _submit(environment, _closed_to_others(environment, master))


def _closed_to_others(environment: dict[str, str] | os._Environ[str], master: str) -> dict[str, str]:
    """Return the settings that close the ports of a Spark on one machine to others, or none for other masters.

    A process that reaches a port of Spark's driver, Master, Workers or executors can run programs as their user, and
    Spark's web pages can end jobs and applications. ``SPARK_LOCAL_IP`` sets the address of all these ports. An address
    that the user has set is kept. Loopback excludes other hosts, and authentication excludes other users of this
    machine. On ``local-cluster``, authentication needs a secret; see ``spark_access``.
    """
    if not is_one_machine(master):
        return {}
    address = environment.setdefault("SPARK_LOCAL_IP", LOOPBACK)
    return {
        # Otherwise Spark resolves the host name of this address and binds to the result.
        "spark.driver.host": address,
        "spark.driver.bindAddress": address,
        "spark.authenticate": "true",
        "spark.ui.killEnabled": "false",
        **_private_sockets(),
        # By default, any user of the Master's host may decommission its Workers.
        **({} if is_in_driver(master) else {"spark.master.ui.decommission.allow.mode": "DENY"}),
    }


def _private_sockets() -> dict[str, str]:
    """Return the setting of the directory for the sockets between JVMs and Python, which only this user can enter.

    Over these sockets Spark asks for no secret. On other hosts ``spark.worker_daemon`` creates the directory.
    """
    return {"spark.python.unix.domain.socket.dir": str(user_directory())}


def _submit(environment: dict[str, str] | os._Environ[str], settings: Mapping[str, str]) -> None:
    given = environment.get("PYSPARK_SUBMIT_ARGS", "pyspark-shell")
    ours = [f"--conf {shlex.quote(f'{key}={value}')}" for key, value in settings.items()]
    environment["PYSPARK_SUBMIT_ARGS"] = " ".join([*ours, given])


def spark_home(directory: Path, real: str | None = None) -> Path:
    """Create and return a Spark home with links to the contents of the real one, but with a new directory ``work``.

    The executors of local-cluster run in ``$SPARK_HOME/work``, and Spark has no setting for this path. If pip installed
    pyspark, this path is in site-packages, which may not be writable and would grow. Each driver process has a Spark
    home named after its pid, and removes the homes of dead processes. Call ``remove_spark_home`` at the end.
    """
    source = Path(real) if real else _pyspark_home()
    create_data_dir(directory.parent)
    directory.mkdir(PRIVATE_DIRECTORY, exist_ok=True)
    with contextlib.suppress(PermissionError):  # the directory is another user's
        directory.chmod(PRIVATE_DIRECTORY)  # the logs of executors are for this user alone
    for other in directory.iterdir():
        if other.name.isdigit() and identify(int(other.name)) is None:
            shutil.rmtree(other, ignore_errors=True)
    home = directory / str(os.getpid())
    shutil.rmtree(home, ignore_errors=True)
    (home / "work").mkdir(parents=True)
    for entry in source.iterdir():
        if entry.name != "work":
            (home / entry.name).symlink_to(entry)
    return home


def remove_spark_home(data_dir: Path) -> None:
    """Remove this driver's Spark home with the files of its executors. Remove links, but not their targets."""
    shutil.rmtree(data_dir / "spark" / str(os.getpid()), ignore_errors=True)


def _pyspark_home() -> Path:
    spec = find_spec("pyspark")
    if spec is None or spec.origin is None:
        raise ClusterError("pyspark is not installed in this environment")
    return Path(spec.origin).parent
