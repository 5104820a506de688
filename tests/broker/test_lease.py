"""Which supervisor a broker obeys, and what it does without one."""

from __future__ import annotations

from sparklog.broker.lease import Lease, LeaseName, OrphanStep, relief


def lease(*, supervised: bool = True, orphan_max_ms: int = -1) -> Lease:
    return Lease(LeaseName(1, 1), supervised=supervised, orphan_timeout_ms=1000, orphan_max_ms=orphan_max_ms)


def test_a_newer_generation_supersedes_an_older_one_and_not_the_reverse() -> None:
    subject = lease()
    assert subject.admit(LeaseName(1, 1))
    assert subject.admit(LeaseName(1, 2))
    assert not subject.admit(LeaseName(1, 1))
    assert subject.highest == LeaseName(1, 2)


def test_a_later_driver_outranks_any_generation_of_an_earlier_one() -> None:
    subject = lease()
    assert subject.admit(LeaseName(1, 99))
    assert subject.admit(LeaseName(2, 1))
    assert not subject.admit(LeaseName(1, 100))


def test_the_end_of_a_superseded_connection_does_not_end_the_lease() -> None:
    subject = lease()
    subject.admit(LeaseName(1, 1))
    subject.admit(LeaseName(1, 2))
    subject.released(LeaseName(1, 1))
    assert subject.held
    subject.released(LeaseName(1, 2))
    assert not subject.held


def test_the_orphan_clock_starts_when_nobody_holds_the_lease_and_stops_when_somebody_comes() -> None:
    subject = lease()
    assert subject.check(0) is OrphanStep.NOTHING
    assert subject.check(999) is OrphanStep.NOTHING
    assert subject.check(1000) is OrphanStep.ASK_RELIEF
    subject.admit(LeaseName(1, 2))
    assert subject.check(5000) is OrphanStep.NOTHING
    subject.released(LeaseName(1, 2))
    assert subject.check(6000) is OrphanStep.NOTHING
    assert subject.check(7000) is OrphanStep.ASK_RELIEF


def test_the_orphan_clock_starts_anew_while_a_newer_generation_is_being_submitted() -> None:
    subject = lease()
    subject.check(0)
    assert subject.check(1000) is OrphanStep.ASK_RELIEF
    subject.expect_supervisor()
    assert subject.check(1500) is OrphanStep.NOTHING
    assert subject.check(2400) is OrphanStep.NOTHING
    assert subject.check(2500) is OrphanStep.ASK_RELIEF


def test_an_orphan_serves_on_for_ever_unless_a_limit_is_set() -> None:
    forever, limited = lease(), lease(orphan_max_ms=3000)
    for subject in (forever, limited):
        subject.check(0)
    assert forever.check(10**9) is OrphanStep.ASK_RELIEF
    assert limited.check(2999) is OrphanStep.ASK_RELIEF
    assert limited.check(3000) is OrphanStep.STOP


def test_a_broker_that_never_had_a_supervisor_is_no_orphan() -> None:
    subject = lease(supervised=False)
    subject.check(0)
    assert subject.check(10**9) is OrphanStep.NOTHING
    subject.admit(LeaseName(1, 1))
    subject.released(LeaseName(1, 1))
    subject.check(10**9)
    assert subject.check(2 * 10**9) is OrphanStep.ASK_RELIEF


def test_an_orphan_stops_only_once_a_live_controller_has_moved_what_it_leads() -> None:
    assert relief(controller_lives=False, announced=True, movable=0, held=False) is OrphanStep.NOTHING
    assert relief(controller_lives=True, announced=False, movable=0, held=False) is OrphanStep.ASK_RELIEF
    assert relief(controller_lives=True, announced=True, movable=1, held=False) is OrphanStep.NOTHING
    assert relief(controller_lives=True, announced=True, movable=0, held=True) is OrphanStep.NOTHING
    assert relief(controller_lives=True, announced=True, movable=0, held=False) is OrphanStep.STOP
