"""A test of random histories of a compacted log and its follower, against a model in a dictionary."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from sparklog.storage.log import Log
from sparklog.testing.sim_disk import SimDisk
from tests.storage.batches import append, marker, open_directory
from tests.storage.compacting import (
    NOW_US,
    WRITTEN_US,
    Seen,
    clean,
    commit_and_seal,
    copy,
    keyed_log,
    rolled,
    seen,
    write,
)

records_of = st.lists(
    st.tuples(st.sampled_from([b"", b"a", b"b", b"cc", b"d" * 40]), st.one_of(st.none(), st.integers(0, 99))),
    min_size=1,
    max_size=4,
)
steps = st.lists(
    st.one_of(
        records_of,
        st.tuples(st.sampled_from(["begin", "commit", "abort"]), st.integers(1, 3), records_of),
        st.sampled_from(["clean", "roll", "restart", "follow", "wait"]),
    ),
    min_size=5,
    max_size=60,
)


@settings(max_examples=60, deadline=None)
@given(steps=steps, buffer_keys=st.sampled_from([2, 5, 1000]))
def test_any_history_equals_the_model(steps: list[object], buffer_keys: int) -> None:
    """Readers of committed records see every key's newest record, and every record above the cleaned offset, after
    any cleanings. So does a replica that follows and cleans at other times."""
    run = _Run(buffer_keys)
    for step in steps:
        run.step(step)
    run.end()


class _Run:
    def __init__(self, buffer_keys: int) -> None:
        self.disk = SimDisk()
        self.log = keyed_log(open_directory(disk=self.disk), segment_bytes=2048, delete_retention_ms=1000)
        self.follower = keyed_log(open_directory(disk=SimDisk()), segment_bytes=2048, delete_retention_ms=1000)
        self.buffer_bytes = 96 * buffer_keys
        self.now_us = NOW_US
        self.producers = iter(range(100, 10_000))
        self.open: dict[int, tuple[int, int, list[Seen]]] = {}
        #: committed records, by offset
        self.model: dict[int, Seen] = {}

    def step(self, step: object) -> None:
        if isinstance(step, list):
            self._write(step, None)
        elif isinstance(step, tuple):
            self._transaction(*step)
        else:
            getattr(self, str(step))()
        self.check(self.log)

    def _write(self, records: list[tuple[bytes, int | None]], slot: int | None) -> None:
        start = self.log.log_end_offset
        found = [Seen(start + at, *record) for at, record in enumerate(records)]
        if slot is None:
            write(self.log, *records)
            self.model.update((one.offset, one) for one in found)
        else:
            producer, sequence, earlier = self.open.get(slot) or (next(self.producers), 0, [])
            write(self.log, *records, producer=producer, sequence=sequence, transactional=True)
            self.open[slot] = (producer, sequence + len(records), earlier + found)

    def _transaction(self, what: str, slot: int, records: list[tuple[bytes, int | None]]) -> None:
        self._write(records, slot)
        if what == "begin":
            return
        producer, _, found = self.open.pop(slot)
        said = marker(committed=(producer,)) if what == "commit" else marker(aborted=(producer,))
        append(self.log, said, now_us=WRITTEN_US)
        if what == "commit":
            self.model.update((one.offset, one) for one in found)

    def roll(self) -> None:
        self.model[self.log.log_end_offset] = Seen(self.log.log_end_offset, b"last", 0)
        rolled(self.log)

    def clean(self) -> None:
        self.log.set_high_watermark(self.log.log_end_offset)
        clean(self.log, self.now_us, buffer_bytes=self.buffer_bytes)

    def wait(self) -> None:
        self.now_us += 600_000

    def follow(self) -> None:
        self.log.set_high_watermark(self.log.log_end_offset)
        if self.log.cleaning.state.deletes_end > self.follower.log_end_offset:
            # it was away for longer than tombstones are kept: see ``is_outdated_for``
            self.follower.restart_at(self.log.first_segment_offset)
        copy(self.log, self.follower, max_bytes=500)
        commit_and_seal(self.follower)
        clean(self.follower, self.now_us, buffer_bytes=self.buffer_bytes)
        self.check(self.follower)

    def restart(self) -> None:
        self.log.durability.flush()
        self.log._files.services.checkpoint_now()
        config = self.log.config
        self.disk.restart(page_cache_lost=False)
        self.log = open_directory(disk=self.disk).logs()[0] if self.log.log_end_offset else self.log
        if self.log.config != config:
            self.log.config = config
        assert self.log.findings == ()

    def check(self, log: Log) -> None:
        log.set_high_watermark(log.log_end_offset)
        stable = log.last_stable_offset(log.high_watermark)
        found = {one.offset: one for one in seen(log)}
        truth = {offset: one for offset, one in self.model.items() if offset < stable}
        assert found.items() <= truth.items()
        cleaned_to = log.cleaning.state.end
        newest = {one.key: one.offset for _, one in sorted(truth.items()) if one.offset < cleaned_to}
        for offset, one in truth.items():
            if offset >= cleaned_to or (newest[one.key] == offset and one.value is not None):
                assert offset in found, one
        # a reader that applies the remaining records gets the same table as from all records
        assert _table(found) == _table(truth)

    def end(self) -> None:
        for slot in list(self.open):
            self._transaction("abort", slot, [(b"a", 1)])
        self.check(self.log)
        assert self.log.last_stable_offset(self.log.log_end_offset) == self.log.log_end_offset


def _table(records: dict[int, Seen]) -> dict[bytes | None, int]:
    table: dict[bytes | None, int | None] = {}
    for _, one in sorted(records.items()):
        table[one.key] = one.value
    return {key: value for key, value in table.items() if value is not None}
