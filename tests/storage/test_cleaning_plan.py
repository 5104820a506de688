"""When a compacted log is due, how far, and what becomes one segment."""

from __future__ import annotations

from sparklog.storage.cleaning_plan import CleanerState, Due, SegmentFacts, due, groups
from tests.storage.batches import config

SECOND_US = 1_000_000
NOW_US = 1_000 * SECOND_US


def segments(*sizes: int, schema_ids: tuple[int, ...] = (), age_s: int = 100) -> list[SegmentFacts]:
    """Of ten offsets each; each a second younger than the one before."""
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


def test_the_dirty_ratio_decides() -> None:
    state = CleanerState(end=20)
    half = config(cleanup_policy="compact", min_cleanable_dirty_ratio="0.5")
    assert due(segments(100, 100, 199), state, now_us=NOW_US, config=half) is None
    assert due(segments(100, 100, 200), state, now_us=NOW_US, config=half) == Due(3, 0.5, 200, 0)
    assert due(segments(100, 100, 1), state, now_us=NOW_US, config=half, at_once=True) is not None
    assert due(segments(100, 100), state, now_us=NOW_US, config=half, at_once=True) is None
    assert due([], state, now_us=NOW_US, config=half, at_once=True) is None


def test_lags_are_the_leaders_clock_at_append() -> None:
    found = segments(100, 100, 100, age_s=10)
    young = config(cleanup_policy="compact", min_cleanable_dirty_ratio="0.1", min_compaction_lag_ms=9_000)
    planned = due(found, CleanerState(), now_us=NOW_US, config=young)
    assert planned is not None and planned.segment_count == 2
    # what was cleaned before stays cleaned, whatever its age
    planned = due(found, CleanerState(end=10), now_us=NOW_US, config=young)
    assert planned is not None and planned.segment_count == 2
    lazy = config(cleanup_policy="compact", min_cleanable_dirty_ratio="1", max_compaction_lag_ms=9_500)
    assert due(found, CleanerState(end=10), now_us=NOW_US, config=lazy) is None
    assert due(found, CleanerState(end=10), now_us=NOW_US + SECOND_US, config=lazy) is not None


def test_tombstones_wait_for_a_pass_to_be_old_enough() -> None:
    state = CleanerState().cleaned(20, 1_000, horizon=0, deletes=4).cleaned(30, 5_000, horizon=0, deletes=6)
    assert (state.end, state.passes) == (30, ((20, 1_000), (30, 5_000)))
    assert [state.horizon(now_ms, 1_000) for now_ms in (1_999, 2_000, 5_999, 6_000)] == [0, 20, 20, 30]
    keep = config(cleanup_policy="compact", delete_retention_ms=1_000)
    planned = due(segments(1, 1, 1, 1), state, now_us=2_000_000, config=keep)
    assert planned is not None and planned.horizon == 20
    after = state.cleaned(30, 2_000, horizon=20, deletes=0)
    assert (after.deletes_end, after.passes) == (20, ((20, 1_000), (30, 5_000)))
    assert due(segments(1, 1, 1), after, now_us=9_000_000, config=keep) is None  # there are none left


def test_a_cut_takes_back_what_is_above_it() -> None:
    state = CleanerState(30, ((20, 1_000), (30, 5_000)), 25, 3)
    assert state.cut(30) == state
    assert state.cut(22) == CleanerState(22, ((20, 1_000),), 22, 3)


def test_neighbours_of_one_schema_become_one_segment() -> None:
    def bases(found: list[list[SegmentFacts]]) -> list[list[int]]:
        return [[segment.base_offset for segment in group] for group in found]

    assert bases(groups(segments(40, 40, 40, 100, 1, 1), segment_bytes=100)) == [[0, 10], [20], [30], [40, 50]]
    mixed = segments(1, 1, 1, 1, schema_ids=(0, 0, 1, 1))
    assert bases(groups(mixed, segment_bytes=100)) == [[0, 10], [20, 30]]
