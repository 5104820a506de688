"""Tests that an immediate append of a produce ends in the same way as an ordered one."""

from __future__ import annotations

from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from sparklog.model import NO_EPOCH
from sparklog.replica import effects as fx
from sparklog.replica import events as ev
from sparklog.replica.leader import Leader
from tests.replica.support import Stage

led_steps = st.lists(
    st.one_of(
        st.tuples(st.just("produce"), st.sampled_from([-1, 0, 1, 2]), st.sampled_from([50, 30_000])),
        st.tuples(st.just("fetch"), st.sampled_from([2, 3]), st.integers(0, 2)),
        st.tuples(st.just("wait"), st.sampled_from([1, 60, 700, 1500]), st.just(0)),
        st.tuples(st.just("lead"), st.sampled_from([(1, 2, 3), (1, 2), (1,)]), st.sampled_from([1, 2, 3])),
        st.tuples(st.just("lose"), st.just(0), st.just(0)),
    ),
    min_size=3,
    max_size=30,
)


def _led(steps: list[tuple[str, Any, int]], *, at_once: bool) -> list[object]:
    """Return all effects except the order to append, and the final state."""
    stage = Stage()
    stage.lead()
    seen: list[object] = []
    epoch = version = 1
    for ticket, (kind, what, number) in enumerate(steps):
        if kind == "produce":
            deadline_ms = stage.now_ms + number
            leader_epoch = stage.replica.append_epoch(what)
            event: ev.Event = ev.ProduceArrived(ticket, what, deadline_ms)
            if at_once and leader_epoch != NO_EPOCH:
                batch = stage.log.append(f"e{leader_epoch}", 1, leader_epoch=leader_epoch, now_ms=stage.now_ms).header
                event = ev.AppendedAtOnce(ticket, what, deadline_ms, batch.base_offset, batch.next_offset)
            effects = stage.send(event)
            assert (leader_epoch != NO_EPOCH) == any(isinstance(one, fx.AppendAsLeader) for one in effects) or at_once
            seen.append([one for one in effects if not isinstance(one, fx.AppendAsLeader)])
        elif kind == "fetch" and stage.replica.is_leader:
            seen.append(stage.fetch(what, max(stage.log.log_end_offset - number, 0)))
        elif kind == "wait":
            seen.append(stage.wait(what))
        elif kind == "lead":
            epoch, version = epoch + 1, version + 1
            seen.append(stage.lead(epoch, version, what, min_isr=number))
        elif kind == "lose":
            seen.append(stage.send(ev.FollowerConnectionLost(2)))
    replica = stage.replica
    role = replica._role
    assert isinstance(role, Leader)
    seen.append((stage.log.log_end_offset, replica.high_watermark, replica.isr_state, replica.deadline_ms))
    seen.append((role.progress, role.purgatory))
    return seen


@settings(max_examples=200, deadline=None)
@given(steps=led_steps)
def test_an_immediate_append_equals_an_ordered_one(steps: list[tuple[str, Any, int]]) -> None:
    assert _led(steps, at_once=True) == _led(steps, at_once=False)
