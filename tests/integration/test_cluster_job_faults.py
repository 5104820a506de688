"""A test of the cluster job while its parts are paused, killed and stopped, alone and in pairs.

One cluster lives through all of it with traffic, and every record is accounted for at the end.
"""

from __future__ import annotations

import contextlib
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import sparklog
from sparklog.cluster.process import ProcessIdentity, send_signal
from tests.integration.cluster_job import ClusterJob, identify_all, parent
from tests.integration.traffic import Traffic
from tests.ports import FirstPort
from tests.waiting import wait_until

pytestmark = [pytest.mark.integration, pytest.mark.extended, pytest.mark.timeout(600)]

#: The longest write, on any machine, if no session expires.
SESSION_S = 5.0
#: Every session that is disconnected for this time has expired.
PAUSE_S = 1.5 * SESSION_S


@pytest.fixture
def job(tmp_path: Path) -> Iterator[ClusterJob]:
    setting = f"zookeeper.session.timeout.ms={SESSION_S * 1000:.0f}"
    job = ClusterJob(tmp_path, "--port", str(FirstPort.CLUSTER_JOB_FAULTS), "--set", setting)
    try:
        yield job
    finally:
        job.destroy()


@contextlib.contextmanager
def paused(*processes: ProcessIdentity) -> Iterator[None]:
    """Pause a process with SIGSTOP for the ``with`` block, and resume it with SIGCONT."""
    try:
        for process in processes:
            assert send_signal(process, signal.SIGSTOP)
        yield
    finally:
        for process in processes:
            send_signal(process, signal.SIGCONT)


class Faults:
    """The faults of ``job``, with ``traffic`` on its topic."""

    def __init__(self, job: ClusterJob) -> None:
        self.job = job
        self.bootstrap = job.ready()
        self.admin = sparklog.Admin(self.bootstrap)
        self.admin.create_topic("events", partitions=3, replication_factor=3)
        self.traffic = Traffic(self.bootstrap, "events", partitions=3)
        self._topics = 0

    def close(self) -> None:
        self.admin.close()

    def broker(self, slot: str) -> ProcessIdentity:
        return identify_all([self.job.brokers()[slot]])[0]

    def zookeeper(self) -> ProcessIdentity:
        (found,) = self.job.zookeepers()
        return found

    def is_whole(self) -> bool:
        """Wait until every replica is in sync, as f=1 requires before the next broker may fail."""
        return all(sorted(part.isr) == [0, 1, 2] for part in self.admin.describe_topic("events").partitions)

    def healed(self, *, within_s: float = 0.0) -> None:
        """Check that traffic continues, replicas are in sync and a topic can be created: leaders, brokers and
        controller work. ``within_s`` is the longest allowed write."""
        self.traffic.goes_on()
        slowest_s = self.traffic.slowest_s()
        assert not within_s or slowest_s < within_s, f"a write took {slowest_s:.1f} s"
        wait_until(self.is_whole, "full in-sync sets")
        self._topics += 1
        self.admin.create_topic(f"made-{self._topics}", partitions=1, replication_factor=3)

    def back(self, slot: str, lost: ProcessIdentity) -> None:
        """Wait until ``slot`` has a broker again."""
        wait_until(lambda: self.job.brokers().get(slot, lost.pid) != lost.pid, f"new broker in {slot}")


def test_paused_killed_and_stopped_processes_lose_nothing(job: ClusterJob) -> None:
    faults = Faults(job)
    try:
        faults.healed()
        _paused_executors_and_barrier_task(faults)
        _paused_driver(faults)
        _paused_zookeeper(faults)
        _killed_zookeeper(faults)
        _ended_zookeeper_and_executor(faults)
        _killed_jvm_of_the_driver(faults)
        assert faults.traffic.end() > 0
    finally:
        faults.close()


def _paused_executors_and_barrier_task(faults: Faults) -> None:
    """Pause a supervisor. No other part notices, and a supervisor whose session has expired meanwhile still
    supervises."""
    broker = faults.broker("slot-0")
    with paused(*faults.job.executors(), parent(broker)):
        time.sleep(PAUSE_S)
        faults.healed(within_s=SESSION_S)
    send_signal(broker, signal.SIGKILL)
    faults.back("slot-0", broker)
    faults.healed()


def _paused_driver(faults: Faults) -> None:
    """Pause the driver, which hosts the controller, and kill a broker meanwhile. Its partitions get no new leader
    before the driver resumes."""
    (driver,) = identify_all([faults.job.process.pid])
    broker = faults.broker("slot-1")
    with paused(driver):
        time.sleep(PAUSE_S)
        faults.traffic.goes_on()  # without a controller
        assert faults.traffic.slowest_s() < SESSION_S
        send_signal(broker, signal.SIGKILL)
        faults.back("slot-1", broker)
    faults.healed()
    assert "starts term 2" in (faults.job.data_dir / "driver.log").read_text()


def _paused_zookeeper(faults: Faults) -> None:
    server = faults.zookeeper()
    with paused(server):
        time.sleep(PAUSE_S)
        faults.traffic.goes_on()
    faults.healed(within_s=SESSION_S)
    assert faults.zookeeper() == server


def _killed_zookeeper(faults: Faults) -> None:
    """Kill ZooKeeper and a broker. The driver restarts ZooKeeper, and then the broker is restarted."""
    server, broker = faults.zookeeper(), faults.broker("slot-2")
    send_signal(server, signal.SIGKILL)
    send_signal(broker, signal.SIGKILL)
    wait_until(lambda: [process for process in faults.job.zookeepers() if process != server] != [], "ZooKeeper")
    faults.back("slot-2", broker)
    faults.healed()


def _ended_zookeeper_and_executor(faults: Faults) -> None:
    server, brokers = faults.zookeeper(), faults.job.brokers()
    send_signal(server, signal.SIGTERM)
    send_signal(faults.job.executor_of("slot-2"), signal.SIGTERM)
    assert faults.job.wait_for_generation(1) == "0 adopted, 1 adopted, 2 adopted"
    faults.healed(within_s=SESSION_S)
    assert faults.zookeeper() != server
    assert faults.job.brokers() == brokers


def _killed_jvm_of_the_driver(faults: Faults) -> None:
    """Stop Spark. The driver reports that it can do no more, and lets the brokers run."""
    job, brokers = faults.job, faults.job.brokers()
    (jvm,) = job.java_processes("SparkSubmit")
    send_signal(jvm, signal.SIGKILL)
    assert job.process.wait(60) == 1
    assert "error: Spark has stopped; brokers keep running: start the cluster again to adopt them" in job.output
    assert job.brokers() == brokers
    assert len(job.zookeepers()) == 1
    faults.traffic.goes_on()
