"""Jars of Apache Kafka, Kafka Connect and Spark's Kafka connector: found in a folder, or fetched from Maven Central.

The jars are no part of the project. ``SPARKLOG_KAFKA_JARS`` names a folder with them, in ``broker/``, ``connect/`` and
``spark/``.
Without it Apache Ivy, which is one of pyspark's jars and needs only Java, fetches them once into
``$XDG_CACHE_HOME/sparklog`` (``~/.cache/sparklog``).
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
import zipfile
from pathlib import Path

import pyspark

from sparklog.cluster.embedded_zookeeper import find_java
from sparklog.errors import ClusterError

KAFKA_VERSION = "4.1.1"
_FETCH_TIMEOUT_S = 600
_COMPILE_TIMEOUT_S = 120
#: With all dependencies.
_BROKER = (
    ("org.apache.kafka", "kafka_2.13", KAFKA_VERSION),
    ("org.apache.kafka", "kafka-tools", KAFKA_VERSION),
    ("org.apache.logging.log4j", "log4j-slf4j-impl", "2.24.3"),
)
#: With all dependencies.
_CONNECT = (
    ("org.apache.kafka", "connect-runtime", KAFKA_VERSION),
    ("org.apache.kafka", "connect-file", KAFKA_VERSION),
    ("org.apache.kafka", "connect-json", KAFKA_VERSION),
    ("org.apache.logging.log4j", "log4j-slf4j-impl", "2.24.3"),
)
#: Without dependencies, because Spark has them.
_CONNECTOR = (
    ("org.apache.spark", "spark-sql-kafka-0-10_2.13", pyspark.__version__),
    ("org.apache.kafka", "kafka-clients", "3.9.2"),
    ("org.apache.commons", "commons-pool2", "2.12.1"),
)
_TOKENS = ("org.apache.spark", "spark-token-provider-kafka-0-10_2.13", pyspark.__version__)
_TOKENS_STAND_IN = Path(__file__).with_name("kafka_tokens.scala")
_SETTINGS = """<ivysettings>
  <settings defaultResolver="central"/>
  <resolvers><ibiblio name="central" m2compatible="true"/></resolvers>
</ivysettings>
"""


def folder() -> Path:
    named = os.environ.get("SPARKLOG_KAFKA_JARS")
    if named:
        return Path(named)
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return cache / "sparklog" / f"kafka-{KAFKA_VERSION}"


def broker_jars(*, fetch: bool) -> Path:
    """Return the folder with Kafka's own jars: its broker, clients and command-line tools.

    Raises:
        ClusterError: the jars are missing, and may not or cannot be fetched.
    """
    return _folder_of("broker", _BROKER, transitive=True, fetch=fetch)


def connect_jars(*, fetch: bool) -> Path:
    """Return the folder with Kafka Connect's worker and file connectors. Raises the same error as ``broker_jars``."""
    return _folder_of("connect", _CONNECT, transitive=True, fetch=fetch)


def connector_jars(*, fetch: bool) -> list[Path]:
    """Return the jars that Spark's JVM must start with. Raises the same error as ``broker_jars``."""
    jars = _folder_of("spark", _CONNECTOR, transitive=False, fetch=fetch)
    if not any("token" in jar.name for jar in jars.glob("*.jar")):
        _add_tokens(jars)
    return sorted(jars.glob("*.jar"))


def main() -> None:
    """Fetch all jars that are missing, and print their folder."""
    broker_jars(fetch=True)
    connect_jars(fetch=True)
    connector_jars(fetch=True)
    print(folder())


def _folder_of(name: str, wanted: tuple[tuple[str, str, str], ...], *, transitive: bool, fetch: bool) -> Path:
    target = folder() / name
    missing = [f"{jar}-{version}.jar" for _, jar, version in wanted if not (target / f"{jar}-{version}.jar").exists()]
    if not missing:
        return target
    if not fetch or os.environ.get("SPARKLOG_KAFKA_JARS"):
        raise ClusterError(f"{target} does not have {', '.join(missing)}")
    with tempfile.TemporaryDirectory() as scratch:
        _retrieve(wanted, Path(scratch), transitive=transitive)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copytree(Path(scratch) / "jars", target.with_name(f"{name}.new"), dirs_exist_ok=True)
        shutil.rmtree(target, ignore_errors=True)  # the jars of an earlier list
        target.with_name(f"{name}.new").rename(target)  # an interrupted fetch leaves no partial folder
    return target


def _retrieve(wanted: tuple[tuple[str, str, str], ...], scratch: Path, *, transitive: bool) -> None:
    """Let Ivy fetch the wanted jars into ``scratch/jars``.

    Raises:
        ClusterError: Ivy failed; the message has its last output.
    """
    conf = "default->default" if transitive else "default->master"
    dependencies = "".join(
        f'<dependency org="{group}" name="{name}" rev="{revision}" conf="{conf}"/>' for group, name, revision in wanted
    )
    (scratch / "ivysettings.xml").write_text(_SETTINGS)
    (scratch / "ivy.xml").write_text(
        '<ivy-module version="2.0"><info organisation="bench" module="bench"/>'
        f"<dependencies>{dependencies}</dependencies></ivy-module>"
    )
    command = [find_java(), "-cp", str(spark_jars() / "*"), "org.apache.ivy.Main", "-warn"]
    command += ["-settings", str(scratch / "ivysettings.xml"), "-ivy", str(scratch / "ivy.xml")]
    command += ["-cache", str(scratch / "cache")]
    command += ["-retrieve", str(scratch / "jars" / "[artifact]-[revision].[ext]")]
    done = _run(command, _FETCH_TIMEOUT_S)
    if done.returncode or not any((scratch / "jars").glob("*.jar")):
        raise ClusterError(f"Maven Central gave no Kafka: {(done.stdout + done.stderr)[-500:]}")


def _add_tokens(target: Path) -> None:
    """Add the classes for security tokens, against which the connector links.

    If their module cannot be fetched, compile a replacement without tokens: brokers of a benchmark ask for none.
    """
    with tempfile.TemporaryDirectory() as scratch:
        try:
            _retrieve((_TOKENS,), Path(scratch), transitive=False)
        except ClusterError:
            pass
        else:
            for jar in (Path(scratch) / "jars").glob("*.jar"):
                shutil.copy2(jar, target)
            return
        classes = Path(scratch) / "classes"
        classes.mkdir()
        command = [find_java(), "-cp", str(spark_jars() / "*"), "scala.tools.nsc.Main", "-usejavacp", "-nowarn"]
        done = _run([*command, "-d", str(classes), str(_TOKENS_STAND_IN)], _COMPILE_TIMEOUT_S)
        if done.returncode:
            raise ClusterError(f"{_TOKENS_STAND_IN.name} does not compile: {(done.stdout + done.stderr)[-500:]}")
        with zipfile.ZipFile(target / "token-stand-in.jar", "w") as jar_file:
            for compiled in sorted(classes.rglob("*.class")):
                jar_file.write(compiled, compiled.relative_to(classes))


def spark_jars() -> Path:
    return Path(pyspark.__file__).parent / "jars"


def _run(command: list[str], timeout_s: float) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, check=False)


if __name__ == "__main__":
    main()
