"""The simulator's checks by hand: what they take for a commit, and what not."""

from __future__ import annotations

import pytest

from sparklog.model import LeaderAndIsr, VersionedState
from sparklog.testing.sim_checks import PartitionChecker, Violation
from sparklog.testing.sim_log import SimLog


def log_of(*epochs: int) -> SimLog:
    """One record of each given leader epoch."""
    log = SimLog()
    for epoch in epochs:
        log.append(f"e{epoch}", 1, leader_epoch=epoch, now_ms=0)
    return log


def elected_uncleanly() -> PartitionChecker:
    """Broker 2 leads epoch 3, alone in sync, since broker 1, the leader of epoch 2, has shown all that it had. Their
    logs part at 1: there broker 2 went on in epoch 1 and broker 1 in epoch 0."""
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


def test_a_high_watermark_being_lowered_commits_nothing() -> None:
    """A log whose epochs interleave with its leader's is cut in two steps, the first above the parting."""
    checker = elected_uncleanly()
    checker.high_watermark_moved(1, 2, before=3, epoch=3)
    checker.high_watermark_moved(1, 1, before=2, epoch=3)
    assert checker.committed_end == 1
    checker.high_watermark_moved(2, 3, before=1, epoch=3)
    assert checker.committed_end == 3


def test_a_high_watermark_beyond_the_leaders_log_is_found() -> None:
    checker = elected_uncleanly()
    with pytest.raises(Violation, match="StrongIsr: broker 2, in the ISR"):
        checker.high_watermark_moved(1, 2, before=1, epoch=3)
