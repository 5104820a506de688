"""Tests of open transactions, the last stable offset and aborted ranges: the log keeps them through any event."""

from __future__ import annotations

import random
from typing import NamedTuple

import pytest

from sparklog.errors import BrokerError, ErrorCode
from sparklog.record.header import Flag
from sparklog.storage.log import Log
from sparklog.storage.transactions import EndedTransaction
from sparklog.testing.sim_disk import SimDisk
from tests.storage.batches import (
    TP,
    append,
    batch,
    commit_and_seal,
    create_log,
    follow,
    marker,
    open_directory,
    read_numbers,
)


def send(log: Log, producer: int, *, sequence: int = 0, count: int = 3, transactional: bool = True) -> int:
    """Append one batch. Return its first offset."""
    found = batch(count, first=log.log_end_offset, producer=producer, sequence=sequence, transactional=transactional)
    return append(log, found).start


def test_readers_stop_at_the_first_open_transaction() -> None:
    log = create_log(open_directory(disk=SimDisk()))
    append(log, batch(4))
    first = send(log, 7)
    append(log, batch(4))
    second = send(log, 8)
    assert log.last_stable_offset(log.log_end_offset) == first == 4
    assert log.last_stable_offset(2) == 2
    assert 7 in log.transactions and 9 not in log.transactions
    end = append(log, marker(committed=(7,)))
    assert log.last_stable_offset(end.start) == first, "the marker is not committed yet"
    assert log.last_stable_offset(log.log_end_offset) == second
    append(log, marker(aborted=(8,)))
    assert log.last_stable_offset(log.log_end_offset) == log.log_end_offset
    assert log.transactions.aborted_between(0, 100) == [EndedTransaction(8, second, log.log_end_offset - 1)]
    assert (
        log.transactions.aborted_between(0, second) == [] == log.transactions.aborted_between(log.log_end_offset, 100)
    )
    assert not log.transactions.open()


def test_a_marker_without_a_transaction_changes_nothing() -> None:
    log = create_log(open_directory(disk=SimDisk()))
    send(log, 7)
    append(log, marker(committed=(1, 2), aborted=(3,)))
    assert log.transactions.aborted_between(0, 100) == [] and log.last_stable_offset(log.log_end_offset) == 0
    append(log, marker(committed=(7,)))
    with pytest.raises(BrokerError, match="OUT_OF_ORDER_SEQUENCE_NUMBER"):
        send(log, 7, sequence=3)


def test_an_idle_producer_with_a_transaction_open_does_not_expire() -> None:
    log = create_log(open_directory(disk=SimDisk()), segment_bytes=1024)
    send(log, 7)
    append(log, batch(60), now_us=10**15)
    append(log, batch(60), now_us=10**15)
    assert len(log.segments) > 1
    send(log, 7, sequence=3)


def test_an_unreadable_marker_is_refused_before_any_write() -> None:
    log = create_log(open_directory(disk=SimDisk()))
    header, body = batch(1)
    with pytest.raises(BrokerError) as refused:
        append(log, (header._replace(flags=int(Flag.CONTROL)), body))
    assert refused.value.code is ErrorCode.CORRUPT_MESSAGE and log.log_end_offset == 0
    append(log, batch(1))


class Appended(NamedTuple):
    """An appended batch. ``fate`` is None for records, or maps each producer to whether it was aborted."""

    start: int
    end: int
    producer: int
    transactional: bool
    fate: dict[int, bool] | None


class Model:
    """The expected state of a log, computed each time from the list of all appends."""

    def __init__(self) -> None:
        self.batches: list[Appended] = []
        self.log_start = 0

    def cut(self, end: int) -> None:
        self.batches = [found for found in self.batches if found.end <= end]

    def transactions(self) -> tuple[dict[int, int], list[tuple[EndedTransaction, bool]]]:
        begun: dict[int, int] = {}
        over = []
        for found in self.batches:
            if found.fate is None and found.transactional:
                begun.setdefault(found.producer, found.start)
            for producer, aborted in (found.fate or {}).items():
                if producer in begun:
                    over.append((EndedTransaction(producer, begun.pop(producer), found.start), aborted))
        return begun, over

    def last_stable_offset(self, high_watermark: int) -> int:
        begun, over = self.transactions()
        late = [found.first_offset for found, _ in over if found.last_offset >= high_watermark]
        return max(min([high_watermark, *begun.values(), *late]), min(self.log_start, high_watermark))

    def aborted(self, start: int, end: int) -> list[EndedTransaction]:
        return [
            f for f, aborted in self.transactions()[1] if aborted and f.first_offset < end and f.last_offset >= start
        ]


class Story:
    """One seed: a leader and a follower with appends, truncations, crashes and retention."""

    def __init__(self, seed: int) -> None:
        self.chance = random.Random(seed)
        self.disks = [SimDisk(), SimDisk()]
        self.directories = [open_directory(disk=disk) for disk in self.disks]
        self.logs = [create_log(directory, segment_bytes=2048, retention_ms=-1) for directory in self.directories]
        self.model = Model()
        self.next_producer = 0
        self.sequences: dict[int, int] = {}
        self.high_watermark = 0

    def play(self, steps: int = 80) -> None:
        for _ in range(steps):
            self.chance.choices(
                [self.send, self.mark, self.commit, self.cut, self.restart, self.retire], [10, 6, 5, 1, 1, 1]
            )[0]()
            follow(self.logs[1], self.logs[0])
            self.check()

    def send(self) -> None:
        log = self.logs[0]
        if len(self.sequences) < 4 and self.chance.random() < 0.5:
            self.next_producer += 1
            self.sequences[self.next_producer] = 0
        producer = self.chance.choice([-1, *self.sequences])
        sequence = self.sequences.get(producer, -1)
        found = batch(
            3,
            first=log.log_end_offset,
            producer=producer,
            sequence=sequence,
            transactional=producer >= 0,
            text="x" * 90,
        )
        where = append(log, found)
        if producer >= 0:
            self.sequences[producer] += 3
        self.model.batches.append(Appended(where.start, where.end, producer, producer >= 0, None))

    def mark(self) -> None:
        if not self.sequences:
            return
        ending = self.chance.sample(sorted(self.sequences), self.chance.randint(1, len(self.sequences)))
        fate = {producer: self.chance.random() < 0.5 for producer in ending}
        where = append(
            self.logs[0],
            marker(
                committed=tuple(p for p, aborted in fate.items() if not aborted),
                aborted=tuple(p for p, aborted in fate.items() if aborted),
            ),
        )
        self.model.batches.append(Appended(where.start, where.end, -1, False, fate))
        for producer in ending:
            del self.sequences[producer]

    def commit(self) -> None:
        ends = [found.end for found in self.model.batches if found.end >= self.high_watermark]
        self.high_watermark = self.chance.choice(ends or [self.high_watermark])
        for log in self.logs:
            commit_and_seal(log, self.high_watermark)

    def cut(self) -> None:
        """Truncate as after a lost leadership: all uncommitted records may be removed."""
        end = self.chance.randint(self.high_watermark, self.logs[0].log_end_offset)
        ends = {log.truncate(end) for log in self.logs}
        assert len(ends) == 1
        self.model.cut(ends.pop())
        self._forget_cut_producers()

    def restart(self) -> None:
        at = self.chance.randint(0, 1)
        directory = self.directories[at]
        if self.chance.random() < 0.5:
            directory.write_clean_marker()
            directory.close()
        else:
            directory.checkpoint()
        self.disks[at].restart(page_cache_lost=False)
        self.directories[at] = open_directory(disk=self.disks[at])
        found = self.directories[at].get(TP) or create_log(self.directories[at])
        self.logs[at] = found
        found.set_high_watermark(self.high_watermark)
        if at == 0 and found.log_end_offset < self.logs[1].log_end_offset:
            self.logs[1].truncate(found.log_end_offset)
        self.model.cut(self.logs[0].log_end_offset)
        self._forget_cut_producers()

    def retire(self) -> None:
        start = self.chance.randint(0, self.high_watermark)
        self.model.log_start = max(start, self.model.log_start)
        for log in self.logs:
            log.advance_log_start(start)

    def _forget_cut_producers(self) -> None:
        """Continue a producer whose batches were truncated. A producer whose marker was truncated is open again."""
        begun, _ = self.model.transactions()
        self.sequences = {
            producer: 3 * sum(1 for found in self.model.batches if found.producer == producer) for producer in begun
        }

    def check(self) -> None:
        end = self.logs[0].log_end_offset
        for log in self.logs:
            assert log.log_end_offset == end
            assert log.last_stable_offset(self.high_watermark) == self.model.last_stable_offset(self.high_watermark)
            begun, _ = self.model.transactions()
            assert {p: o.first_offset for p, o in log.transactions.open().items()} == begun
            start = self.chance.randint(log.log_start_offset, max(log.log_start_offset, end))
            assert log.transactions.aborted_between(start, end) == self.model.aborted(start, end)


@pytest.mark.parametrize("seed", range(40))
def test_transactions_survive_random_histories_of_a_log(seed: int) -> None:
    story = Story(seed)
    story.play()
    assert read_numbers(story.logs[0]) == read_numbers(story.logs[1])


def test_ended_transactions_are_dropped_with_their_records() -> None:
    log = create_log(open_directory(disk=SimDisk()))
    for producer in range(100):
        send(log, producer)
        append(log, marker(committed=(producer,)))
        log.set_high_watermark(log.log_end_offset)
    assert log._tail.producers.transactions.state().recent == ()
