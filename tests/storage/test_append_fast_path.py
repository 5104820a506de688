"""The fast append of a single batch has the same effect as the planned append."""

from __future__ import annotations

from collections import Counter
from typing import Any
from unittest import mock

from hypothesis import example, given, settings
from hypothesis import strategies as st

from sparklog.errors import BrokerError
from sparklog.record.codec import NO_TIMESTAMP
from sparklog.record.header import HEADER_BYTES, Flag, unpack_header
from sparklog.storage import append_fast_path
from sparklog.storage.log import Log
from sparklog.storage.log_tail import LogTail
from sparklog.testing.sim_disk import SimDisk
from tests.storage.batches import Batch, batch, commit_and_seal, create_log, marker, open_directory

_CLOCK = "sparklog.storage.%s.time.time_ns"

appends = st.fixed_dictionaries(
    {
        "count": st.integers(1, 4),
        "text": st.sampled_from(["x", "x" * 300]),
        "timestamp": st.sampled_from([1_000, 1_000, 900, 900, 2_000, 2_000, NO_TIMESTAMP]),
        "producer": st.sampled_from([-1, 1, 1, 2]),
        "sequence": st.sampled_from([-1, 0, 0, 0, 5]),
        "schema_id": st.sampled_from([0] * 9 + [1]),
        "compression": st.sampled_from([None, None, None, "lz4", "zstd"]),
        "transactional": st.sampled_from([False] * 9 + [True]),
    }
)
steps = st.one_of(
    *[
        st.tuples(
            st.just("append"), appends, st.sampled_from([0] * 7 + [1, -1]), st.sampled_from([0, 0, 1, 1, 5_000_000])
        )
    ]
    * 4,
    st.tuples(st.just("again"), st.just(None), st.just(0), st.just(0)),
    st.tuples(st.just("marker"), st.just(None), st.just(0), st.just(1)),
    st.tuples(st.just("full"), appends, st.integers(0, 600), st.just(1)),
    st.tuples(st.just("damaged"), appends, st.integers(0, 200), st.just(1)),
    st.tuples(st.just("lying"), appends, st.integers(0, 9), st.just(1)),
    st.tuples(st.just("cut"), st.just(None), st.integers(0, 6), st.just(1)),
    st.tuples(st.just("start"), st.just(None), st.integers(0, 6), st.just(1)),
    st.tuples(st.just("close files"), st.just(None), st.just(0), st.just(0)),
    st.tuples(st.just("seal"), st.just(None), st.sampled_from([0, 1]), st.just(0)),
    st.tuples(st.just("cleaned"), appends, st.just(0), st.just(1)),
    st.tuples(st.just("clean stop"), st.just(None), st.just(0), st.just(1)),
)
#: Header fields that do not continue the follower's log, in a batch that is sound in itself.
_LIES = [
    {name: change}
    for name in ("base_offset", "position", "running_max", "leader_epoch", "schema_id")
    for change in (-1, 1)
]
topics = st.fixed_dictionaries(
    {
        "segment_bytes": st.sampled_from([1400, 4096, 1 << 20]),
        "segment_ms": st.sampled_from([10_000, 604_800_000]),
        "flush_messages": st.sampled_from([0, 5]),
        "message_timestamp_type": st.sampled_from(["CreateTime"] * 4 + ["LogAppendTime"]),
        "cleanup_policy": st.sampled_from(["delete"] * 4 + ["compact"]),
        "max_compaction_lag_ms": st.sampled_from([4_000, 604_800_000]),
    }
)


class Pair:
    """A leader's log and its follower's on disks of their own."""

    def __init__(self, *, short: bool, topic: dict[str, Any]) -> None:
        self.short = short
        self.disks = SimDisk(), SimDisk()
        self.logs = [create_log(open_directory(disk=disk), **topic) for disk in self.disks]
        self.said: list[object] = []
        self.epoch, self.now_us = 1, 5_000_000
        self.sequences: dict[int, int] = {}
        self.last: Batch | None = None
        #: The number of fast appends.
        self.taken: Counter[str] = Counter()

    def run(self, steps: list[tuple[str, Any, int, int]]) -> None:
        with (
            mock.patch(_CLOCK % "log_tail", lambda: self.now_us * 1000),
            mock.patch.object(append_fast_path, "_growing", self._growing),
            mock.patch.object(LogTail, "append_plain", self._counted_append()),
        ):
            for kind, wanted, number, after_us in steps:
                self.now_us += after_us
                self._step(kind, wanted, number)

    def _growing(self, *log: Any, real: Any = append_fast_path._growing) -> Any:
        return real(*log) if self.short else None

    def _counted_append(self) -> Any:
        real: Any = LogTail.append_plain

        def append_plain(tail: LogTail, *batch: Any, **rest: Any) -> None:
            self.taken["leader" if tail is self.logs[0]._tail else "follower"] += 1
            real(tail, *batch, **rest)

        return append_plain

    def _step(self, kind: str, wanted: Any, number: int) -> None:
        leader = self.logs[0]
        if kind == "append":
            self.epoch += number
            self._append(self._built(wanted))
            self.epoch -= min(number, 0)
        elif kind == "again" and self.last is not None:
            self._append(self.last)
        elif kind == "marker":
            self._append(marker(aborted=(1,)))
        elif kind == "full":
            self.disks[0].capacity_bytes = self.disks[0].used_bytes + number
            self._append(self._built(wanted))
            self.disks[0].capacity_bytes = None
        elif kind == "damaged":
            self._append(self._built(wanted), damaged_at=number)
        elif kind == "lying":
            self._append(self._built(wanted), lie=_LIES[number])
        elif kind == "cut":
            for log in self.logs:
                self.said.append(log.truncate(max(leader.log_end_offset - number, 0)))
            self.sequences.clear()
        elif kind == "start":
            for log in self.logs:
                log.set_high_watermark(log.log_end_offset - 1)
                self.said.append(log.advance_log_start(log.log_end_offset - number))
        elif kind == "close files":
            for log in self.logs:
                for segment in log.segments:
                    segment.close()
        elif kind == "seal":
            for log in self.logs:
                commit_and_seal(log)
            if number and leader.segments:  # no batch follows the sealed segments
                last = leader.segments[-1].base_offset
                self.said += [log.truncate(last) for log in self.logs]
                self.sequences.clear()
        elif kind == "cleaned":
            self._append_cleaned(self._built(wanted))
        elif kind == "clean stop":
            for log in self.logs:
                log.durability.prepare_clean_stop()

    def _append_cleaned(self, one: Batch) -> None:
        """Append a batch to both logs that an earlier leader's cleaner has written."""
        header, body = one
        for log in self.logs:
            place = {"base_offset": log.log_end_offset, "append_time": self.now_us, "leader_epoch": self.epoch}
            sent = header._replace(flags=int(header.flags | Flag.CLEANED), **place)
            try:
                self.said.append(log.append_as_follower(sent.pack(), body))
            except BrokerError as error:
                self.said.append(str(error))

    def _built(self, wanted: dict[str, Any]) -> Batch:
        """Return a batch with the producer's next sequence, moved by ``sequence``."""
        producer, ahead = wanted["producer"], wanted["sequence"]
        sequence = -1 if producer < 0 or ahead < 0 else self.sequences.get(producer, 0) + ahead
        built = batch(**{**wanted, "sequence": sequence})
        if sequence >= 0 and ahead == 0:
            self.sequences[producer] = sequence + wanted["count"]
        return built

    def _append(self, one: Batch, *, damaged_at: int | None = None, lie: dict[str, int] | None = None) -> None:
        leader, follower = self.logs
        self.last = one
        for log in self.logs:
            log.durability.await_sync()  # the append must end this state
        try:
            self.said.append(leader.append_as_leader([one], leader_epoch=self.epoch, now_us=self.now_us))
        except BrokerError as error:
            self.said.append(str(error))
        if follower.log_end_offset < leader.first_segment_offset:
            follower.restart_at(leader.first_segment_offset)
        while follower.log_end_offset < leader.log_end_offset:
            found = leader.read(
                follower.log_end_offset, max_bytes=1, end_offset=leader.log_end_offset, for_follower=True
            )
            bodies = b"".join(bytes(body) for body in found.bodies)
            if damaged_at is not None:
                self._refused(found.headers, bodies, damaged_at)
            if lie is not None:
                self._lied_to(found.headers, bodies, lie)
                lie = None
                continue
            try:
                self.said.append(follower.append_as_follower(found.headers, memoryview(bodies)))
            except BrokerError as error:  # a truncation has separated the two logs
                self.said.append(str(error))
                follower.restart_at(leader.log_end_offset)

    def _refused(self, headers: bytes, bodies: bytes, at: int) -> None:
        """Send the batch with one changed bit: the follower appends nothing."""
        whole = bytearray(headers + bodies)
        whole[at % len(whole)] ^= 1
        packed = bytes(whole[:HEADER_BYTES])
        try:
            self.said.append(self.logs[1].append_as_follower(packed, memoryview(bytes(whole[HEADER_BYTES:]))))
        except BrokerError as error:
            self.said.append(str(error))
        else:
            raise AssertionError(f"damaged in byte {at % len(whole)}, and appended")

    def _lied_to(self, headers: bytes, bodies: bytes, lie: dict[str, int]) -> None:
        """Send the batch with one changed header field: both appends decide the same."""
        header = unpack_header(headers)
        [(name, change)] = lie.items()
        packed = header._replace(**{name: getattr(header, name) + change}).pack()
        try:
            self.said.append(self.logs[1].append_as_follower(packed, memoryview(bodies)))
        except BrokerError as error:
            self.said.append(str(error))

    def state(self) -> list[object]:
        return [self.said, *map(_state, self.logs)]

    def files(self) -> list[dict[str, bytes]]:
        return [
            {
                path.name: _content(disk, log, path.name)
                for segment in log.segments
                for path in (segment.data_path, segment.index_path)
            }
            for disk, log in zip(self.disks, self.logs, strict=True)
        ]


def _content(disk: SimDisk, log: Log, name: str) -> bytes:
    handle = disk.open(log.directory / name)
    try:
        return disk.read(handle, disk.size(handle), 0)
    finally:
        disk.close(handle)


def _state(log: Log) -> list[object]:
    """Return all state that an append changes."""
    tail, durability, services = log._tail, log.durability, log._files.services
    return [
        (log.log_start_offset, log.log_end_offset, log.high_watermark, log.recovery_point, log.last_epoch),
        (
            durability._clean,
            durability._untouched,
            tail.tombstone_window.last_progress_us,
            tail.epochs.entries,
            services.moved,
        ),
        (durability._unflushed_records, durability._unflushed_since_us),
        (tail.producers.state(), log.transactions.open(), services.hot.size_bytes),
        {base: (bytes(hot.header), bytes(hot.body), hot.next_offset) for base, hot in tail.hot.items()},
        [
            (
                (one.base_offset, one.end_offset, one.count, one.data_size, one.running_max, one.schema_id),
                (one.first_append_us, one.last_append_us, one.sealed, one.cleaned, one.begins_with_marker),
                (list(one.bases()), list(one._positions)),
            )
            for one in log.segments
        ],
    ]


_ONE = {
    "count": 2, "text": "x", "timestamp": 5, "producer": -1, "sequence": -1, "schema_id": 0, "compression": None,
    "transactional": False,
}  # fmt: skip
_APPEND = ("append", _ONE, 0, 1)
#: The last segment has room and is sealed: the segment after it, of another schema, was truncated.
_SEALED = [_APPEND, _APPEND, ("append", {**_ONE, "schema_id": 1}, 0, 1), ("seal", None, 1, 0)]


def test_the_fast_append_equals_the_planned_append() -> None:
    taken: Counter[str] = Counter()

    @settings(max_examples=150, deadline=None)
    @example(topic={}, steps=[*_SEALED, _APPEND, _APPEND])
    @example(topic={}, steps=[_APPEND, ("cleaned", _ONE, 0, 1), _APPEND, _APPEND])
    @example(topic={}, steps=[_APPEND, ("clean stop", None, 0, 1), _APPEND])
    @example(
        topic={"cleanup_policy": "compact", "max_compaction_lag_ms": 4_000},
        steps=[_APPEND, _APPEND, ("append", _ONE, 0, 5_000_000)],
    )
    @given(topic=topics, steps=st.lists(steps, min_size=8, max_size=25))
    def same(topic: dict[str, Any], steps: list[tuple[str, Any, int, int]]) -> None:
        short, planned = Pair(short=True, topic=topic), Pair(short=False, topic=topic)
        for pair in (short, planned):
            pair.run(steps)
        assert short.state() == planned.state()
        assert short.files() == planned.files()
        assert not planned.taken
        taken.update(short.taken)

    same()
    assert min(taken["leader"], taken["follower"]) > 30, taken


def test_a_batch_after_another_takes_the_fast_append() -> None:
    pair = Pair(short=True, topic={})
    pair.run([_APPEND])
    with (
        mock.patch("sparklog.storage.log_tail.plan_leader_append", side_effect=AssertionError),
        mock.patch("sparklog.storage.log_tail.plan_follower_append", side_effect=AssertionError),
    ):
        pair.run([_APPEND] * 3)
    assert [log.log_end_offset for log in pair.logs] == [8, 8]
    assert pair.taken == {"leader": 3, "follower": 3}


def test_the_last_segment_of_the_examples_is_sealed_or_cleaned() -> None:
    pair = Pair(short=True, topic={})
    pair.run(_SEALED)
    assert [(len(log.segments), log.segments[-1].sealed) for log in pair.logs] == [(1, True)] * 2
    pair.run([("cleaned", _ONE, 0, 1)])
    assert [log.segments[-1].cleaned for log in pair.logs] == [True, True]
