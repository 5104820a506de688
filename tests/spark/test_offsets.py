"""Tests of requested offsets against the logs, and of the division of ranges into tasks."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparklog.errors import BrokerError, ConfigError, ErrorCode
from sparklog.model import OffsetRange, TopicPartition
from sparklog.spark.offsets import (
    EARLIEST,
    LATEST,
    ByOffset,
    ByTime,
    PartitionRange,
    cut_ranges,
    settle,
    settle_ranges,
    split_ranges,
    times_to_ask,
)

A0, A1, B0 = TopicPartition("a", 0), TopicPartition("a", 1), TopicPartition("b", 0)
ENDS = {A1: OffsetRange(0, 50), A0: OffsetRange(10, 30), B0: OffsetRange(7, 7)}


def start(offsets: int | dict[TopicPartition, int]) -> ByOffset:
    return ByOffset("startingOffsets", offsets)


def test_earliest_and_latest_are_the_ends_of_the_logs() -> None:
    assert settle(start(EARLIEST), ENDS, {}) == {A0: 10, A1: 0, B0: 7}
    assert settle(start(LATEST), ENDS, {}) == {A0: 30, A1: 50, B0: 7}


def test_offsets_can_be_given_by_partition() -> None:
    assert settle(start({A0: 12, A1: EARLIEST, B0: LATEST}), ENDS, {}) == {A0: 12, A1: 0, B0: 7}


@pytest.mark.parametrize("place", [start({A0: 12}), ByTime("startingOffsetsByTimestamp", {A0: 5}, or_latest=True)])
def test_offsets_must_name_every_partition(place: ByOffset | ByTime) -> None:
    with pytest.raises(ConfigError, match=f"{place.option} must give an? .*missing: a-1, b-0; not read: none"):
        settle(place, ENDS, {})
    with pytest.raises(ConfigError, match="missing: none; not read: a-0"):
        times_to_ask(place, [])


@pytest.mark.parametrize("offset", [9, 31])
def test_an_offset_outside_the_log_raises(offset: int) -> None:
    held = {A0: OffsetRange(10, 30)}
    with pytest.raises(
        BrokerError, match=f"startingOffsets: offset {offset} of a-0 is outside the log, which has 10 to 30"
    ) as caught:
        settle(start({A0: offset}), held, {})
    assert caught.value.code is ErrorCode.OFFSET_OUT_OF_RANGE
    assert settle(start({A0: offset}), held, {}, strict=False) == {A0: 10 if offset == 9 else 30}


def test_timestamps_become_offsets() -> None:
    place = ByTime("startingTimestamp", 7_000_000, or_latest=True)
    assert times_to_ask(place, [A0, B0]) == {A0: 7_000_000, B0: 7_000_000}
    assert times_to_ask(start(EARLIEST), [A0, B0]) == {}
    # The three offsets found: deleted meanwhile, in the log, and no such record.
    assert settle(place, ENDS, {A0: 3, A1: 20, B0: None}) == {A0: 10, A1: 20, B0: 7}
    strict = ByTime("startingOffsetsByTimestamp", {A0: 7_000_000}, or_latest=False)
    with pytest.raises(BrokerError, match="a-0 has no record at or after 7000 ms; startingOffsetsByTimestampStrategy"):
        settle(strict, {A0: ENDS[A0]}, {A0: None})


def test_empty_partitions_have_no_range() -> None:
    assert settle_ranges({A1: 0, A0: 12, B0: 7}, {A1: 20, A0: 30, B0: 7}) == [
        PartitionRange(A0, 12, 30),
        PartitionRange(A1, 0, 20),
    ]


def test_a_start_after_the_end_raises() -> None:
    with pytest.raises(ConfigError, match="a-0: the read would start at offset 20, after its end 15"):
        settle_ranges({A0: 20}, {A0: 15})


def test_tasks_have_a_maximum_size_and_a_minimum_count() -> None:
    ranges = [PartitionRange(A0, 0, 10), PartitionRange(A1, 5, 6)]
    assert cut_ranges(ranges) == ranges
    thirds = [PartitionRange(A0, 0, 3), PartitionRange(A0, 3, 6), PartitionRange(A0, 6, 10), ranges[1]]
    assert cut_ranges(ranges, max_records=4) == thirds
    assert cut_ranges(ranges, max_records=4, at_least=4) == thirds
    assert len(cut_ranges(ranges, max_records=4, at_least=7)) == 7


@given(
    sizes=st.lists(st.integers(1, 10_000), max_size=12),
    at_least=st.integers(0, 60),
)
def test_pieces_cover_the_ranges_in_order(sizes: list[int], at_least: int) -> None:
    ranges = [PartitionRange(TopicPartition("a", at), 5, 5 + size) for at, size in enumerate(sizes)]
    pieces = split_ranges(ranges, at_least)
    assert len(pieces) == max(len(ranges), min(at_least, sum(sizes)))
    for found in ranges:
        own = [piece for piece in pieces if piece.partition == found.partition]
        assert own[0].start == found.start
        assert own[-1].end == found.end
        assert all(left.end == right.start for left, right in itertools.pairwise(own))
        lengths = [piece.end - piece.start for piece in own]
        assert min(lengths) >= 1
        assert max(lengths) - min(lengths) <= 1
