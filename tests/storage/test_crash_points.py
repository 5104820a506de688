"""Tests in which the process or the machine dies in each operation of a script in turn: promised records exist
afterwards.

The script appends, seals, truncates and continues. Each run dies in another operation, so that every point between two
operations, and some points inside each write, are covered.
"""

from __future__ import annotations

import pytest

from sparklog.storage.log import Log
from sparklog.testing.sim_disk import ProcessDied, SimDisk
from tests.storage.batches import (
    SMALL,
    TP,
    append,
    batch,
    commit_and_seal,
    create_log,
    fill,
    open_directory,
    read_numbers,
)
from tests.tiers import marked_after


class Witness:
    """A client's knowledge of the log: the appended content, and how much of it certainly existed."""

    def __init__(self) -> None:
        self.numbers: list[int] = []  #: every record whose append returned or may have been in flight
        self.appended = 0  #: offsets below were appended, and the call returned
        self.cut_to: int | None = None  #: a truncation to this offset is in progress
        self.fsynced = 0
        self.ever: set[tuple[int, int]] = set()  #: the (offset, number) of all records ever appended, truncated or not

    def appending(self, start: int, numbers: list[int]) -> None:
        self.numbers[start:] = numbers
        self.ever.update(enumerate(numbers, start))


def script(disk: SimDisk, witness: Witness) -> None:
    directory = open_directory(disk=disk)
    log = create_log(directory, segment_bytes=SMALL)

    def more(batches: int, epoch: int) -> None:
        for _ in range(batches):
            start = log.log_end_offset
            new = [1000 * epoch + start, 1000 * epoch + start + 3]
            witness.appending(start, [number for first in new for number in range(first, first + 3)])
            append(
                log,
                *(batch(3, first=first, producer=5, epoch=epoch, sequence=-1) for first in new),
                leader_epoch=epoch,
            )
            witness.appended = log.log_end_offset

    def cut(offset: int) -> None:
        witness.cut_to = offset
        log.truncate(offset)
        witness.appended = min(witness.appended, offset)
        witness.fsynced = min(witness.fsynced, offset)
        witness.cut_to = None

    more(5, 1)
    commit_and_seal(log, 18)
    directory.checkpoint()
    witness.fsynced = log.recovery_point
    more(3, 2)
    cut(39)
    more(3, 3)
    commit_and_seal(log, 40)
    directory.checkpoint()
    witness.fsynced = log.recovery_point
    cut(21)
    more(4, 4)
    log.advance_log_start(14)
    directory.write_clean_marker()
    witness.fsynced = log.log_end_offset
    directory.close()


def operations() -> int:
    disk = SimDisk()
    script(disk, Witness())
    return disk.changes


TOTAL = operations()


def died_at(operation: int, *, seed: int) -> tuple[SimDisk, Witness]:
    disk, witness = SimDisk(seed=seed), Witness()
    disk.die_after(operation)
    with pytest.raises(ProcessDied):
        script(disk, witness)
    return disk, witness


def check(log: Log | None, witness: Witness, *, at_least: int, page_cache_lost: bool = False) -> None:
    if log is None:
        assert at_least == 0
        return
    at_least = at_least if witness.cut_to is None else min(at_least, witness.cut_to)
    assert log.log_end_offset >= at_least
    found = read_numbers(log)
    start = log.log_start_offset - log.log_start_offset % 3
    if page_cache_lost:
        # A truncation that was not fsynced may be undone, with all later records. Below the fsynced offset nothing may
        # differ.
        assert found[: max(0, at_least - start)] == witness.numbers[start:at_least]
        assert set(enumerate(found, start)) <= witness.ever
    else:
        assert found == witness.numbers[start : log.log_end_offset]
    epochs = [number // 1000 for number in found]
    if epochs:
        assert log.last_epoch == epochs[-1]
        for epoch in set(epochs):
            end = max(at for at, found_epoch in enumerate(epochs) if found_epoch == epoch) + 1 + start
            assert log.end_of_epoch(epoch).end_offset == end
    fill(log, 6, leader_epoch=9)
    commit_and_seal(log)
    assert read_numbers(log)[: len(found)] == found


@pytest.mark.parametrize("operation", range(TOTAL))
def test_a_process_crash_keeps_every_promise(operation: int) -> None:
    disk, witness = died_at(operation, seed=operation)
    disk.restart(page_cache_lost=False)
    directory = open_directory(disk=disk)
    assert directory.trusted
    log = directory.get(TP)
    assert log is None or log.findings == ()
    check(log, witness, at_least=witness.appended)
    disk.restart(page_cache_lost=False)
    again = open_directory(disk=disk).get(TP)
    assert again is None or again.findings == ()


@pytest.mark.parametrize("operation", range(0, TOTAL, 2))
@pytest.mark.parametrize("seed", marked_after(1, range(3), pytest.mark.extended))
def test_a_machine_crash_keeps_every_promise(operation: int, seed: int) -> None:
    disk, witness = died_at(operation, seed=1000 * seed + operation)
    disk.restart(page_cache_lost=True)
    directory = open_directory(disk=disk, boot_id="boot-2")
    check(directory.get(TP), witness, at_least=witness.fsynced, page_cache_lost=True)
    disk.restart(page_cache_lost=False)
    again = open_directory(disk=disk, boot_id="boot-2").get(TP)
    assert again is None or again.findings == ()
