"""Settling asked offsets against the logs, and cutting ranges into tasks."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparklog.errors import BrokerError, ConfigError, ErrorCode
from sparklog.model import OffsetRange, TopicPartition
from sparklog.spark.offsets import EARLIEST, LATEST, PartitionRange, settle_ranges, split_ranges

A0, A1, B0 = TopicPartition("a", 0), TopicPartition("a", 1), TopicPartition("b", 0)
ENDS = {A1: OffsetRange(0, 50), A0: OffsetRange(10, 30), B0: OffsetRange(7, 7)}


def test_all_of_it_leaves_empty_partitions_out() -> None:
    assert settle_ranges(starting=EARLIEST, ending=LATEST, log_ends=ENDS) == [
        PartitionRange(A0, 10, 30),
        PartitionRange(A1, 0, 50),
    ]


def test_offsets_per_partition() -> None:
    starting = {A0: 12, A1: EARLIEST, B0: 7}
    ending = {A0: LATEST, A1: 20, B0: LATEST}
    assert settle_ranges(starting=starting, ending=ending, log_ends=ENDS) == [
        PartitionRange(A0, 12, 30),
        PartitionRange(A1, 0, 20),
    ]


def test_every_partition_has_to_be_named() -> None:
    with pytest.raises(ConfigError, match="missing: a-1, b-0; not read: c-3"):
        settle_ranges(starting={A0: 12, TopicPartition("c", 3): 1}, ending=LATEST, log_ends=ENDS)


@pytest.mark.parametrize("offset", [9, 31])
def test_an_offset_outside_the_log_raises(offset: int) -> None:
    with pytest.raises(BrokerError, match=f"startingOffsets {offset} of a-0 found, 10 to 30 expected") as caught:
        settle_ranges(starting={A0: offset}, ending=LATEST, log_ends={A0: OffsetRange(10, 30)})
    assert caught.value.code is ErrorCode.OFFSET_OUT_OF_RANGE


def test_a_start_behind_the_end_raises() -> None:
    with pytest.raises(ConfigError, match="a-0: startingOffsets 20 lies behind endingOffsets 15"):
        settle_ranges(starting={A0: 20}, ending={A0: 15}, log_ends={A0: OffsetRange(10, 30)})


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
