"""Tests that tables stay in few files, and that readers of an older version are not disturbed."""

from __future__ import annotations

import datetime as dt
import itertools
import runpy
from collections import Counter
from contextlib import nullcontext
from pathlib import Path

import pyarrow as pa
import pytest
from deltalake import DeltaTable
from pyspark import SparkContext
from pyspark.sql import SparkSession

from sparklog.cli.starting import started
from sparklog.client.admin.admin import Admin
from sparklog.client.producer.producer import Producer
from sparklog.delta.archive_progress import open_log, read_progress
from sparklog.delta.archive_table import ArchiveTable
from sparklog.delta.maintenance import RETENTION, VACUUMED, Maintenance
from sparklog.delta.options import MaintenanceOptions
from sparklog.delta.table import table_path
from sparklog.testing.process_cluster import ProcessCluster
from tests.delta.archives import RunningArchives, asked, places, progress_of_commits, rows
from tests.delta.tables import Archived, described, placed
from tests.waiting import wait_until

pytestmark = [pytest.mark.integration, pytest.mark.extended]

UTC = dt.timezone.utc
FIRST_US = 1_714_521_600_000_000  # 2024-05-01
DAY_US = 86_400_000_000
OWN = pa.schema([("n", pa.int64())])


def maintenance(spark: SparkSession, path: str, said: list[str], **options: float | None) -> Maintenance:
    wanted = MaintenanceOptions(target_file_size=1 << 20, **options)  # type: ignore[arg-type]
    return Maintenance(spark, [path], wanted, tell=said.append, batches=nullcontext())


def files_by_date(path: str) -> Counter[str]:
    return Counter(file.split("/")[0] for file in DeltaTable(path).file_uris() for file in [file.split("_date=")[1]])


def operations(path: str) -> list[str]:
    log = open_log(path)
    actions = [action for version in log.versions() for action in log.actions(version)]
    return [action["commitInfo"]["operation"] for action in actions if "commitInfo" in action]


def test_small_files_are_compacted_and_older_readers_unharmed(spark: SparkSession, lake: str, topic: str) -> None:
    table = Archived(lake, described(topic, OWN, partitions=1))
    for number in range(12):
        day = number % 4 == 3  # three of the second day
        row = placed(pa.table({"n": [number]}), [0], [number], [FIRST_US + day * DAY_US])
        table.append(row, {0: number + 1})
    path, said = table_path(lake, topic), list[str]()
    expected, progress = rows(lake, topic), read_progress(path)
    assert files_by_date(path) == {"2024-05-01": 9, "2024-05-02": 3}
    pinned = DeltaTable(path)

    assert maintenance(spark, path, said, vacuum_every_s=3600.0).run() is None
    assert said == [f"{path}: compacted 9 files to 1"]
    assert files_by_date(path) == {"2024-05-01": 1, "2024-05-02": 3}
    assert rows(lake, topic).equals(expected)
    assert read_progress(path) == progress
    assert DeltaTable(path).version() == pinned.version() + 1, "the table is younger than the interval"

    assert maintenance(spark, path, said, vacuum_every_s=0.0, retain_h=200).run() is None
    assert said[1:] == [f"{path}: vacuumed"]
    found = ArchiveTable(spark, path)
    properties = found.detail()["properties"]
    assert properties[RETENTION] == "interval 200 hours" and VACUUMED in properties
    assert pinned.to_pyarrow_table().num_rows == 12
    # Only a table with its own retention property deletes files earlier.
    found.set_properties({RETENTION: "interval 0 hours"})
    assert maintenance(spark, path, said, vacuum_every_s=0.0).run() is None
    assert len(list(Path(path).rglob("part-*.parquet"))) == 4
    with pytest.raises(FileNotFoundError):
        pinned.to_pyarrow_table()
    assert rows(lake, topic).equals(expected)
    assert read_progress(path) == progress

    found.refresh()
    idle = maintenance(spark, path, said)
    now = dt.datetime.now(UTC)
    assert not idle._has_rested(found, now, 168)
    assert idle._has_rested(found, now + dt.timedelta(hours=171), 168)


def test_a_maintenance_failure_is_logged_and_not_fatal(
    spark: SparkSession, lake: str, caplog: pytest.LogCaptureFixture
) -> None:
    damaged = Path(lake) / "damaged" / "_delta_log" / f"{0:020d}.json"
    damaged.parent.mkdir(parents=True)
    damaged.write_text("no JSON\n")
    assert maintenance(spark, str(damaged.parent.parent), []).run() is not None
    assert "maintenance failed" in caplog.text
    assert maintenance(spark, f"{lake}/none", []).run() is None


def test_the_job_can_run_maintenance_alone(
    plain_spark: SparkSession,
    lake: str,
    topic: str,
    *,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The job maintains tables and quarantines of several topics, and needs no broker address."""
    job = runpy.run_path(str(Path(__file__).parent.parent.parent / "jobs" / "archive.py"))
    started()  # the test process handles Ctrl-C itself
    for name, value in (("SPARK_LOCAL_IP", "127.0.0.1"), ("PYSPARK_SUBMIT_ARGS", "pyspark-shell")):
        monkeypatch.setenv(name, value)  # the job changes these
    table = Archived(lake, described(topic, OWN, partitions=1))
    for number in range(9):
        row = placed(pa.table({"n": [number]}), [0], [number], [FIRST_US])
        table.append(row, {0: number + 1})
        table.set_aside(row, "bad")
    ended: list[SparkContext] = []
    monkeypatch.setitem(job["main"].__globals__, "BOOTSTRAP", None)
    monkeypatch.setitem(job["main"].__globals__, "end_spark", ended.append)
    monkeypatch.setattr("signal.signal", lambda *_: None)  # the settings of the process that runs the tests stay

    def run(*more: str) -> tuple[int, list[str]]:
        monkeypatch.setattr("sys.argv", ["archive", "--to", lake, "--maintain-only", *more])
        return job["main"](), capsys.readouterr().err.splitlines()

    expected = rows(lake, topic)
    names = f"{topic},missing"
    assert run("--topics", names, "--target-file-size", "1m", "--vacuum-every", "never") == (
        1,
        [
            f"{table.table}: compacted 9 files to 1",
            f"{table.quarantine}: compacted 9 files to 1",
            f"error: missing: there is no Delta table at {lake}/missing",
        ],
    )
    assert rows(lake, topic).equals(expected)
    assert run("--topics", topic, "--vacuum-every", "never") == (0, [f"{table.table}: no maintenance is due"])
    assert run("--topics", topic, "--vacuum-every", "often")[0] == 2
    assert len(ended) == 3


def test_maintenance_runs_beside_appends_and_merges(
    spark: SparkSession,
    admin: Admin,
    brokers: ProcessCluster,
    topic: str,
    lake: str,
    *,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Tables are compacted during writes, and no row is missing or duplicated."""
    monkeypatch.setattr("sparklog.delta.maintenance._MANY", 3)
    names = {f"{topic}-append": "append", f"{topic}-upsert": "upsert"}
    looks = MaintenanceOptions(optimize_every_s=3.0, vacuum_every_s=None)
    options = [
        asked(brokers, name, lake, mode=mode, interval="100 milliseconds", maintenance=looks)
        for name, mode in names.items()
    ]
    for name in names:
        admin.create_topic(name, partitions=2, replication_factor=1)
    sent, when = 0, dt.datetime(2024, 5, 1, tzinfo=UTC)

    def is_level(name: str) -> bool:
        found = read_progress(table_path(lake, name))
        return found is not None and found.progress.ends == {0: sent, 1: sent}

    with RunningArchives(spark, *options) as running:
        with Producer(brokers.bootstrap) as producer:

            def send() -> None:
                nonlocal sent
                key = max(sent, 1)
                for name, partition in itertools.product(names, range(2)):
                    producer.send(name, b"v", key=b"%d %d" % (partition, key), partition=partition, timestamp=when)
                producer.flush()
                sent += 1

            def is_done() -> bool:
                if all(is_level(name) for name in names):
                    if all("OPTIMIZE" in operations(table_path(lake, name)) for name in names):
                        return True
                    send()
                return False

            send()
            wait_until(is_done, "both tables to be compacted", timeout_s=180)
            send()
        wait_until(lambda: all(is_level(name) for name in names), "the last rows", timeout_s=120)
    assert running.failed == {}, running.said
    append, upsert = names
    assert places(rows(lake, append)) == [(partition, offset) for partition in range(2) for offset in range(sent)]
    newest = list(range(1, sent))
    assert places(rows(lake, upsert)) == [(partition, offset) for partition in range(2) for offset in newest]
    written = DeltaTable(table_path(lake, append)).history()
    # Each batch writes one file, regardless of the number of files that it read.
    assert {entry["operationMetrics"]["numFiles"] for entry in written if entry["operation"] == "WRITE"} == {"1"}
    assert [progress.batch for progress in progress_of_commits(lake, append)] == list(
        range(len(progress_of_commits(lake, append)))
    )
    assert [progress.batch for progress in progress_of_commits(lake, upsert)] == list(
        range(len(progress_of_commits(lake, upsert)))
    )
