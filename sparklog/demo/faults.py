"""The kills of the demonstration: one executor and one broker, by SIGKILL, in the middle of the write.

A thread watches the end of the log, and kills when a certain number of rows is written. So rows are in flight at both
times, on fast and slow machines.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from pyspark.sql import SparkSession

from sparklog.client.admin.admin import Admin
from sparklog.demo.story import Story
from sparklog.errors import ClusterError, SparklogError
from sparklog.model import TopicPartition

_POLL_S = 0.05
_TURN_S = 60.0


@dataclass(frozen=True, slots=True)
class Executor:
    """The JVM of one executor on this machine, with the number of ``tasks`` that it is running."""

    executor_id: str
    pid: int
    tasks: int


class FaultThread(threading.Thread):
    """The thread that kills an executor when the log has ``first`` rows, and a leader when the log has ``second`` rows.

    The thread ends after both, or when the main thread calls ``finish`` after the write. ``failure`` is the error of
    the thread, which the main thread raises.
    """

    def __init__(
        self, spark: SparkSession, bootstrap: str, topic: str, *, first: int, second: int, story: Story
    ) -> None:
        super().__init__(name="demo-faults", daemon=True)
        self._spark = spark
        self._servers = bootstrap
        self._topic = topic
        self._thresholds = (first, second)
        self._story = story
        self._over = threading.Event()
        self._broker_pids: dict[int, int] = {}
        self.kills = 0
        self.failure: Exception | None = None

    def finish(self) -> None:
        """Wait until the current fault is complete, and raise the thread's error if there is one.

        Call this after the write has ended.

        Raises:
            ClusterError: the write ended before both kills were done.
        """
        self._over.set()
        self.join(_TURN_S)
        if self.failure is not None:
            raise self.failure
        if self.kills < 2:
            raise ClusterError(f"the write was over after {self.kills} of 2 kills: nothing was shown")

    def run(self) -> None:
        first, second = self._thresholds
        try:
            with Admin(self._servers, client_id="sparklog-demo") as admin:
                if self._await_rows(admin, first):
                    self._kill_executor(admin)
                if self._await_rows(admin, second):
                    self._kill_leader(admin)
        except (SparklogError, OSError) as error:
            self.failure = error

    def _await_rows(self, admin: Admin, threshold: int) -> bool:
        return _await(lambda: replicated_rows(admin, self._topic) >= threshold, self._over)

    def _kill_executor(self, admin: Admin) -> None:
        victim = max(executors(self._spark), key=lambda executor: executor.tasks)
        rows = replicated_rows(admin, self._topic)
        self._broker_pids = _pids(admin)
        os.kill(victim.pid, signal.SIGKILL)
        self.kills += 1
        self._story.tell(
            "executor killed",
            f"executor {victim.executor_id}, JVM {victim.pid}; {rows:,} rows committed",
        )

    def _kill_leader(self, admin: Admin) -> None:
        before = admin.describe_topic(self._topic).partitions[0]
        victim = next(broker for broker in admin.describe_brokers() if broker.address.broker_id == before.leader)
        rows = replicated_rows(admin, self._topic)
        alive = sum(self._broker_pids.get(broker_id) == pid for broker_id, pid in _pids(admin).items())
        self._story.tell(
            "brokers", f"{alive} of {len(self._broker_pids)} are still the processes they were before the executor died"
        )
        os.kill(victim.pid, signal.SIGKILL)
        killed_at = time.monotonic()
        self.kills += 1
        self._story.tell(
            "broker killed",
            f"broker {before.leader}, process {victim.pid}, led partition 0 and {victim.leaders - 1} more; "
            f"{rows:,} rows committed",
        )
        never = threading.Event()
        if not _await(lambda: _leader_epoch(admin, self._topic) > before.leader_epoch, never, within_s=_TURN_S):
            raise ClusterError(f"partition 0 of {self._topic} got no new leader within {_TURN_S:g} s")
        after = admin.describe_topic(self._topic).partitions[0]
        # If no supervisor sees the end, the broker may be running again before its ZooKeeper session expires.
        which = "again, as a new process" if after.leader == before.leader else "now"
        self._story.tell(
            "leader elected",
            f"broker {after.leader} leads partition 0 {which}, in epoch {after.leader_epoch}, "
            f"{time.monotonic() - killed_at:.1f} s after the kill",
        )


def replicated_rows(admin: Admin, topic: str) -> int:
    """Return the sum of the high watermarks of a topic's partitions.

    Records of open and of aborted transactions count as well.
    """
    partitions = [TopicPartition(topic, part.partition) for part in admin.describe_topic(topic).partitions]
    return sum(admin.list_offsets(partitions, at="latest", isolation="read_uncommitted").values())


def executors(spark: SparkSession) -> list[Executor]:
    """Return the live executors of a session with the master ``local-cluster``, which are children of the driver's JVM.

    Raises:
        ClusterError: the session has no such executors, for example because it has another master.
    """
    context = spark.sparkContext
    seen = context._jsc.sc().statusStore().executorList(True)
    tasks = {seen.apply(at).id(): seen.apply(at).activeTasks() for at in range(seen.size())}
    found = []
    jvm = context._jvm
    assert jvm is not None
    for child in jvm.java.lang.ProcessHandle.current().children().toArray():
        words = child.info().commandLine().orElse("").split()
        if "--executor-id" in words and child.isAlive():
            executor_id = words[words.index("--executor-id") + 1]
            found.append(Executor(executor_id, child.pid(), tasks.get(executor_id, 0)))
    if not found:
        raise ClusterError(
            f"no executor is a child of the driver (master {context.master}): use local-cluster[3,2,1024]"
        )
    return found


def _pids(admin: Admin) -> dict[int, int]:
    return {broker.address.broker_id: broker.pid for broker in admin.describe_brokers()}


def _leader_epoch(admin: Admin, topic: str) -> int:
    """Return the leader epoch of partition 0, or -1 if it has no leader."""
    partition = admin.describe_topic(topic).partitions[0]
    return -1 if partition.leader is None else partition.leader_epoch


def _await(condition: Callable[[], bool], over: threading.Event, *, within_s: float = float("inf")) -> bool:
    """Poll until ``condition`` is true. Return False if ``over`` is set before that, or after a timeout."""
    deadline = time.monotonic() + within_s
    while not condition():
        if over.wait(_POLL_S) or time.monotonic() > deadline:
            return False
    return True
