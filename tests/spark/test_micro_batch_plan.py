"""Tests of streaming without Spark and brokers: checkpoint offsets, the ranges of a batch, limits, losses."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadMaxRows, ReadMinRows

from sparklog.errors import ConfigError
from sparklog.model import NO_EPOCH, OffsetRange, TopicPartition
from sparklog.spark.limits import TriggerClock, TriggerLimits, spread
from sparklog.spark.micro_batch_plan import (
    BatchRange,
    Withheld,
    batch_ranges,
    end_of_batch,
    first_position,
    held_back,
    next_position,
    waiting,
)
from sparklog.spark.stream_offset import MARKER, Position, StreamOffset, is_marker, parse_stream_offset

A0, A1, A10, B0 = (TopicPartition(*tp) for tp in (("a", 0), ("a", 1), ("a", 10), ("b", 0)))


def held(start: int, readable: int, *, end: int = -1, topic_id: str = "A", epoch: int = 4) -> Withheld:
    return Withheld(topic_id, start, readable, max(end, readable), epoch)


# --- the text in the checkpoint ---


def test_an_offset_has_one_text_form() -> None:
    offset = StreamOffset({A10: Position("A", 7), B0: Position("B", 9, 2), A1: Position("A", 5, 0)})
    text = json.dumps(offset.to_json())
    assert text == (
        '{"topics": {"a": {"epochs": {"1": 0}, "id": "A", "offsets": {"1": 5, "10": 7}}, '
        '"b": {"epochs": {"0": 2}, "id": "B", "offsets": {"0": 9}}}, "version": 1}'
    )
    assert parse_stream_offset(json.loads(text)) == offset
    assert json.dumps(parse_stream_offset(json.loads(text)).to_json()) == text


def test_a_batch_stores_where_it_began() -> None:
    offset = StreamOffset({A1: Position("A", 5)}, {A1: Position("A", 2)})
    stored = json.loads(json.dumps(offset.to_json()))
    assert list(stored) == ["from", "topics", "version"]
    assert parse_stream_offset(stored) == offset


def test_a_marker_is_not_an_offset() -> None:
    assert is_marker(json.loads(json.dumps(MARKER)))
    assert not is_marker(StreamOffset({}).to_json())


@pytest.mark.parametrize(
    ("stored", "complaint"),
    [
        ({"version": 2, "shards": {}}, "has version 2, but this version of sparklog supports only up to 1"),
        ({"version": 2, "start": "x"}, "has version 2, but this version of sparklog supports only up to 1"),
        ({"a": {"0": 5}}, "was not written by this source: it has no version"),
        ({"version": 1, "topics": {"a": {"offsets": {"0": 5}}}}, "was not written by this source: .*`id`"),
        ({"version": 1, "topics": {"a": {"id": "A", "offsets": {"x": 5}}}}, "was not written by this source"),
    ],
)
def test_an_offset_of_another_source_is_refused(stored: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        if not is_marker(stored):
            parse_stream_offset(stored)


# --- the ranges of a batch ---


def test_the_first_batch_carries_its_start_even_when_empty() -> None:
    now = {A0: held(0, 10), A1: held(3, 3)}
    end = end_of_batch(first_position({A0: 10, A1: 3}, now), now, limit=None)
    assert end.begun == {A0: Position("A", 10), A1: Position("A", 3)} == end.positions
    assert batch_ranges(None, end) == []


def test_a_replay_of_the_first_batch_starts_where_it_began() -> None:
    now = {A0: held(0, 10)}
    end = end_of_batch(first_position({A0: 6}, now), now, limit=None)
    assert end.positions == {A0: Position("A", 10, 4)}
    replayed = parse_stream_offset(json.loads(json.dumps(end.to_json())))
    assert batch_ranges(None, replayed) == [BatchRange(A0, Position("A", 6), 10)]
    # The next batch starts at the replayed batch's end. The start of the first batch no longer matters.
    position = next_position(replayed.positions, {A0: held(0, 12)})
    assert position.begun == {}
    after = end_of_batch(position, {A0: held(0, 12)}, limit=None)
    assert batch_ranges(replayed, after) == [BatchRange(A0, Position("A", 10, 4), 12)]


def test_without_new_records_the_offset_stays_equal() -> None:
    last = {A0: Position("A", 10, 2), A1: Position("A", 4)}
    now = {A0: held(0, 10, epoch=9), A1: held(4, 4, epoch=9)}
    end = end_of_batch(next_position(last, now), now, limit=5)
    assert end == StreamOffset(last)


def test_new_partitions_and_topics_are_read_from_their_beginning() -> None:
    last = StreamOffset({A0: Position("A", 10)})
    now = {A0: held(0, 12), A1: held(0, 3), B0: held(0, 2, topic_id="B")}
    position = next_position(last.positions, now)
    assert position.losses == ()
    end = end_of_batch(position, now, limit=None)
    assert set(end.begun) == {A1, B0}
    assert batch_ranges(last, end) == [
        BatchRange(A0, Position("A", 10), 12),
        BatchRange(A1, Position("A", 0), 3),
        BatchRange(B0, Position("B", 0), 2),
    ]


@pytest.mark.parametrize(
    ("now", "loss", "begin"),
    [
        ({}, "a-0 was deleted, or the query no longer reads it", None),
        ({A0: held(0, 20, topic_id="other")}, "deleted and created again", Position("other", 0)),
        ({A0: held(12, 20)}, "offsets 10 to 12 were deleted", Position("A", 12)),
        ({A0: held(0, 8)}, "the log was truncated to 8, but was read up to offset 10", Position("A", 8)),
    ],
)
def test_deleted_and_truncated_records_are_reported_as_losses(
    now: dict[TopicPartition, Withheld], loss: str, begin: Position | None
) -> None:
    position = next_position({A0: Position("A", 10, 1)}, now)
    (told,) = position.losses
    assert loss in told
    assert position.begins.get(A0) == position.begun.get(A0) == begin


def test_deleted_records_are_not_read() -> None:
    last, now = StreamOffset({A0: Position("A", 10, 1)}), {A0: held(12, 20)}
    end = end_of_batch(next_position(last.positions, now), now, limit=None)
    assert batch_ranges(last, end) == [BatchRange(A0, Position("A", 12), 20)]


def test_a_new_partition_without_its_first_records_is_a_loss() -> None:
    (told,) = next_position({}, {A0: held(5, 9)}).losses
    assert "a-0 is new, and its offsets 0 to 5 are already deleted" in told


def test_unreadable_and_unseen_records_are_no_loss() -> None:
    # Committed records may not be readable yet: a query that read uncommitted records before waits for them.
    now = {A0: held(0, 8, end=15)}
    position = next_position({A0: Position("A", 10, 1)}, now)
    assert position.losses == ()
    assert waiting(position, now) == {A0: OffsetRange(10, 10)}
    # A broker may not know of a partition yet.
    waits = next_position({A0: Position("A", 10)}, {}, unseen={A0})
    assert (waits.losses, waits.begins) == ((), {A0: Position("A", 10)})
    assert end_of_batch(waits, {}, limit=None).positions == {A0: Position("A", 10)}


def test_offsets_that_do_not_follow_each_other_are_refused() -> None:
    end = StreamOffset({A0: Position("A", 5)})
    for start in (None, StreamOffset({A0: Position("B", 2)}), StreamOffset({A0: Position("A", 6)})):
        with pytest.raises(ConfigError, match="does not follow from a start of"):
            batch_ranges(start, end)


def test_available_now_ends_where_the_log_was_at_its_start() -> None:
    then = {A0: held(0, 10), A1: held(0, 5)}
    now = {A0: held(0, 99), A1: held(2, 7, topic_id="again"), A10: held(0, 3), B0: held(0, 1)}
    capped = held_back(now, then)
    assert {tp: found.readable for tp, found in capped.items()} == {A0: 10, A1: 2}
    assert capped[A0].end == 99


def test_an_epoch_is_kept_while_nothing_is_read() -> None:
    now = {A0: held(0, 12, epoch=9), A1: held(0, 5, epoch=9)}
    end = end_of_batch(next_position({A0: Position("A", 10, 2), A1: Position("A", 5, 2)}, now), now, limit=None)
    assert (end.positions[A0].epoch, end.positions[A1].epoch) == (9, 2)
    assert NO_EPOCH not in {found.epoch for found in end.positions.values()}


# --- limits ---


def test_limits_are_spread_by_each_partitions_records() -> None:
    there = {A0: OffsetRange(0, 900), A1: OffsetRange(50, 150), B0: OffsetRange(7, 7)}
    assert spread(there, 100) == {A0: 90, A1: 60, B0: 7}
    assert spread(there, None) == spread(there, 1000) == {A0: 900, A1: 150, B0: 7}
    # Each of the smallest partitions gets one record, even above the limit.
    assert spread({A0: OffsetRange(0, 1000), A1: OffsetRange(0, 1)}, 10) == {A0: 9, A1: 1}


@given(sizes=st.lists(st.integers(0, 10**12), min_size=1, max_size=8), limit=st.integers(1, 10**9))
def test_a_limit_always_advances_and_never_passes_the_end(sizes: list[int], limit: int) -> None:
    there = {TopicPartition("a", at): OffsetRange(5, 5 + size) for at, size in enumerate(sizes)}
    ends = spread(there, limit)
    assert all((5 < ends[tp] <= found.end) if found.end > 5 else ends[tp] == 5 for tp, found in there.items())
    assert sum(end - 5 for end in ends.values()) <= limit + len(sizes)


def test_spark_gets_the_limits_of_the_trigger() -> None:
    assert TriggerLimits().default_read_limit() == ReadAllAvailable()
    assert TriggerLimits(most=5, least=2).default_read_limit() == ReadMaxRows(5)
    assert TriggerLimits(least=2).default_read_limit() == ReadMinRows(2)


def test_a_batch_waits_for_enough_records_for_a_bounded_time() -> None:
    clock, limits = TriggerClock(), TriggerLimits(least=10, max_delay_ms=1000)
    assert not clock.is_too_early(limits, 1, 0)  # the first batch of a run
    assert clock.is_too_early(limits, 9, 500)
    assert not clock.is_too_early(limits, 10, 600)
    assert clock.is_too_early(limits, 9, 1500)
    assert not clock.is_too_early(limits, 9, 1600)
    assert not clock.is_too_early(TriggerLimits(), 1, 1601)
