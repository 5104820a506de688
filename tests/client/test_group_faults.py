"""Tests of many consumers of one group on real brokers while both start, stop, hang and die.

No record is skipped, and no two members own the same partition.
"""

from __future__ import annotations

import json
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from sparklog.client.admin.admin import Admin
from sparklog.client.admin.groups import GroupDescription
from sparklog.client.producer.producer import Producer
from sparklog.errors import BrokerError, ErrorCode
from sparklog.model import TopicPartition
from sparklog.protocol.messages import CommitOffsets, CommitOffsetsReply, GroupOffset
from sparklog.testing.process_cluster import ProcessCluster
from tests.broker.topics import create_topic, wait_isr
from tests.broker.transactions import find_coordinator, retried
from tests.client.group_worker import SESSION_MS, Worker
from tests.waiting import wait_until

pytestmark = pytest.mark.integration

PARTITIONS = 100
CHAOS_S = 22.0


@pytest.fixture(scope="module")
def cluster() -> Iterator[ProcessCluster]:
    with ProcessCluster(3) as running:
        yield running


class Children:
    """Processes of two consumers each, which the test kills and pauses."""

    def __init__(self, cluster: ProcessCluster, group: str, topic: str, directory: Path) -> None:
        self._named = [cluster.bootstrap, group, topic]
        self._directory = directory
        self.made = 0
        self.running: list[subprocess.Popen[bytes]] = []

    def start(self, consumers: int = 2) -> subprocess.Popen[bytes]:
        self.made += 1
        name = f"child{self.made}"
        command = [sys.executable, "-m", "tests.client.group_worker", *self._named, name, str(consumers)]
        child = subprocess.Popen([*command, str(self._directory / name)], stdin=subprocess.PIPE, start_new_session=True)
        self.running.append(child)
        return child

    def kill(self, child: subprocess.Popen[bytes]) -> None:
        self.running.remove(child)
        child.kill()
        child.wait()
        assert child.stdin is not None
        child.stdin.close()

    def stop(self) -> None:
        for child in self.running:
            child.send_signal(signal.SIGCONT)
            assert child.stdin is not None
            child.stdin.close()
        end = time.monotonic() + 60
        for child in self.running:
            while child.poll() is None and time.monotonic() < end:
                time.sleep(0.05)
            if child.poll() is None:
                child.kill()
            child.wait()

    def notes(self) -> list[dict[str, Any]]:
        found = []
        for file in sorted(self._directory.iterdir()):
            # A killed process may have written half of its last line.
            found += [json.loads(line) for line in file.read_text().splitlines(keepends=True) if line.endswith("\n")]
        return found


class Feeder(threading.Thread):
    """A producer that writes a record every few milliseconds and stores the acknowledged ones."""

    def __init__(self, bootstrap: str, topic: str) -> None:
        super().__init__(daemon=True)
        self._servers, self._topic = bootstrap, topic
        self._stopped = threading.Event()
        self.written: set[tuple[int, int]] = set()

    def run(self) -> None:
        dice = random.Random(1)
        with Producer(self._servers, linger_ms=20) as producer:
            sent = []
            while not self._stopped.wait(0.01):
                sent += [producer.send(self._topic, b"x", partition=dice.randrange(PARTITIONS)) for _ in range(3)]
            for future in sent:
                done = future.result(60)
                self.written.add((done.partition, done.offset))

    def stop(self) -> None:
        self._stopped.set()
        self.join(90)


@pytest.mark.extended
def test_a_group_reads_every_record_while_members_and_brokers_fail(cluster: ProcessCluster, tmp_path: Path) -> None:
    dice = random.Random(7)
    create_topic(cluster, "many", partitions=PARTITIONS)
    notes: list[dict[str, Any]] = []
    children = Children(cluster, "crowd", "many", tmp_path)
    workers: list[Worker] = []
    past: list[Worker] = []

    def join() -> None:
        worker = Worker(cluster.bootstrap, "crowd", "many", f"w{len(workers) + len(past)}", notes.append)
        worker.start()
        workers.append(worker)

    def leave() -> None:
        worker = workers.pop(dice.randrange(len(workers)))
        worker.stop()
        past.append(worker)

    def die() -> None:
        children.kill(dice.choice(children.running))
        children.start()

    def pause() -> None:
        if dice.random() < 0.5:
            dice.choice(workers).nap = 6.0
            return
        child = dice.choice(children.running)
        child.send_signal(signal.SIGSTOP)
        resume = threading.Timer(SESSION_MS / 1000 + 1.5, child.send_signal, [signal.SIGCONT])
        resume.start()
        timers.append(resume)

    timers: list[threading.Timer] = []
    feeder = Feeder(cluster.bootstrap, "many")
    try:
        for _ in range(4):
            children.start()
        for _ in range(22):
            join()
        feeder.start()
        end = time.monotonic() + CHAOS_S
        bounces = threading.Thread(target=_bounce_brokers, args=(cluster, "crowd", end))
        bounces.start()
        watched = _Watched(cluster, "crowd")
        while time.monotonic() < end:
            act = dice.choice([join, leave, leave, join, die, pause])
            if len(workers) < 20:
                act = join
            elif len(workers) > 24:
                act = leave
            act()
            watched.look()
            time.sleep(0.4)
        bounces.join()
        feeder.stop()
        for timer in timers:
            timer.join()
        described = _settled(cluster)
    finally:
        for worker in workers:
            worker.stop()
        for worker in [*workers, *past]:
            worker.join(60)
        children.stop()
    errors = [worker.error for worker in [*workers, *past] if worker.error is not None]
    assert not errors, errors
    everything = notes + children.notes()
    assert not [note for note in everything if "error" in note]
    seen = {(n, at + i) for note in everything if "seen" in note for n, at, rows in [note["seen"]] for i in range(rows)}
    assert len(feeder.written) > 500
    assert not feeder.written - seen, "records that no consumer received"
    _no_two_in_one_epoch(everything)
    assert sum("assign" in note for note in everything) > 60, "too few partitions have moved"
    assert sum("lost" in note for note in everything) >= 1
    _fenced(cluster, everything, {member.member_id for member in described.members})


def _settled(cluster: ProcessCluster) -> GroupDescription:
    """Wait until all records are read and committed, and partitions no longer move."""
    with Admin(cluster.bootstrap, timeout_s=60) as admin:
        ends = admin.list_offsets([TopicPartition("many", number) for number in range(PARTITIONS)])

        def left() -> dict[TopicPartition, int]:
            committed = admin.group_offsets("crowd")
            return {tp: end for tp, end in ends.items() if end and committed.get(tp) != end}

        wait_until(lambda: not left(), "everything to be read and committed", timeout_s=90)

        def stable() -> bool:
            found = admin.describe_group("crowd")
            return found is not None and found.state == "stable"

        wait_until(stable, "the group to come to rest", timeout_s=60)
        described = admin.describe_group("crowd")
    assert described is not None
    sizes = [len(member.owned) for member in described.members]
    assert sum(sizes) == PARTITIONS and max(sizes) - min(sizes) <= 1
    return described


def _bounce_brokers(cluster: ProcessCluster, group: str, end: float) -> None:
    """Stop the coordinator's broker cleanly, kill another one, and repeat, each time after all replicas are in sync."""
    coordinator, turn = True, 0
    while time.monotonic() < end:
        broker_id = find_coordinator(cluster, "group", group) if coordinator else turn % 3
        if turn % 2:
            cluster.kill(broker_id)
            cluster.start_broker(broker_id)
        else:
            cluster.restart(broker_id)
        for number in range(0, PARTITIONS, 7):
            wait_isr(cluster, "many", {0, 1, 2}, number)
        coordinator, turn = not coordinator, turn + 1


class _Watched:
    """Check that committed offsets never decrease."""

    def __init__(self, cluster: ProcessCluster, group: str) -> None:
        self._cluster, self._group = cluster, group
        self._known: dict[TopicPartition, int] = {}

    def look(self) -> None:
        try:
            with Admin(self._cluster.bootstrap, timeout_s=1.0) as admin:
                found = admin.group_offsets(self._group)
        except (BrokerError, TimeoutError):
            return
        back = {tp: (was, found.get(tp)) for tp, was in self._known.items() if found.get(tp, -1) < was}
        assert not back, f"committed offsets went back: {back}"
        self._known = found


def _no_two_in_one_epoch(notes: list[dict[str, Any]]) -> None:
    owners: dict[tuple[int, int], str] = {}
    for note in notes:
        for number in note.get("assign", ()):
            member = owners.setdefault((number, note["epoch"]), note["member"])
            assert member == note["member"], f"partition {number} in epoch {note['epoch']}: {member}, {note}"


def _fenced(cluster: ProcessCluster, notes: list[dict[str, Any]], living: set[str]) -> None:
    """Check that a former member can no longer commit, after any kind of end."""
    gone = {note["member"]: note for note in notes if "assign" in note and note["member"] not in living}
    for member, note in list(gone.items())[:5]:
        offset = GroupOffset("many", note["assign"][0], 1)
        request = CommitOffsets(0, "crowd", (offset,), None, member, note["epoch"])
        with pytest.raises(BrokerError) as refused:
            retried(cluster, lambda: find_coordinator(cluster, "group", "crowd"), request, CommitOffsetsReply)
        assert refused.value.code in {ErrorCode.UNKNOWN_MEMBER_ID, ErrorCode.NON_EMPTY_GROUP}


@pytest.mark.alone
def test_partitions_of_a_dead_member_move_within_the_session_timeout(cluster: ProcessCluster, tmp_path: Path) -> None:
    create_topic(cluster, "mourned", partitions=30)
    children = Children(cluster, "family", "mourned", tmp_path)
    child = children.start(1)
    workers = [Worker(cluster.bootstrap, "family", "mourned", f"w{number}", lambda note: None) for number in range(9)]
    try:
        for worker in workers:
            worker.start()

        def sizes() -> list[int]:
            return sorted(len(worker.assigned) for worker in workers)

        wait_until(lambda: sizes() == [3] * 9, "ten consumers to have three partitions each")
        for _ in range(2):
            children.kill(child)
            died = time.monotonic()
            wait_until(lambda: sizes() == [3, 3, 3, 3, 3, 3, 4, 4, 4], "nine to have them all")
            assert time.monotonic() - died < SESSION_MS / 1000 + 1
            child = children.start(1)
            wait_until(lambda: sizes() == [3] * 9, "ten consumers to have three partitions each")
    finally:
        for worker in workers:
            worker.stop()
        for worker in workers:
            worker.join(30)
        children.stop()
    assert not [worker.error for worker in workers if worker.error]
