"""A test of random appends, truncations, seals, restarts and deletions against a plain list."""

from __future__ import annotations

from typing import NamedTuple

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from sparklog.errors import BrokerError, ErrorCode
from sparklog.model import EpochEnd
from sparklog.storage.log import Log
from sparklog.storage.log_directory import LogDirectory
from sparklog.testing.sim_disk import SimDisk
from tests.storage.batches import (
    append,
    batch,
    commit_and_seal,
    create_log,
    follow,
    open_directory,
    read_numbers,
)


class ModelBatch(NamedTuple):
    base: int
    numbers: tuple[int, ...]
    epoch: int
    timestamp: int

    @property
    def end(self) -> int:
        return self.base + len(self.numbers)


class LogMachine(RuleBasedStateMachine):
    """A log and its follower. ``batches`` is the log's content. Some steps copy it to the follower at their end."""

    def __init__(self) -> None:
        super().__init__()
        self.batches: list[ModelBatch] = []
        self.start = 0
        self.end = 0
        self.high_watermark = 0
        self.epoch = 1
        self.next_number = 0

    @initialize(hot_bytes=st.sampled_from([0, 2000, 1 << 20]), seed=st.integers(0, 1000))
    def open(self, hot_bytes: int, seed: int) -> None:
        self.hot_bytes = hot_bytes
        self.disk = SimDisk(seed=seed)
        self._open("boot-1")
        self.follower = create_log(open_directory(disk=SimDisk(), hot_bytes=hot_bytes))

    def _open(self, boot_id: str) -> None:
        self.directory: LogDirectory = open_directory(
            disk=self.disk, hot_bytes=self.hot_bytes, boot_id=boot_id, max_open_segments=3
        )
        self.log: Log = create_log(self.directory, segment_bytes=1100)

    @rule(
        sizes=st.lists(st.integers(1, 12), min_size=1, max_size=4),
        timestamp=st.integers(-10, 200),
        new_epoch=st.booleans(),
        schema_id=st.sampled_from([0, 0, 0, 1]),
    )
    def append(self, sizes: list[int], timestamp: int, new_epoch: bool, schema_id: int) -> None:
        self.epoch += new_epoch
        built = []
        for size in sizes:
            numbers = tuple(range(self.next_number, self.next_number + size))
            self.next_number += size
            # -1 stands for "no timestamp"
            stamp = timestamp if timestamp != -1 else 0
            built.append(batch(size, first=numbers[0], timestamp=stamp, schema_id=schema_id))
            self.batches.append(ModelBatch(self.end, numbers, self.epoch, stamp))
            self.end += size
        assert append(self.log, *built, leader_epoch=self.epoch) == (self.batches[-len(built)].base, self.end)

    @rule(back=st.integers(0, 40))
    def truncate(self, back: int) -> None:
        offset = max(0, self.end - back)
        first = self.log.first_segment_offset
        self.batches = [kept for kept in self.batches if kept.end <= offset]
        # batches below the log start count while their segment exists
        self.end = self.batches[-1].end if self.batches else min(offset, first)
        self.start = min(self.start, self.end)
        self.high_watermark = min(self.high_watermark, self.end)
        assert self.log.truncate(offset) == self.end
        if self.log.log_end_offset < self.follower.log_end_offset:
            self.follower.truncate(self.end)

    @rule(lag=st.integers(0, 30))
    def commit(self, lag: int) -> None:
        self.high_watermark = max(self.high_watermark, self.end - lag)
        commit_and_seal(self.log, self.high_watermark)

    @rule(room=st.integers(0, 1500))
    def append_to_a_full_disk(self, room: int) -> None:
        self.disk.capacity_bytes = self.disk.used_bytes + room
        with pytest.raises(BrokerError, match=ErrorCode.KAFKA_STORAGE_ERROR.name):
            append(self.log, batch(5), batch(3, text="z" * 3000), batch(1), leader_epoch=self.epoch)
        self.disk.capacity_bytes = None

    @rule(power_cut=st.booleans())
    def stop_cleanly(self, power_cut: bool) -> None:
        self.directory.write_clean_marker()
        self.directory.close()
        self.disk.restart(page_cache_lost=power_cut)
        self._open("boot-2" if power_cut else "boot-1")
        assert self.directory.trust.clean
        assert self.log.high_watermark == self.high_watermark
        if not self.batches:
            self.start = self.end = self.high_watermark = self.log.log_end_offset

    @rule()
    def crash(self) -> None:
        self.directory.checkpoint()
        self.disk.restart(page_cache_lost=False)
        self._open("boot-1")
        assert self.log.findings == ()
        if not self.batches:
            self.start = self.end = self.high_watermark = self.log.log_end_offset

    @precondition(lambda self: self.high_watermark > self.start)
    @rule(part=st.floats(0, 1))
    def advance_log_start(self, part: float) -> None:
        self.start += int((self.high_watermark - self.start) * part)
        assert self.log.advance_log_start(self.start) == self.start
        first = self.log.first_segment_offset
        self.batches = [kept for kept in self.batches if kept.base >= first]

    @rule(max_bytes=st.integers(1, 3000))
    def let_the_follower_catch_up(self, max_bytes: int) -> None:
        if self.follower.log_end_offset < self.log.log_start_offset or self.follower.segments == ():
            self.follower.restart_at(self.log.first_segment_offset)
        if self.log.first_segment_offset == self.log.log_start_offset or self.follower.segments:
            self._align_follower()
            follow(self.follower, self.log, max_bytes=max_bytes)
            ours = {segment.base_offset: segment for segment in self.log.segments}
            for theirs in self.follower.segments:
                if theirs.base_offset in ours and theirs.count:
                    mine = ours[theirs.base_offset]
                    assert theirs.read(0, theirs.count)[0] == mine.read(0, mine.count)[0]

    def _align_follower(self) -> None:
        """Truncate the follower to the divergence point, as replication does before a fetch."""
        while self.follower.last_epoch >= 0:
            point = self.log.end_of_epoch(self.follower.last_epoch)
            mine = self.follower.end_of_epoch(point.epoch)
            cut = min(point.end_offset, mine.end_offset, self.log.log_end_offset)
            if cut >= self.follower.log_end_offset:
                return
            self.follower.truncate(cut)
        if self.follower.log_end_offset != self.log.first_segment_offset:
            self.follower.restart_at(self.log.first_segment_offset)

    @invariant()
    def holds_what_the_list_holds(self) -> None:
        if not hasattr(self, "log"):
            return
        assert (self.log.log_start_offset, self.log.log_end_offset) == (self.start, self.end)
        expected = [kept for kept in self.batches if kept.end > self.start]
        assert read_numbers(self.log) == [number for kept in expected for number in kept.numbers]
        assert self.log.last_epoch == (self.batches[-1].epoch if self.batches else -1)
        assert self.log.recovery_point <= self.end and self.start <= self.log.high_watermark <= self.end
        for epoch in {kept.epoch for kept in expected}:
            end = max(kept.end for kept in expected if kept.epoch == epoch)
            assert self.log.end_of_epoch(epoch) == EpochEnd(epoch, end)
        for wanted in (0, 100, 190):
            hit = next((kept for kept in expected if kept.timestamp >= wanted), None)
            answer = (max(hit.base, self.start), hit.timestamp) if hit else None
            assert self.log.offset_for_time(wanted, end_offset=self.end) == answer


TestLogModel = LogMachine.TestCase
TestLogModel.settings = settings(
    max_examples=40, stateful_step_count=30, deadline=None, suppress_health_check=list(HealthCheck)
)
