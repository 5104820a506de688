"""Tests of idempotence: the pure rules, and that the log keeps them across restarts, truncation and retention."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparklog.errors import BrokerError, ErrorCode
from sparklog.model import OffsetRange, TopicPartition
from sparklog.record.header import BatchHeader, Flag
from sparklog.record.marker import Marker
from sparklog.storage.log import Log
from sparklog.storage.producers import (
    AppendedBatch,
    ProducerEntry,
    ProducerTable,
    check_sequence,
    from_snapshot,
    to_snapshot,
    with_batch,
)
from sparklog.testing.sim_disk import SimDisk
from tests.storage.batches import TP, append, batch, commit_and_seal, create_log, follow, open_directory, refused

P = 9  #: a producer id


def header(first_sequence: int, count: int = 10, *, epoch: int = 0, base_offset: int = 0) -> BatchHeader:
    built, _ = batch(1, producer=P, epoch=epoch, sequence=first_sequence)
    return built._replace(record_count=count, offset_span=count, base_offset=base_offset, append_time=base_offset)


def entry_after(*first_sequences: int, epoch: int = 0) -> ProducerEntry:
    entry = None
    for number, first in enumerate(first_sequences):
        entry = with_batch(entry, header(first, epoch=epoch, base_offset=100 * number))
    assert entry is not None
    return entry


def test_the_next_sequence_is_new() -> None:
    assert check_sequence(None, header(0)) is None
    assert check_sequence(entry_after(0, 10), header(20)) is None


def test_five_duplicates_are_known_and_older_ones_reported() -> None:
    entry = entry_after(*range(0, 70, 10))
    assert entry.batches[0] == AppendedBatch(20, 29, 200, 210)
    for number in range(2, 7):
        assert check_sequence(entry, header(10 * number)) == OffsetRange(100 * number, 100 * number + 10)
    with refused(ErrorCode.DUPLICATE_SEQUENCE_NUMBER):
        check_sequence(entry, header(10))


def test_gaps_are_refused() -> None:
    for entry, first in ((None, 10), (entry_after(0), 20), (entry_after(0, epoch=1), 5000)):
        with refused(ErrorCode.OUT_OF_ORDER_SEQUENCE_NUMBER):
            check_sequence(entry, header(first, epoch=1))


def test_a_batch_overlapping_the_last_is_refused() -> None:
    with refused(ErrorCode.OUT_OF_ORDER_SEQUENCE_NUMBER):
        check_sequence(entry_after(0), header(5))
    with refused(ErrorCode.DUPLICATE_SEQUENCE_NUMBER):
        check_sequence(entry_after(0), header(0, count=5))


def test_epochs_fence_and_restart_sequences() -> None:
    entry = entry_after(0, 10, epoch=3)
    with refused(ErrorCode.INVALID_PRODUCER_EPOCH):
        check_sequence(entry, header(20, epoch=2))
    with refused(ErrorCode.OUT_OF_ORDER_SEQUENCE_NUMBER):
        check_sequence(entry, header(20, epoch=4))
    assert check_sequence(entry, header(0, epoch=4)) is None
    assert with_batch(entry, header(0, epoch=4, base_offset=7)) == ProducerEntry(4, (AppendedBatch(0, 9, 7, 17),), 7)


def test_an_unknown_kafka_producer_begins_at_any_sequence() -> None:
    assert check_sequence(None, header(70), begins_anywhere=True) is None
    with refused(ErrorCode.OUT_OF_ORDER_SEQUENCE_NUMBER):
        check_sequence(entry_after(0), header(70, epoch=1), begins_anywhere=True)
    table = ProducerTable()
    assert table.known([(header(70), b""), (header(80), b"")], TP, begins_anywhere=True) == []
    with refused(ErrorCode.OUT_OF_ORDER_SEQUENCE_NUMBER):
        table.known([(header(70), b"")], TP)


def test_a_batch_before_the_first_of_a_kafka_producer_is_no_duplicate() -> None:
    entry = entry_after(70, 80)
    assert check_sequence(entry, header(70), begins_anywhere=True) == OffsetRange(0, 10)
    with refused(ErrorCode.OUT_OF_ORDER_SEQUENCE_NUMBER):
        check_sequence(entry, header(60), begins_anywhere=True)
    with refused(ErrorCode.DUPLICATE_SEQUENCE_NUMBER):
        check_sequence(entry, header(60))
    for known in (entry_after(0, 10), entry_after(*range(70, 130, 10))):
        with refused(ErrorCode.DUPLICATE_SEQUENCE_NUMBER):
            check_sequence(known, header(0, count=5), begins_anywhere=True)


def test_sequences_wrap_around() -> None:
    entry = ProducerEntry(0, (AppendedBatch(2**31 - 10, 2**31 - 1, 0, 10),), 0)
    assert check_sequence(entry, header(0)) is None
    wrapping = ProducerEntry(0, (AppendedBatch(2**31 - 20, 2**31 - 6, 0, 15),), 0)
    assert check_sequence(wrapping, header(2**31 - 5)) is None
    entry = with_batch(wrapping, header(2**31 - 5, base_offset=15))
    assert entry.batches[-1].last_sequence == 4
    assert check_sequence(entry, header(5)) is None
    with refused(ErrorCode.DUPLICATE_SEQUENCE_NUMBER):
        check_sequence(entry, header(2**31 - 40))


def test_a_snapshot_survives_encoding_and_ids_expire() -> None:
    table = ProducerTable()
    for first, second in pairwise(range(0, 40, 10)):
        table.record(header(first, base_offset=second))
    table.record(batch()[0])
    again = from_snapshot(to_snapshot(table.state(), 99))
    assert again.state() == table.state() and len(table) == 1
    table.expire(30)
    assert len(table) == 1
    table.expire(31)
    assert len(table) == 0 and len(again) == 1


def test_a_marker_leaves_a_producer_of_many_transactions_in_the_table() -> None:
    table = ProducerTable()
    sent = header(0, epoch=1)._replace(flags=int(Flag.TRANSACTIONAL))
    table.record(sent)
    assert P in table.transactions
    table.record(batch()[0]._replace(base_offset=10), Marker(committed=((P, 1),)))
    again = from_snapshot(to_snapshot(table.state(), 99))
    for found in (table, again):
        assert P not in found.transactions
        assert found.known([(sent, None)], TP) == [OffsetRange(0, 10)], "a retry after the marker is a duplicate"
        assert found.known([(header(10, epoch=1), None)], TP) == [], "the next transaction continues the sequence"
        assert found.known([(header(0, epoch=2), None)], TP) == []
    table.record(header(0, epoch=0)._replace(producer_id=P + 1, flags=int(Flag.TRANSACTIONAL)))
    table.record(batch()[0]._replace(base_offset=30), Marker(aborted=((P + 1, 0),)))
    assert table.get(P + 1) is None, "an id with epoch 0 serves one transaction"


@given(
    earlier=st.lists(st.integers(1, 3), max_size=8),
    sequence=st.integers(-1, 30),
    count=st.integers(1, 4),
    epoch=st.integers(0, 2),
    producer=st.sampled_from([-1, P, P + 1]),
)
def test_a_single_batch_is_judged_as_the_first_of_several(
    earlier: list[int], sequence: int, count: int, epoch: int, producer: int
) -> None:
    table = ProducerTable()
    ends = list(accumulate(earlier, initial=0))
    for first, size in zip(ends, earlier, strict=False):
        table.record(header(first, size, epoch=1, base_offset=first))
    found = header(sequence, count, epoch=epoch)._replace(producer_id=producer)

    def judged(judge: Callable[[Sequence[tuple[BatchHeader, object]], TopicPartition], object]) -> object:
        try:
            return judge([(found, b"")], TP)
        except BrokerError as error:
            return error.code, error.detail

    assert judged(table.known) == judged(table._known_of_several)


# --- in the log -------------------------------------------------------------------------------------------------


def produce(log: Log, number: int, *, leader_epoch: int = 1, epoch: int = 0) -> OffsetRange:
    """Return batch ``number`` of producer P, with three records."""
    return append(
        log, batch(3, first=3 * number, producer=P, epoch=epoch, sequence=3 * number), leader_epoch=leader_epoch
    )


def test_a_retry_gets_the_earlier_offsets() -> None:
    log = create_log(open_directory(disk=SimDisk()))
    for number in range(3):
        assert produce(log, number) == OffsetRange(3 * number, 3 * number + 3)
    append(log, batch(5))
    assert produce(log, 1) == OffsetRange(3, 6)
    assert log.log_end_offset == 14
    with refused(ErrorCode.OUT_OF_ORDER_SEQUENCE_NUMBER):
        produce(log, 4)
    assert produce(log, 3) == OffsetRange(14, 17)


def test_a_request_may_have_known_and_new_batches() -> None:
    log = create_log(open_directory(disk=SimDisk()))
    batches = [batch(3, producer=P, sequence=3 * number) for number in range(4)]
    append(log, *batches[:2])
    assert append(log, *batches) == OffsetRange(0, 12)
    assert append(log, *batches[1:3]) == OffsetRange(3, 9)
    assert log.log_end_offset == 12
    with refused(ErrorCode.OUT_OF_ORDER_SEQUENCE_NUMBER):
        append(log, batch(3, producer=P, sequence=12), batch(3, producer=P, sequence=18))
    assert log.log_end_offset == 12
    with refused(ErrorCode.INVALID_REQUEST):
        append(log, *[batch(3, producer=P, sequence=12)] * 2)
    with refused(ErrorCode.INVALID_REQUEST):
        append(log, batch(3), batch(3, producer=P, sequence=9))
    assert log.log_end_offset == 12


@pytest.mark.parametrize("stop", ["clean", "process", "power"])
@pytest.mark.parametrize("sealed", [False, True])
def test_duplicates_are_recognized_after_a_restart(stop: str, sealed: bool) -> None:
    disk = SimDisk(seed=3)
    directory = open_directory(disk=disk)
    log = create_log(directory, segment_bytes=1280)
    for number in range(20):
        produce(log, number)
    if sealed:
        assert commit_and_seal(log) == 4
    if stop == "clean":
        directory.write_clean_marker()
        directory.close()
    elif stop == "power":
        log.durability.flush()
    disk.restart(page_cache_lost=stop == "power")
    log = create_log(open_directory(disk=disk, boot_id="boot-2" if stop == "power" else "boot-1"))
    for number in range(15, 20):
        assert produce(log, number) == OffsetRange(3 * number, 3 * number + 3)
    with refused(ErrorCode.DUPLICATE_SEQUENCE_NUMBER):
        produce(log, 14)
    assert produce(log, 20) == OffsetRange(60, 63)


def test_truncation_drops_the_truncated_batches() -> None:
    disk = SimDisk()
    log = create_log(open_directory(disk=disk), segment_bytes=1280)
    for number in range(20):
        produce(log, number)
    commit_and_seal(log)
    log.truncate(31)
    assert log.log_end_offset == 30
    with refused(ErrorCode.OUT_OF_ORDER_SEQUENCE_NUMBER):
        produce(log, 11, leader_epoch=2)
    assert produce(log, 9, leader_epoch=2) == OffsetRange(27, 30)
    assert produce(log, 10, leader_epoch=2) == OffsetRange(30, 33)
    disk.restart(page_cache_lost=False)
    log = create_log(open_directory(disk=disk))
    assert produce(log, 10, leader_epoch=2) == OffsetRange(30, 33)
    assert produce(log, 11, leader_epoch=2) == OffsetRange(33, 36)


def test_producers_survive_retention() -> None:
    disk = SimDisk()
    directory = open_directory(disk=disk)
    log = create_log(directory, segment_bytes=1280)
    produce(log, 0)
    for _ in range(20):
        append(log, batch())
    commit_and_seal(log)
    log.advance_log_start(log.segments[-1].base_offset)
    directory.checkpoint()
    disk.restart(page_cache_lost=False)
    log = create_log(open_directory(disk=disk))
    assert log.log_start_offset > 3
    assert produce(log, 0) == OffsetRange(0, 3)
    assert produce(log, 1).start == 63


def test_a_follower_that_becomes_leader_knows_its_producers() -> None:
    leader = create_log(open_directory(disk=SimDisk()))
    follower = create_log(open_directory(disk=SimDisk()))
    for number in range(3):
        produce(leader, number)
    follow(follower, leader)
    assert produce(follower, 2, leader_epoch=2) == OffsetRange(6, 9)
    assert produce(follower, 3, leader_epoch=2) == OffsetRange(9, 12)
    assert follower.tp == TP
