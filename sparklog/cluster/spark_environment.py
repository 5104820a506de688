"""What the cluster job sets for Spark before its JVM starts, where the user has not.

Everything goes through PYSPARK_SUBMIT_ARGS, in front of what is there: what the user gave comes later and wins, while
settings made on a session from Python would win over the user's.
"""

from __future__ import annotations

import os
import shlex
import shutil
from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path

from sparklog.cluster.process import identify
from sparklog.errors import ClusterError

#: Brokers are processes of their own and the JVMs only start them: quick to start counts, peak speed does not. Spark
#: SQL would suffer, so this is for the cluster job alone.
_QUICK_JVM = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"


def submitted_master(environment: Mapping[str, str]) -> str | None:
    """The master the user asked for, by option or by configuration file; None: none."""
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


def _options(words: list[str]) -> Iterator[tuple[str, str]]:
    following = iter(words)
    for word in following:
        option, equals, value = word.partition("=")
        if word.startswith("-"):
            yield (option, value) if equals else (word, next(following, ""))


def prepare(environment: dict[str, str] | os._Environ[str], *, brokers: int, data_dir: Path) -> str:
    """Set the defaults of the cluster job in ``environment``; return the master that will be used."""
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
    given = environment.get("PYSPARK_SUBMIT_ARGS", "pyspark-shell")
    ours = " ".join(f"--conf {shlex.quote(f'{key}={value}')}" for key, value in settings.items())
    environment["PYSPARK_SUBMIT_ARGS"] = f"{ours} {given}"
    return master


def spark_home(directory: Path, real: str | None = None) -> Path:
    """A Spark home that consists of links to the real one, with a ``work`` directory of its own.

    The executors of local-cluster run in ``$SPARK_HOME/work``, and Spark has no setting for that: with pyspark from
    pip it lies in site-packages, which may not be writable and would grow. One home a driver process, named by its
    pid; those of dead ones are removed. ``remove_spark_home`` at the end.
    """
    source = Path(real) if real else _pyspark_home()
    directory.mkdir(parents=True, exist_ok=True)
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
    """What the executors of this driver left; their links point elsewhere and are only unlinked."""
    shutil.rmtree(data_dir / "spark" / str(os.getpid()), ignore_errors=True)


def _pyspark_home() -> Path:
    spec = find_spec("pyspark")
    if spec is None or spec.origin is None:
        raise ClusterError("pyspark is not installed in this environment")
    return Path(spec.origin).parent
