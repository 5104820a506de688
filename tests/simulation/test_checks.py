"""Tests of the simulator's checks by hand: what counts as a commit, and what does not."""

from __future__ import annotations

import pytest

from sparklog.model import LeaderAndIsr, VersionedState
from sparklog.testing.sim_checks import PartitionChecker, SimViolation
from sparklog.testing.sim_log import SimLog


def log_of(*epochs: int) -> SimLog:
    """Return a log with one record of each given leader epoch."""
    log = SimLog()
    for epoch in epochs:
        log.append(f"e{epoch}", 1, leader_epoch=epoch, now_ms=0)
    return log


def elected_uncleanly() -> PartitionChecker:
    """Return the state in which broker 2 leads epoch 3 and is alone in sync.

    Broker 1, the leader of epoch 2, has shown all its records. Their logs diverge at 1: above it broker 2 continued in
    epoch 1 and broker 1 in epoch 0.
    """
    checker = PartitionChecker("u-0", (1, 2), min_isr=1)
    checker.unclean_allowed = True
    checker.logs = {1: log_of(0, 0, 2), 2: log_of(0, 1, 1)}
    before = VersionedState(LeaderAndIsr(1, 2, (1,), 1), 0, 1)
    checker.written(None, before, controller_epoch=1, incarnation=lambda _: 1)
    checker.became_leader(1, 1, 2)
    checker.high_watermark_moved(1, 3, before=0, epoch=2)
    after = VersionedState(LeaderAndIsr(2, 3, (2,), 1), 1, 1)
    checker.written(before, after, controller_epoch=1, incarnation=lambda _: 1)
    checker.became_leader(2, 1, 3)
    assert checker.committed_end == 1
    return checker


def test_lowering_a_high_watermark_commits_nothing() -> None:
    """A log whose epochs alternate with its leader's is truncated in two steps, the first above the divergence
    point."""
    checker = elected_uncleanly()
    checker.high_watermark_moved(1, 2, before=3, epoch=3)
    checker.high_watermark_moved(1, 1, before=2, epoch=3)
    assert checker.committed_end == 1
    checker.high_watermark_moved(2, 3, before=1, epoch=3)
    assert checker.committed_end == 3


def test_a_high_watermark_beyond_the_leaders_log_is_found() -> None:
    checker = elected_uncleanly()
    with pytest.raises(SimViolation, match="StrongIsr: broker 2, in the ISR"):
        checker.high_watermark_moved(1, 2, before=1, epoch=3)
