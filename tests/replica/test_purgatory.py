"""Tests of waiting produces: their order, deadlines, and the number of examined entries."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from sparklog.replica.purgatory import NEVER, Purgatory, Waiting


def waiting(end: int, deadline_ms: int = 1000) -> Waiting:
    return Waiting(end, ticket=end, base_offset=end - 1, deadline_ms=deadline_ms)


def test_committed_entries_leave_in_offset_order() -> None:
    purgatory = Purgatory()
    for end in (3, 5, 9, 4):
        purgatory.wait(waiting(end))
    assert purgatory.first_end == 3
    assert [entry.end_offset for entry in purgatory.complete(5)] == [3, 4, 5]
    assert (len(purgatory), purgatory.first_end) == (1, 9)


def test_expired_entries_leave_and_the_next_deadline_is_known() -> None:
    purgatory = Purgatory()
    for end, deadline_ms in ((1, 500), (2, 200), (3, 900)):
        purgatory.wait(waiting(end, deadline_ms))
    assert purgatory.earliest_ms == 200
    assert purgatory.expire(199) == []
    assert [entry.end_offset for entry in purgatory.expire(500)] == [1, 2]
    assert purgatory.earliest_ms == 900


def test_a_drained_purgatory_has_no_deadline() -> None:
    purgatory = Purgatory()
    purgatory.ordered[7] = (-1, 300)
    purgatory.wait(waiting(4))
    assert purgatory.drain() == [7, 4]
    assert (len(purgatory), purgatory.ordered, purgatory.earliest_ms, purgatory.first_end) == (0, {}, NEVER, NEVER)


@given(st.lists(st.tuples(st.integers(1, 50), st.integers(1, 1000))), st.lists(st.integers(0, 60)))
def test_no_entry_is_lost_or_released_early(entries: list[tuple[int, int]], marks: list[int]) -> None:
    purgatory = Purgatory()
    for end, deadline_ms in entries:
        purgatory.wait(waiting(end, deadline_ms))
    assert purgatory.earliest_ms == min((deadline for _, deadline in entries), default=NEVER)
    left = sorted(end for end, _ in entries)
    for mark in marks:
        assert [entry.end_offset for entry in purgatory.complete(mark)] == [end for end in left if end <= mark]
        left = [end for end in left if end > mark]
        assert len(purgatory) == len(left)
