"""Tests of the plan of a cleaning: when a compacted log is due, up to which offset, and which segments become one."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from sparklog.storage.cleaning_plan import CleanerState, CleaningCandidate, SegmentFacts, due, due_again_us, groups
from tests.storage.batches import config

SECOND_US = 1_000_000
NOW_US = 1_000 * SECOND_US


def segments(*sizes: int, schema_ids: tuple[int, ...] = (), age_s: int = 100) -> list[SegmentFacts]:
    """Segments of ten offsets each, each a second younger than the one before."""
    return [
        SegmentFacts(
            10 * number,
            10 * number + 10,
            size,
            schema_ids[number] if schema_ids else 0,
            NOW_US - (age_s - number) * SECOND_US,
            NOW_US - (age_s - number) * SECOND_US,
        )
        for number, size in enumerate(sizes)
    ]


def test_the_dirty_ratio_decides_when_a_log_is_due() -> None:
    state = CleanerState(end=20)
    half = config(cleanup_policy="compact", min_cleanable_dirty_ratio="0.5")
    assert due(segments(100, 100, 199), state, now_us=NOW_US, config=half) is None
    assert due(segments(100, 100, 200), state, now_us=NOW_US, config=half) == CleaningCandidate(3, 0.5, 200, 0)
    assert due(segments(100, 100, 1), state, now_us=NOW_US, config=half, at_once=True) is not None
    assert due(segments(100, 100), state, now_us=NOW_US, config=half, at_once=True) is None
    assert due([], state, now_us=NOW_US, config=half, at_once=True) is None


def test_lags_are_measured_by_the_leaders_clock_at_append() -> None:
    found = segments(100, 100, 100, age_s=10)
    young = config(cleanup_policy="compact", min_cleanable_dirty_ratio="0.1", min_compaction_lag_ms=9_000)
    planned = due(found, CleanerState(), now_us=NOW_US, config=young)
    assert planned is not None and planned.segment_count == 2
    # a cleaned offset stays cleaned at any age
    planned = due(found, CleanerState(end=10), now_us=NOW_US, config=young)
    assert planned is not None and planned.segment_count == 2
    lazy = config(cleanup_policy="compact", min_cleanable_dirty_ratio="1", max_compaction_lag_ms=9_500)
    assert due(found, CleanerState(end=10), now_us=NOW_US, config=lazy) is None
    assert due(found, CleanerState(end=10), now_us=NOW_US + SECOND_US, config=lazy) is not None


def test_tombstones_wait_until_a_pass_is_old_enough() -> None:
    state = CleanerState().cleaned(20, 1_000, horizon=0, deletes=4).cleaned(30, 5_000, horizon=0, deletes=6)
    assert (state.end, state.passes) == (30, ((20, 1_000), (30, 5_000)))
    assert [state.horizon(now_ms, 1_000) for now_ms in (1_999, 2_000, 5_999, 6_000)] == [0, 20, 20, 30]
    keep = config(cleanup_policy="compact", delete_retention_ms=1_000)
    planned = due(segments(1, 1, 1, 1), state, now_us=2_000_000, config=keep)
    assert planned is not None and planned.horizon == 20
    after = state.cleaned(30, 2_000, horizon=20, deletes=0)
    assert (after.deletes_end, after.passes) == (20, ((20, 1_000), (30, 5_000)))
    assert due(segments(1, 1, 1), after, now_us=9_000_000, config=keep) is None  # no tombstones are left


def test_a_truncation_shortens_the_cleaner_state() -> None:
    state = CleanerState(30, ((20, 1_000), (30, 5_000)), 25, 3)
    assert state.truncated(30) == state
    assert state.truncated(22) == CleanerState(22, ((20, 1_000),), 22, 3)


def test_neighbors_with_one_schema_merge_into_one_segment() -> None:
    def bases(found: list[list[SegmentFacts]]) -> list[list[int]]:
        return [[segment.base_offset for segment in group] for group in found]

    assert bases(groups(segments(40, 40, 40, 100, 1, 1), segment_bytes=100)) == [[0, 10], [20], [30], [40, 50]]
    mixed = segments(1, 1, 1, 1, schema_ids=(0, 0, 1, 1))
    assert bases(groups(mixed, segment_bytes=100)) == [[0, 10], [20, 30]]


def test_the_next_cleaning_is_due_at_its_earliest_reason() -> None:
    found, log_ms = segments(100, 100, 100, age_s=10), NOW_US // 1000

    def again_s(state: CleanerState, **settings: int) -> float | None:
        lazy = config(cleanup_policy="compact", min_cleanable_dirty_ratio="1", **settings)
        at_us = due_again_us(found, state, now_us=NOW_US, config=lazy)
        return None if at_us is None else (at_us - NOW_US) / SECOND_US

    assert again_s(CleanerState(end=30)) is None, "no record is dirty"
    assert again_s(CleanerState(end=10), min_compaction_lag_ms=10_000) == 1, "the second is old enough"
    assert again_s(CleanerState(end=10), max_compaction_lag_ms=12_000) == 3.000001, "the second is too old"
    cleaned = CleanerState(30, ((20, log_ms - 6_000), (30, log_ms - 5_000)), 0, 2)
    assert again_s(cleaned, delete_retention_ms=7_000) == 1, "tombstones below the first pass may be removed"
    assert again_s(cleaned, delete_retention_ms=5_500) == 0.5, "tombstones below the first pass may already be removed"
    assert again_s(CleanerState(30, cleaned.passes, 30, 0), delete_retention_ms=7_000) is None, "none are left"


_MS = st.integers(0, 40)


@given(
    found=st.lists(st.tuples(_MS, st.integers(1, 100)), max_size=5),
    cleaned=st.integers(0, 5),
    passes=st.lists(_MS, max_size=3),
    deletes=st.integers(0, 2),
    settings=st.tuples(_MS, _MS, _MS, st.sampled_from(["0", "0.5", "1"])),
    now_ms=_MS,
)
def test_between_two_due_times_no_cleaning_is_due(
    *,
    found: list[tuple[int, int]],
    cleaned: int,
    passes: list[int],
    deletes: int,
    settings: tuple[int, int, int, str],
    now_ms: int,
) -> None:
    times = sorted(at_ms for at_ms, _ in found)
    log = [
        SegmentFacts(10 * number, 10 * number + 10, size, 0, at_ms * 1000, at_ms * 1000 + 500)
        for number, (at_ms, (_, size)) in enumerate(zip(times, found, strict=True))
    ]
    state = CleanerState(
        10 * cleaned, tuple((10 * number, at_ms) for number, at_ms in enumerate(sorted(passes))), 0, deletes
    )
    lag, most, kept, ratio = settings
    topic = config(
        cleanup_policy="compact",
        min_compaction_lag_ms=lag,
        max_compaction_lag_ms=max(most, lag, 1),
        delete_retention_ms=kept,
        min_cleanable_dirty_ratio=ratio,
    )
    if due(log, state, now_us=now_ms * 1000, config=topic) is not None:
        return
    again_us = due_again_us(log, state, now_us=now_ms * 1000, config=topic)
    assert again_us is None or again_us > now_ms * 1000
    end_us = 200_000 if again_us is None else again_us
    for time_us in {*range(now_ms * 1000, end_us, 500), end_us - 1}:
        assert due(log, state, now_us=time_us, config=topic) is None
