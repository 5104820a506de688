"""Spark's classes, read and verified once for all JVMs of a test run: ``python -m tests.spark_classes``.

Half of the processor time of a JVM that starts Spark for a few small queries goes into loading some ten thousand
classes. Java can keep them as it has them in memory, in an archive that other JVMs map. ``tests/run`` makes one;
``tests/conftest.py`` names it to every Spark that a test starts, in a folder of settings: the project's own and those
of a test run. Without an archive tests run as well, and so does a JVM that finds it made by another Java or of other
jars: it loads the classes itself.

The JVM that makes it also has Ivy fetch Delta's jars, alone: two Sparks of a test run that fetch them for the first
time, at the same time, take half-written files out of each other's hands.

An archive holds classes of the front of the class path, up to the first folder that is not empty. Spark has its
configuration folder there, so its jars are named once more, in front.
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
#: Nothing in it is kept by version control.
DIRECTORY = ROOT / ".spark-classes"
ARCHIVE = DIRECTORY / "classes.jsa"
#: The Java and the jars that the archive was made with and of.
MADE_OF = DIRECTORY / "made-of"
#: Of JVMs that live for seconds: one compiler, and room for what it compiles.
QUICK_JVM = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC -XX:ReservedCodeCacheSize=240m"
#: Spark gives a Python process ten seconds to come up, which is little on a machine that is busy with other tests.
_PATIENT = "\nspark.python.authenticate.socketTimeout 60s\n"


def spark_jars() -> str:
    spec = find_spec("pyspark")
    assert spec is not None and spec.origin is not None
    return str(Path(spec.origin).parent / "jars" / "*")


def environment(conf: Path = ROOT / "conf") -> dict[str, str]:
    """What Sparks of this run start with: the folder of their settings, and how their JVMs start."""
    if not MADE_OF.exists() or MADE_OF.read_text() != _made_of():
        return {"SPARK_CONF_DIR": str(_with(_PATIENT, conf))}
    options = f"{QUICK_JVM} -XX:SharedArchiveFile={ARCHIVE}"
    settings = "".join(
        f"spark.{part}.extraClassPath {spark_jars()}\nspark.{part}.defaultJavaOptions {options}\n"
        for part in ("driver", "executor")
    )
    return {
        "SPARK_CONF_DIR": str(_with(_PATIENT + settings, conf)),
        # Of the JVM that only finds out the command line, and of standalone Masters and Workers.
        "SPARK_LAUNCHER_OPTS": QUICK_JVM,
        "SPARK_DAEMON_JAVA_OPTS": options,
        "SPARK_DAEMON_CLASSPATH": spark_jars(),
    }


def _with(settings: str, conf: Path) -> Path:
    """A folder of the same files, of which Spark's defaults say more. Several processes may make it at a time."""
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
    """Which Java it is of, and which jars: it takes no others, nor those that are newer."""
    home = os.environ.get("JAVA_HOME")
    java = Path(home, "bin", "java") if home else Path(shutil.which("java") or "java")
    found = [java.resolve(), *sorted(Path(spark_jars()).parent.glob("*.jar"))]
    return "".join(f"{path} {path.stat().st_size} {path.stat().st_mtime_ns}\n" for path in found if path.exists())


def make() -> None:
    """Unless it is there."""
    # A developer's own Spark is not what tests start.
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
    if ARCHIVE.exists():  # else this Java cannot, and tests go without
        MADE_OF.write_text(made_of)


def _use_spark(scratch: Path) -> None:
    """Have a JVM load what tests need, and keep it when it ends."""
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
