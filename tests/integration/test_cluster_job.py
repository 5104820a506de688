"""Tests of the cluster job on real executors: start, lost executors, lost drivers, stops."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import sparklog
from sparklog.cluster.process import send_signal
from tests.integration.cluster_job import READY_S, ClusterJob
from tests.integration.traffic import Writer
from tests.ports import FirstPort

pytestmark = [pytest.mark.integration, pytest.mark.timeout(900)]

#: It takes three seconds on a quiet machine, and the project promises ten.
STOP_S = 10.0


@pytest.fixture
def jobs(tmp_path: Path) -> Iterator[list[ClusterJob]]:
    """Yield a function that starts jobs. All their processes are ended at the end."""
    started: list[ClusterJob] = []
    try:
        yield started
    finally:
        for job in started:
            job.destroy()


def values(bootstrap: str, topic: str, count: int) -> list[int]:
    """Return the first ``count`` records of a topic, in offset order."""
    found: list[int] = []
    deadline = time.monotonic() + 60
    with sparklog.Consumer(bootstrap, topic, start="earliest") as consumer:
        while len(found) < count and time.monotonic() < deadline:
            for batch in consumer.poll(1.0):
                found += [int(value) for value in batch.column("value").to_pylist()]
    return found


@pytest.mark.alone
@pytest.mark.extended
def test_a_cluster_survives_its_executors_and_its_driver(tmp_path: Path, jobs: list[ClusterJob]) -> None:
    def start(*submit: str) -> ClusterJob:
        jobs.append(ClusterJob(tmp_path, "--port", str(FirstPort.CLUSTER_JOB), submit=submit))
        return jobs[-1]

    first = start()
    bootstrap = first.ready()
    pids = first.brokers()
    assert len(pids) == 3
    with sparklog.Admin(bootstrap) as admin:
        admin.create_topic("events", partitions=1, replication_factor=3)

    # An executor dies: the barrier job fails as a whole, the brokers continue, and the next generation adopts them.
    writer = Writer(bootstrap, "events")
    assert len(first.executors()) == 3
    send_signal(first.executor_of("slot-0"), signal.SIGKILL)
    first.wait_for(r"generation \d+: brokers 0 adopted, 1 adopted, 2 adopted", timeout_s=120)
    assert writer.end() > 0
    assert writer.slowest_s < 5
    assert first.brokers() == pids

    # The driver dies: its executors exit, and the brokers and ZooKeeper continue without a driver.
    first.kill()
    assert first.brokers() == pids
    alone = Writer(bootstrap, "events")
    alone.wait_for(20)  # the clients write these records without a driver
    written = writer.acknowledged + alone.end()
    assert alone.acknowledged > 0

    # The next driver adopts the running processes, and is the only driver.
    second = start()
    assert second.ready() == bootstrap
    assert second.wait_for(r"\(3 of 3 brokers were already running\)")
    assert second.brokers() == pids
    refused = start()
    assert refused.process.wait(60) == 1
    assert "another driver runs this cluster" in refused.output
    assert second.brokers() == pids

    # Ctrl-C ends all processes.
    assert second.stop(signal.SIGINT) < STOP_S + 5
    assert second.process.returncode == 0
    assert float(second.wait_for(r"stopped in ([\d.]+) s", timeout_s=1).group(1)) < STOP_S
    assert (second.brokers(), second.executors(), second.zookeepers()) == ({}, [], [])
    assert second.java_processes("SparkSubmit") == [], "the driver's JVM must not be an executor"
    assert not list((tmp_path / "spark").iterdir())

    # After a start on the same data, all acknowledged records exist, in order and once. This time there are no
    # executors.
    third = start("--master", "local[2]")
    assert third.ready() == bootstrap
    expected = [*range(writer.acknowledged), *range(alone.acknowledged)]
    assert values(bootstrap, "events", written) == expected
    with sparklog.Admin(bootstrap) as admin:
        (partition,) = admin.describe_topic("events").partitions
    assert sorted(partition.isr) == [0, 1, 2]
    third.stop(signal.SIGTERM)
    assert third.process.returncode == 0
    assert (third.brokers(), third.zookeepers()) == ({}, [])


def test_too_few_slots_end_the_start_without_traces(tmp_path: Path, jobs: list[ClusterJob]) -> None:
    jobs.append(ClusterJob(tmp_path, submit=["--master", "local-cluster[1,2,1024]"]))
    assert jobs[0].process.wait(READY_S) == 1
    assert (
        "error: 3 brokers need 3 task slots at the same time, 3 in all; local-cluster[1,2,1024] has 2:"
        " use --master 'local-cluster[3,1,1024]', or fewer brokers" in jobs[0].output
    )
    assert jobs[0].zookeepers() == []
