"""A test of the cluster job on a standalone Spark cluster: a Worker, a Master and a driver are lost, and no record."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import sparklog
from sparklog.cluster.process import send_signal
from sparklog.testing.standalone_spark import StandaloneSpark
from tests.integration.cluster_job import ClusterJob, identify_all
from tests.integration.traffic import Traffic
from tests.ports import FirstPort

pytestmark = [pytest.mark.integration, pytest.mark.extended, pytest.mark.timeout(600)]

#: The longest write, on any machine, if no session expires.
SESSION_S = 5.0
ALL_ADOPTED = "0 adopted, 1 adopted, 2 adopted"


class Standalone:
    """A standalone cluster and the drivers that are submitted to it."""

    def __init__(self, directory: Path) -> None:
        self.spark = StandaloneSpark(directory / "spark", workers=3)
        self.data_dir = directory / "data"
        self.jobs: list[ClusterJob] = []

    def submit(self) -> ClusterJob:
        words = ["--master", self.spark.url, "--total-executor-cores", "3", "--executor-memory", "512m"]
        words += ["--conf", "spark.ui.enabled=false", "--conf", f"spark.local.dir={self.data_dir}/local"]
        setting = f"zookeeper.session.timeout.ms={SESSION_S * 1000:.0f}"
        arguments = ["--port", str(FirstPort.STANDALONE_SPARK), "--advertised-host", "127.0.0.1", "--set", setting]
        self.jobs.append(ClusterJob(self.data_dir, *arguments, submit=words))
        return self.jobs[-1]

    def stop(self) -> None:
        for job in self.jobs:
            job.destroy()
        self.spark.stop()


@pytest.fixture
def standalone(tmp_path: Path) -> Iterator[Standalone]:
    found = Standalone(tmp_path)
    try:
        found.spark.start()
        yield found
    finally:
        found.stop()


def test_workers_master_and_driver_are_lost_in_turn(standalone: Standalone) -> None:
    spark = standalone.spark
    driver = standalone.submit()
    bootstrap = driver.ready()
    pids = driver.brokers()
    assert len(pids) == 3
    assert [len(spark.executors(number)) for number in range(3)] == [1, 1, 1]
    with sparklog.Admin(bootstrap) as admin:
        admin.create_topic("events", partitions=3, replication_factor=3)
    traffic = Traffic(bootstrap, "events", partitions=3)
    traffic.goes_on()
    traffic.slowest_s()

    # A Worker and its executor are lost: the other executors' tasks adopt all brokers.
    spark.kill_worker(0)
    assert driver.wait_for_generation(1) == ALL_ADOPTED
    traffic.goes_on()
    assert traffic.slowest_s() < SESSION_S
    assert driver.brokers() == pids

    # The Master is lost: brokers continue. The restarted Master knows its Workers. It may replace executors of which it
    # learns late.
    spark.kill_master()
    traffic.goes_on()
    spark.start_master()
    spark.start_worker(0)
    spark.wait_until(lambda state: _used_cores(state) == [1, 1, 1], "executor on each of three Workers")
    traffic.goes_on()
    assert traffic.slowest_s() < SESSION_S
    assert driver.brokers() == pids

    # A whole host is lost, as far as one machine permits: Worker, executor and a broker. Another executor starts the
    # broker.
    known = len(driver.generations())
    (lost,) = identify_all([pids["slot-1"]])
    spark.kill_worker(1)
    send_signal(lost, signal.SIGKILL)
    driver.wait_for_generation(known)
    traffic.goes_on()
    now = driver.brokers()
    assert (now["slot-0"], now["slot-2"]) == (pids["slot-0"], pids["slot-2"])
    assert now["slot-1"] != pids["slot-1"]

    # The driver and its ZooKeeper are lost: the application and its executors exit, and the brokers continue. The next
    # driver starts ZooKeeper on its data and adopts them.
    (zookeeper,) = driver.zookeepers()
    driver.process.kill()
    driver.process.wait()
    send_signal(zookeeper, signal.SIGKILL)
    spark.wait_until(lambda state: state.get("activeapps") == [], "end of the application")
    spark.start_worker(1)
    traffic.goes_on()
    assert driver.brokers() == now
    spark.wait_until(lambda state: _used_cores(state) == [0, 0, 0], "three Workers with nothing to do")
    following = standalone.submit()
    assert following.ready() == bootstrap
    assert following.wait_for(r"\(3 of 3 brokers were already running\)")
    assert following.brokers() == now
    traffic.goes_on()
    assert traffic.end() > 0
    with sparklog.Admin(bootstrap) as admin:
        assert all(sorted(part.isr) == [0, 1, 2] for part in admin.describe_topic("events").partitions)

    following.stop(signal.SIGTERM)
    assert following.process.returncode == 0
    assert (following.brokers(), following.zookeepers()) == ({}, [])
    spark.wait_until(lambda state: state.get("activeapps") == [], "end of the application")


def _used_cores(state: dict[str, Any]) -> list[int]:
    return [worker["coresused"] for worker in state.get("workers", []) if worker["state"] == "ALIVE"]
