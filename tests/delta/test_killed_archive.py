"""Tests of a driver that is killed at every step, and of the job that continues afterwards, started as users start
it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

import pytest
from pyspark.sql import SparkSession
from pyspark.sql.types import StructType

from sparklog.client.admin.admin import Admin
from sparklog.client.producer.producer import Producer
from sparklog.delta.archive_progress import read_progress
from sparklog.delta.session import submit_arguments
from sparklog.delta.table import table_path
from sparklog.model import TopicPartition
from sparklog.testing.process_cluster import ProcessCluster
from tests.delta.archives import archived, bad_rows, places, progress_of_commits, rows
from tests.delta.conftest import QUICK_JVM
from tests.delta.killed_archive import JSON, MAX_OFFSETS, UPSERT_STEPS
from tests.waiting import wait_until

pytestmark = [pytest.mark.integration, pytest.mark.extended, pytest.mark.timeout(900)]

#: A quick Java for processes that live for seconds.
SPARK = {
    "spark.driver.extraJavaOptions": QUICK_JVM,
    "spark.ui.enabled": "false",
    "spark.sql.shuffle.partitions": "2",
    "spark.python.authenticate.socketTimeout": "60s",
}
ROOT = Path(__file__).parent.parent.parent
#: The step at which each archive is killed, and the batch.
STEPS = {
    "setting aside": 0,
    "set aside": 0,
    "writing": 1,
    "committed": 1,
    "merging": 1,
    "merged": 1,
}
PARTITIONS = 2
#: Records of each partition that a reader sees. Every third one is not JSON.
RECORDS = 18


def fill(brokers: ProcessCluster, topic: str) -> dict[tuple[int, int], bool]:
    """Produce committed records among aborted ones and markers. Return whether each is good, by partition and
    offset."""
    kept: dict[tuple[int, int], bool] = {}
    with Producer(brokers.bootstrap, transactional_id=topic) as producer:
        for number in range(2 * PARTITIONS * 3):
            partition, is_kept = number % PARTITIONS, number // PARTITIONS % 2 == 0
            producer.begin()
            sent = []
            for one in range(RECORDS // 3):
                value = f'{{"a": {one}}}' if one % 3 else "bad"
                sent.append((value, producer.send(topic, value.encode(), partition=partition)))
            producer.flush()
            producer.commit() if is_kept else producer.abort()
            if is_kept:
                kept.update({(partition, future.result().offset): value != "bad" for value, future in sent})
    return kept


def fill_keys(brokers: ProcessCluster, topic: str) -> dict[bytes, int | None]:
    """Produce records of a few keys, some tombstones and some objects without columns. Return the final state."""
    state: dict[bytes, int | None] = {}
    with Producer(brokers.bootstrap) as producer:
        for number in range(3 * MAX_OFFSETS):
            key = b"%d" % (number * 7 % 20)
            value = None if number % 7 == 0 else b"{}" if number % 11 == 0 else b'{"a": %d}' % number
            producer.send(topic, value, key=key, partition=int(key) % PARTITIONS)
            state.pop(key, None)
            if value is not None:
                state[key] = json.loads(value).get("a")
    return state


@contextmanager
def started(*words: str, output: int | IO[str]) -> Iterator[subprocess.Popen[str]]:
    given = [word for name, value in SPARK.items() for word in ("--conf", f"{name}={value}")]
    arguments = " ".join(
        [*(f"'{word}'" for word in submit_arguments() + given), "--master", "local[4]", "pyspark-shell"]
    )
    environment = {**os.environ, "PYSPARK_SUBMIT_ARGS": arguments, "PYSPARK_PYTHON": sys.executable}
    process = subprocess.Popen(
        [sys.executable, *words],
        cwd=ROOT,
        env=environment,
        stdout=output,
        stderr=subprocess.DEVNULL if output == subprocess.PIPE else output,
        text=True,
        start_new_session=True,
    )
    try:
        yield process
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait(30)
        if process.stdout is not None:
            process.stdout.close()


def test_no_gap_and_no_duplicate_whenever_the_driver_is_killed(
    spark: SparkSession, admin: Admin, brokers: ProcessCluster, topic: str, lake: str
) -> None:
    names = {f"{topic}-{number}": step for number, step in enumerate(STEPS)}
    records, states = {}, {}
    for name, step in names.items():
        admin.create_topic(name, partitions=PARTITIONS, replication_factor=1)
        if step in UPSERT_STEPS:
            states[name] = fill_keys(brokers, name)
        else:
            records[name] = fill(brokers, name)
    steps = {name: (step, STEPS[step]) for name, step in names.items()}
    with started(
        "-m", "tests.delta.killed_archive", brokers.bootstrap, lake, json.dumps(steps), output=subprocess.PIPE
    ) as killed:
        assert killed.stdout is not None
        assert killed.stdout.readline() == "all are there\n"
    for name, step in names.items():
        # Each driver was killed at its step, and no archive had committed an offset that its table does not contain.
        assert len(progress_of_commits(lake, name)) == STEPS[step] + (step in ("committed", "merged")), name
        found = read_progress(table_path(lake, name))
        held = found.progress.ends if found is not None else {}
        told = admin.group_offsets(f"archive-{name}")
        assert all(offset <= held.get(tp.partition, 0) for tp, offset in told.items()), name
        assert step not in ("committed", "merged") or sum(told.values()) < sum(held.values())

    logs = admin.list_offsets([TopicPartition(name, number) for name in records for number in range(PARTITIONS)])

    def is_level() -> bool:
        assert job.poll() is None, output.read_text()
        return all(
            admin.group_offsets(f"archive-{name}").get(TopicPartition(name, number))
            == logs[TopicPartition(name, number)]
            for name in records
            for number in range(PARTITIONS)
        )

    output = Path(lake).with_name("job.log")
    arguments = ["--topics", ",".join([*records, "missing"]), "--to", lake, "--bootstrap", brokers.bootstrap]
    with (
        output.open("w") as log,
        started("jobs/archive.py", *arguments, "--trigger", "500ms", "--schema", JSON, output=log) as job,
    ):
        wait_until(is_level, "the archives to be level", timeout_s=400)
        job.send_signal(signal.SIGTERM)
        assert job.wait(60) == 1
    # The missing topic has not stopped the archives of the others.
    assert "error: missing: UNKNOWN_TOPIC_OR_PARTITION" in output.read_text()
    for name, kept in records.items():
        good, bad = places(rows(lake, name)), places(bad_rows(lake, name))
        assert good == sorted(place for place, is_good in kept.items() if is_good), names[name]
        assert bad == sorted(place for place, is_good in kept.items() if not is_good), names[name]
        assert [progress.batch for progress in progress_of_commits(lake, name)] == list(
            range(len(progress_of_commits(lake, name)))
        )
    for name, state in states.items():
        archived(spark, brokers, name, lake, mode="upsert", json=StructType.fromDDL(JSON))
        found = rows(lake, name).select(["_key", "a"]).to_pylist()
        assert {row["_key"]: row["a"] for row in found} == state and len(found) == len(state), names[name]
        assert [progress.batch for progress in progress_of_commits(lake, name)] == list(
            range(len(progress_of_commits(lake, name)))
        )
