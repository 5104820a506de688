"""An archive of Spark's classes for all JVMs of a test run: ``python -m tests.spark_classes``.

Half of the processor time of a JVM that starts Spark for a few small queries is the loading of about ten thousand
classes. Java can store loaded classes in an archive that other JVMs map. ``tests/run`` creates one, and
``tests/conftest.py`` gives every Spark of a test a folder of settings with it: the project's own settings and those of
a test run. Tests run without an archive as well. A JVM with another Java or other jars ignores the archive and loads
the classes itself.

The JVM that creates it also lets Ivy fetch Delta's jars, alone: two Sparks that fetch them for the first time, at the
same time, break each other's half-written files.

An archive contains classes from the start of the class path, up to the first folder that is not empty. Spark puts its
configuration folder there, so its jars are named again before it.
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path

from sparklog.delta.session import PACKAGE

ROOT = Path(__file__).resolve().parent.parent
#: A folder that version control ignores.
DIRECTORY = ROOT / ".spark-classes"
ARCHIVE = DIRECTORY / "classes.jsa"
#: The Java and the jars that the archive was created with.
MADE_OF = DIRECTORY / "made-of"
#: For JVMs that live for seconds: one compiler, and space for compiled code.
QUICK_JVM = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC -XX:ReservedCodeCacheSize=240m"
#: Spark gives a Python process ten seconds to start, which is not always enough beside other tests.
_PATIENT = "\nspark.python.authenticate.socketTimeout 60s\n"


def spark_jars() -> str:
    spec = find_spec("pyspark")
    assert spec is not None and spec.origin is not None
    return str(Path(spec.origin).parent / "jars" / "*")


def environment(conf: Path = ROOT / "conf") -> dict[str, str]:
    """Return the environment of this run's Sparks: the folder of their settings, and the options of their JVMs."""
    if not MADE_OF.exists() or MADE_OF.read_text() != _made_of():
        return {"SPARK_CONF_DIR": str(_with(_PATIENT, conf))}
    options = f"{QUICK_JVM} -XX:SharedArchiveFile={ARCHIVE}"
    settings = "".join(
        f"spark.{part}.extraClassPath {spark_jars()}\nspark.{part}.defaultJavaOptions {options}\n"
        for part in ("driver", "executor")
    )
    return {
        "SPARK_CONF_DIR": str(_with(_PATIENT + settings, conf)),
        # For the JVM that only computes the command line, and for standalone Masters and Workers.
        "SPARK_LAUNCHER_OPTS": QUICK_JVM,
        "SPARK_DAEMON_JAVA_OPTS": options,
        "SPARK_DAEMON_CLASSPATH": spark_jars(),
    }


def _with(settings: str, conf: Path) -> Path:
    """Create a folder with the project's settings, and with more in Spark's defaults. Several processes may create
    it at the same time."""
    target = DIRECTORY / "conf"
    target.mkdir(parents=True, exist_ok=True)
    for file in conf.iterdir():
        text = file.read_text() + (settings if file.name == "spark-defaults.conf" else "")
        copy = target / file.name
        if not copy.exists() or copy.read_text() != text:
            with tempfile.NamedTemporaryFile("w", dir=DIRECTORY, delete=False) as new:
                new.write(text)
            Path(new.name).replace(copy)
    return target


def _made_of() -> str:
    """Return the identity of the Java and the jars. An archive is valid only for these, and not for newer files."""
    home = os.environ.get("JAVA_HOME")
    java = Path(home, "bin", "java") if home else Path(shutil.which("java") or "java")
    found = [java.resolve(), *sorted(Path(spark_jars()).parent.glob("*.jar"))]
    return "".join(f"{path} {path.stat().st_size} {path.stat().st_mtime_ns}\n" for path in found if path.exists())


def make() -> None:
    """Create the archive, unless it exists."""
    # A developer's own Spark is not the one that the tests start.
    for name in ("SPARK_HOME", "SPARK_CONF_DIR", "PYSPARK_SUBMIT_ARGS"):
        os.environ.pop(name, None)
    made_of = _made_of()
    if ARCHIVE.exists() and MADE_OF.exists() and MADE_OF.read_text() == made_of:
        return
    DIRECTORY.mkdir(exist_ok=True)
    MADE_OF.unlink(missing_ok=True)
    ARCHIVE.unlink(missing_ok=True)
    with tempfile.TemporaryDirectory() as scratch:
        _use_spark(Path(scratch))
    if ARCHIVE.exists():  # this Java cannot create an archive, and the tests run without
        MADE_OF.write_text(made_of)


def _use_spark(scratch: Path) -> None:
    """Let a JVM load the classes that tests need, and store them at its exit."""
    from pyspark import SparkContext
    from pyspark.sql import SparkSession

    os.environ["PYSPARK_PYTHON"] = sys.executable
    spark = (
        SparkSession.builder.master("local[2]")
        .config("spark.driver.extraClassPath", spark_jars())
        .config("spark.driver.extraJavaOptions", f"{QUICK_JVM} -XX:ArchiveClassesAtExit={ARCHIVE} -Xlog:cds=error")
        .config("spark.jars.packages", PACKAGE)
        .config("spark.ui.showConsoleProgress", "false")
        .config("spark.sql.shuffle.partitions", "2")
        .getOrCreate()
    )
    try:
        rows = spark.range(100).selectExpr("id", "id % 7 AS key", "cast(cast(id AS string) AS binary) AS value")
        rows.mapInArrow(lambda batches: batches, rows.schema).write.parquet(str(scratch / "rows"))
        found = spark.read.schema(rows.schema).parquet(str(scratch / "rows"))
        assert found.groupBy("key").count().join(rows, "key").orderBy("id").toArrow().num_rows == 100
        stream = spark.readStream.schema(rows.schema).parquet(str(scratch / "rows"))
        query = stream.writeStream.foreachBatch(lambda batch, _: batch.write.format("noop").mode("append").save())
        query = query.option("checkpointLocation", str(scratch / "checkpoint")).trigger(availableNow=True)
        assert query.start().awaitTermination(60)
    finally:
        gateway = SparkContext._gateway
        spark.stop()
        if gateway is not None:
            gateway.shutdown()
            gateway.proc.stdin.close()
            gateway.proc.wait(120)


if __name__ == "__main__":
    make()
