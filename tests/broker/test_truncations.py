"""Tests of long truncations: the log stays unchanged while a thread copies, and only the role that ordered the
truncation completes it."""

from __future__ import annotations

import asyncio
import errno
import threading
from collections.abc import Callable, Coroutine
from functools import partial
from pathlib import Path
from typing import cast

import pytest

from sparklog.broker.context import BrokerContext
from sparklog.broker.replication import log_maintenance
from sparklog.broker.replication.log_maintenance import LogMaintenance
from sparklog.broker.replication.partition import AppendRules, Partition, PartitionHost
from sparklog.errors import ErrorCode, StorageError
from sparklog.model import LeaderAndIsr
from sparklog.replica.events import Decided, LeaderResponded
from sparklog.replica.replica import Replica
from sparklog.storage.log_directory import LogDirectory
from sparklog.storage.truncation_job import TruncationJob
from sparklog.testing.sim_disk import SimDisk
from tests.broker.staged import until
from tests.broker.support import broker_context
from tests.broker.support import log_maintenance as log_maintenance_of
from tests.storage.batches import SCHEMA, SCHEMAS, TOPIC_ID, TP, config, create_log, fill, open_directory, read_numbers

LEADER = 2
#: the replica's offsets of leader epoch 1, and the offset where its leader's history diverges
END, PARTED = 12, 6


class _Noting:
    """The host of a partition with a broker of its own."""

    def __init__(self) -> None:
        self.jobs: list[TruncationJob] = []
        self.fetching: list[tuple[int, int]] = []
        #: the object that runs the jobs, and the leader's response to any request
        self.log_maintenance: LogMaintenance | None = None
        self.answer: Callable[[], None] | None = None

    def now_ms(self) -> int:
        return 1

    def prepare_truncation(self, partition: Partition, job: TruncationJob) -> None:
        self.jobs.append(job)
        if self.log_maintenance is not None:
            self.log_maintenance.prepare_truncation(partition, job)

    def start_fetching(self, partition: Partition, leader: int, leader_epoch: int) -> None:
        self.fetching.append((leader, leader_epoch))
        if self.answer is not None:
            asyncio.get_running_loop().call_soon(self.answer)

    def log_failed(self, partition: Partition, error: Exception) -> None:
        partition.fail(error)

    def __getattr__(self, order: str) -> Callable[..., None]:
        return lambda *_: None


class _Follower:
    """Start a replica that follows in leader epoch 2, with a log of epoch 1 only."""

    def __init__(self) -> None:
        self.disk = SimDisk()
        fill(create_log(open_directory(disk=self.disk)), END // 3)
        self.disk.restart(page_cache_lost=False)
        self.directory = open_directory(disk=self.disk)
        self.around = _Noting()
        self.partition = self.host()
        self.decided(leader=LEADER, epoch=2)

    def host(self) -> Partition:
        log = self.directory.get(TP)
        if log is None:
            log = self.directory.create(TP, "again", schemas=SCHEMAS, config=config())
        rules = AppendRules(SCHEMA, 0, 1 << 20, None)
        around = cast(PartitionHost, self.around)
        return Partition(TP, TOPIC_ID, log=log, replica=Replica(1, log), rules=rules, host=around)

    def decided(self, *, leader: int, epoch: int) -> None:
        state = LeaderAndIsr(leader, epoch, (1, 2, 3), 1)
        self.partition.step(Decided(state, epoch, (1, 2, 3), {1: 1, 2: 1, 3: 1}, min_isr=2))

    def parted(self, at: int = PARTED) -> None:
        """Return the response of a leader whose records of epoch 1 end there."""
        log, epoch = self.partition.log, self.partition.replica.leader_epoch
        answer = LeaderResponded(epoch, log.log_end_offset, ErrorCode.NONE, 0, 0, at, (1, at), 0, log.last_epoch)
        self.partition.on_leader_response(answer, memoryview(b""), memoryview(b""))

    def committed(self) -> None:
        """Return the response of a leader that has no more records than this, all of them committed."""
        log, epoch = self.partition.log, self.partition.replica.leader_epoch
        end = log.log_end_offset
        answer = LeaderResponded(epoch, end, ErrorCode.NONE, end, 0, end, None, 0, log.last_epoch)
        self.partition.on_leader_response(answer, memoryview(b""), memoryview(b""))

    def out_of_range(self, log_start: int) -> None:
        """Return the response of a leader that has deleted all records of this log."""
        log, epoch, code = self.partition.log, self.partition.replica.leader_epoch, ErrorCode.OFFSET_OUT_OF_RANGE
        answer = LeaderResponded(epoch, log.log_end_offset, code, 0, log_start, log_start, None, 0, log.last_epoch)
        self.partition.on_leader_response(answer, memoryview(b""), memoryview(b""))

    def work(self, at_work: LogMaintenance, answer: Callable[[], None]) -> None:
        """Prepare ordered truncations from now on. The leader is reachable as well."""
        self.around.fetching.clear()
        self.around.log_maintenance, self.around.answer = at_work, answer
        at_work.prepare_truncation(self.partition, self.around.jobs[-1])

    def prepare(self, job: TruncationJob) -> None:
        """Run the job as the broker does."""
        job.run()
        self.partition.truncation_prepared(job)

    @property
    def copies(self) -> list[str]:
        directory = self.partition.log.directory
        if not self.disk.exists(directory):
            return []
        return [name for name in self.disk.names(directory) if name.endswith(".copy")]


def test_a_truncation_waits_for_its_copy_and_then_the_replica_fetches() -> None:
    follower = _Follower()
    partition = follower.partition
    follower.parted()
    (job,) = follower.around.jobs
    assert partition.is_truncating and partition.log.log_end_offset == END
    follower.parted()  # the response to a second request, which was in flight
    assert follower.around.jobs == [job]
    job.run()
    assert read_numbers(partition.log) == list(range(END))
    follower.around.fetching.clear()
    partition.truncation_prepared(job)
    assert not partition.is_truncating and follower.around.fetching == [(LEADER, 2)]
    assert read_numbers(partition.log) == list(range(PARTED))
    assert not follower.copies
    partition.replica.check_invariants()
    follower.parted(3)
    follower.prepare(follower.around.jobs[1])
    assert read_numbers(partition.log) == [0, 1, 2]


def test_a_change_of_leader_cancels_the_truncation() -> None:
    follower = _Follower()
    partition = follower.partition
    follower.parted(3)
    follower.decided(leader=3, epoch=3)
    assert not partition.is_truncating
    follower.parted()
    first, second = follower.around.jobs
    second.run()
    follower.prepare(first)
    assert partition.is_truncating and partition.log.log_end_offset == END
    partition.truncation_prepared(second)
    assert read_numbers(partition.log) == list(range(PARTED))
    assert not follower.copies


@pytest.mark.parametrize("ran", [False, True])
def test_a_new_leader_keeps_its_whole_log_despite_a_pending_truncation(ran: bool) -> None:
    """The new leader behaves as if the response that ordered the truncation had never arrived."""
    follower = _Follower()
    partition = follower.partition
    follower.parted()
    (job,) = follower.around.jobs
    if ran:
        job.run()
    follower.decided(leader=1, epoch=3)
    fill(partition.log, 1, leader_epoch=3)
    if not ran:
        job.run()
    partition.truncation_prepared(job)
    assert read_numbers(partition.log) == list(range(END + 3))
    assert not follower.copies
    assert partition.replica.is_leader
    partition.replica.check_invariants()


@pytest.mark.parametrize("leader", [1, 3])
def test_a_cancelled_truncation_below_the_log_start_keeps_the_mark(leader: int) -> None:
    follower = _Follower()
    partition = follower.partition
    follower.committed()
    partition.advance_log_start(PARTED + 2)
    follower.parted()
    assert partition.is_truncating
    partition.replica.check_invariants()
    follower.decided(leader=leader, epoch=3)
    partition.replica.check_invariants()
    assert partition.replica.high_watermark == partition.log.high_watermark == PARTED + 2
    assert partition.log.log_end_offset == END


def test_a_truncation_below_the_log_start_keeps_the_mark() -> None:
    follower = _Follower()
    partition = follower.partition
    follower.committed()
    partition.advance_log_start(PARTED + 2)
    follower.parted()
    follower.prepare(*follower.around.jobs)
    partition.replica.check_invariants()
    assert partition.replica.high_watermark == partition.log.high_watermark == partition.log.log_end_offset == PARTED


@pytest.mark.parametrize("ran", [False, True])
def test_a_topic_recreated_during_a_truncation_is_left_alone(ran: bool) -> None:
    follower = _Follower()
    follower.parted()
    (job,) = follower.around.jobs
    if ran:
        job.run()
    earlier = follower.partition
    earlier.stop()
    follower.directory.delete(TP)
    follower.partition = follower.host()
    fill(follower.partition.log, 1)  # the file has the same name, and is shorter than the range to copy
    if not ran:
        job.run()
    earlier.truncation_prepared(job)
    assert earlier.offline is None and follower.partition.log.topic_id == "again"
    assert read_numbers(follower.partition.log) == [0, 1, 2]
    assert not follower.copies


@pytest.mark.parametrize("how", [Partition.stop, Partition.stop_at_exit])
def test_a_replica_stopped_during_a_truncation_is_not_truncated(how: Callable[[Partition], None]) -> None:
    """A process that exits does not wait for the copy either."""
    follower = _Follower()
    follower.parted()
    (job,) = follower.around.jobs
    how(follower.partition)
    assert job.cancelled
    follower.prepare(job)
    assert follower.partition.log.log_end_offset == END
    assert not job.done and not follower.copies
    follower.disk.restart(page_cache_lost=False)
    open_directory(disk=follower.disk)
    assert not follower.copies


@pytest.mark.parametrize("operation", ["copy", "sync"])
def test_a_failing_disk_takes_the_directory_offline(operation: str) -> None:
    follower = _Follower()
    follower.parted()
    follower.disk.fail_next(operation, errno.EIO)
    with pytest.raises(StorageError, match="Input/output error"):
        follower.around.jobs[0].run()
    assert not follower.copies


def test_the_loop_keeps_running_while_a_truncation_is_prepared(tmp_path: Path) -> None:
    """A disk that takes long to fsync a segment delays only the truncated replica."""
    began, may_end = threading.Event(), threading.Event()
    cut: list[object] = []

    class Slow:
        awaits_room = False

        def run(self) -> None:
            began.set()
            assert may_end.wait(60)

    class Cut:
        tp = TP
        failed_truncations = 0

        def truncation_prepared(self, job: object) -> None:
            cut.append(job)

    async def scenario(broker: BrokerContext, at_work: LogMaintenance) -> None:
        job = cast(TruncationJob, Slow())
        at_work.prepare_truncation(cast(Partition, Cut()), job)
        await until(began.is_set)
        assert not cut
        may_end.set()
        await until(lambda: cut == [job])

    try:
        _kept_up(tmp_path, scenario)
    finally:
        may_end.set()


def test_a_copy_that_fails_unexpectedly_is_retried(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without the retry the leader would not fetch the replica until its next role, and the log would have only one
    line about a failed task."""
    follower = _Follower()
    partition, real = follower.partition, follower.disk.copy
    follower.parted()
    failures = [MemoryError("of a machine that is short of it")]

    def copy(source: Path, target: Path, length: int, *, start: int = 0) -> None:
        real(source, target, length, start=start)
        if failures:
            raise failures.pop()

    async def scenario(broker: BrokerContext, at_work: LogMaintenance) -> None:
        follower.work(at_work, follower.parted)
        await until(lambda: partition.log.log_end_offset == PARTED)
        assert broker.counters["cuts.failed"] == 1

    monkeypatch.setattr(follower.disk, "copy", copy)
    monkeypatch.setattr(log_maintenance, "_TRUNCATION_PAUSES_S", (0.01,))
    _kept_up(tmp_path, scenario)
    assert follower.around.fetching == [(LEADER, 2)] * 2 and partition.offline is None
    assert read_numbers(partition.log) == list(range(PARTED))
    assert not follower.copies
    assert "short of it" in caplog.text and str(TP) in caplog.text


def _without_room() -> tuple[_Follower, TruncationJob]:
    """Order a truncation while the disk is full."""
    follower = _Follower()
    follower.parted()
    (job,) = follower.around.jobs
    follower.disk.capacity_bytes = follower.disk.used_bytes
    return follower, job


def test_a_truncation_waits_for_disk_space_for_its_copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The copy was made on the event loop and failed there, and one follower's truncation ended a broker that led
    others."""
    follower, _ = _without_room()
    partition, disk = follower.partition, follower.disk

    async def scenario(broker: BrokerContext, at_work: LogMaintenance) -> None:
        follower.work(at_work, follower.parted)
        await until(lambda: broker.counters["cuts.without.room"] > 2)
        assert len(follower.around.jobs) > 2 and partition.offline is None
        assert read_numbers(partition.log) == list(range(END))
        assert partition.replica.high_watermark <= PARTED and not follower.copies
        partition.replica.check_invariants()
        disk.capacity_bytes = None
        await until(lambda: partition.log.log_end_offset == PARTED)

    monkeypatch.setattr(log_maintenance, "_TRUNCATION_PAUSES_S", (0.01,))
    _kept_up(tmp_path, scenario)
    assert set(follower.around.fetching) == {(LEADER, 2)} and partition.offline is None
    assert not partition.is_truncating
    assert read_numbers(partition.log) == list(range(PARTED))
    assert not follower.copies


def test_a_truncation_without_space_ends_when_the_log_is_deleted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without the end the replica would follow no leader, and would wait for space for a copy of records that its
    leader has deleted."""
    follower, _ = _without_room()
    partition = follower.partition

    async def scenario(broker: BrokerContext, at_work: LogMaintenance) -> None:
        follower.work(at_work, partial(follower.out_of_range, 1000))
        await until(lambda: partition.log.log_end_offset == 1000 or partition.offline)

    monkeypatch.setattr(log_maintenance, "_TRUNCATION_PAUSES_S", (0.01,))
    _kept_up(tmp_path, scenario)
    assert partition.offline is None and not partition.is_truncating
    assert partition.log.log_start_offset == partition.replica.high_watermark == 1000
    assert not follower.copies
    partition.replica.check_invariants()


def test_leader_responses_do_not_shorten_the_retry_pause() -> None:
    follower, job = _without_room()
    partition = follower.partition
    job.run()
    follower.around.fetching.clear()
    for answer in (follower.parted, follower.committed, partial(follower.out_of_range, 1000)):
        answer()
    assert follower.around.jobs == [job] and partition.log.log_end_offset == END
    partition.truncation_failed(job)
    assert follower.around.fetching == [(LEADER, 2)] and not partition.is_truncating
    follower.parted(3)
    second = follower.around.jobs[-1]
    partition.truncation_failed(job)
    assert partition.is_truncating and second is not job, "that is another pause"
    follower.disk.capacity_bytes = None
    assert partition.failed_truncations == 1
    follower.prepare(second)
    assert read_numbers(partition.log) == [0, 1, 2]
    assert not partition.failed_truncations, "the next truncation without space is a first attempt"


def test_pauses_between_truncations_without_space_grow_to_a_bound(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pauses: list[float] = []

    class Clock:
        """A stand-in for ``asyncio`` in the maintenance: its pauses take no time, and the eighth does not end."""

        async def sleep(self, pause_s: float) -> None:
            pauses.append(pause_s)
            await (asyncio.Event().wait() if len(pauses) == 8 else asyncio.sleep(0))

        def __getattr__(self, name: str) -> object:
            return getattr(asyncio, name)

    async def scenario(broker: BrokerContext, at_work: LogMaintenance) -> None:
        follower.work(at_work, follower.parted)
        await until(lambda: len(pauses) == 8)
        follower.decided(leader=3, epoch=3)
        await until(lambda: len(pauses) > 10)

    follower, _ = _without_room()
    monkeypatch.setattr(log_maintenance, "asyncio", Clock())
    _kept_up(tmp_path, scenario)
    assert pauses[:8] == [1, 2, 4, 8, 16, 30, 30, 30]
    assert pauses[8:11] == [1, 2, 4], "the replica has another leader"


def test_a_truncation_ordered_just_before_a_stop_is_dropped(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def scenario(broker: BrokerContext, at_work: LogMaintenance) -> None:
        at_work.prepare_truncation(follower.partition, job)
        at_work.close()
        await until(lambda: not broker._tasks)
        assert not broker.counters["cuts.failed"]

    follower, job = _without_room()
    _kept_up(tmp_path, scenario)
    assert not job.done and not caplog.records


def test_a_truncation_without_space_is_cancelled_when_the_role_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    follower, job = _without_room()
    partition = follower.partition

    async def scenario(broker: BrokerContext, at_work: LogMaintenance) -> None:
        at_work.prepare_truncation(partition, job)
        await until(lambda: broker.counters["cuts.without.room"])
        follower.decided(leader=1, epoch=3)
        assert not partition.is_truncating
        assert job.cancelled

    monkeypatch.setattr(log_maintenance, "_TRUNCATION_PAUSES_S", (600.0,))
    _kept_up(tmp_path, scenario)
    assert partition.replica.is_leader and read_numbers(partition.log) == list(range(END))
    assert not job.done and not follower.copies


def test_a_replica_without_a_leader_after_its_truncation_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step orders the same: no other code would resume the replica."""

    def follow(*_: object) -> None:
        raise RuntimeError("the reason is unknown")

    follower = _Follower()
    follower.parted()
    monkeypatch.setattr(follower.around, "start_fetching", follow)
    follower.prepare(*follower.around.jobs)
    assert follower.partition.offline == "the reason is unknown"


def test_checkpoints_do_not_wait_for_copies(tmp_path: Path) -> None:
    begun, let_go = threading.Semaphore(0), threading.Event()

    class Long(TruncationJob):
        def run(self) -> None:
            begun.release()
            let_go.wait()

    async def scenario(broker: BrokerContext, at_work: LogMaintenance) -> None:
        followers = [_Follower() for _ in range(4)]
        try:
            for follower in followers:
                follower.parted()
                (job,) = follower.around.jobs
                job.__class__ = Long
                at_work.prepare_truncation(follower.partition, job)
            assert await asyncio.to_thread(begun.acquire, timeout=30)
            await asyncio.wait_for(at_work._checkpoint(), 30)
        finally:
            let_go.set()
        assert broker.counters["checkpoints"] == 1

    _kept_up(tmp_path, scenario)


def _kept_up(tmp_path: Path, scenario: Callable[[BrokerContext, LogMaintenance], Coroutine[None, None, None]]) -> None:
    async def run() -> None:
        broker = broker_context()
        at_work = log_maintenance_of(broker, {}, directory)
        try:
            await scenario(broker, at_work)
        finally:
            at_work.close()
            await broker.end_tasks()

    directory = LogDirectory.open(tmp_path, cluster_id="cluster", broker_id=1)
    try:
        asyncio.run(run())
    finally:
        directory.close()
