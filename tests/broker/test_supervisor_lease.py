"""Tests of the supervisor that a broker obeys, and of a broker without one."""

from __future__ import annotations

from sparklog.broker.lifecycle.supervisor_lease import LeaseName, OrphanStep, SupervisorLease, relief


def lease(*, supervised: bool = True, orphan_max_ms: int = -1) -> SupervisorLease:
    return SupervisorLease(LeaseName(1, 1), supervised=supervised, orphan_timeout_ms=1000, orphan_max_ms=orphan_max_ms)


def test_only_a_newer_generation_supersedes_the_lease() -> None:
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


def test_the_orphan_clock_runs_only_without_a_lease() -> None:
    subject = lease()
    assert subject.check(0) is OrphanStep.NOTHING
    assert subject.check(999) is OrphanStep.NOTHING
    assert subject.check(1000) is OrphanStep.ASK_RELIEF
    subject.admit(LeaseName(1, 2))
    assert subject.check(5000) is OrphanStep.NOTHING
    subject.released(LeaseName(1, 2))
    assert subject.check(6000) is OrphanStep.NOTHING
    assert subject.check(7000) is OrphanStep.ASK_RELIEF


def test_the_orphan_clock_restarts_for_a_newer_generation() -> None:
    subject = lease()
    subject.check(0)
    assert subject.check(1000) is OrphanStep.ASK_RELIEF
    subject.expect_supervisor()
    assert subject.check(1500) is OrphanStep.NOTHING
    assert subject.check(2400) is OrphanStep.NOTHING
    assert subject.check(2500) is OrphanStep.ASK_RELIEF


def test_an_orphan_serves_without_limit_unless_one_is_set() -> None:
    forever, limited = lease(), lease(orphan_max_ms=3000)
    for subject in (forever, limited):
        subject.check(0)
    assert forever.check(10**9) is OrphanStep.ASK_RELIEF
    assert limited.check(2999) is OrphanStep.ASK_RELIEF
    assert limited.check(3000) is OrphanStep.STOP


def test_a_broker_that_never_had_a_supervisor_is_not_an_orphan() -> None:
    subject = lease(supervised=False)
    subject.check(0)
    assert subject.check(10**9) is OrphanStep.NOTHING
    subject.admit(LeaseName(1, 1))
    subject.released(LeaseName(1, 1))
    subject.check(10**9)
    assert subject.check(2 * 10**9) is OrphanStep.ASK_RELIEF


def test_an_orphan_is_left_out_only_by_a_settled_generation() -> None:
    subject, first, second = lease(), LeaseName(1, 2), LeaseName(2, 1)
    subject.check(0)
    assert subject.check(1000) is OrphanStep.ASK_RELIEF
    assert not subject.left_out(None), "no driver lives, so no orphan may exit"
    assert not subject.left_out(first), "its tasks may still be starting"
    assert subject.check(1001) is OrphanStep.NOTHING
    assert subject.check(2001) is OrphanStep.ASK_RELIEF
    assert subject.left_out(first)
    assert not subject.left_out(None), "the driver has exited again"
    assert not subject.left_out(second), "a new generation may still supervise the broker"


def test_a_broker_of_the_current_generation_is_omitted_at_once() -> None:
    subject, name = lease(), LeaseName(1, 2)
    subject.admit(name)
    subject.released(name)
    subject.check(0)
    assert subject.check(1000) is OrphanStep.ASK_RELIEF
    assert subject.left_out(name)


def next_step(
    *,
    left_out: bool = True,
    controller_lives: bool = True,
    announced: bool = True,
    counted_on: int = 0,
    held: bool = False,
) -> OrphanStep:
    return relief(
        left_out=left_out, controller_lives=controller_lives, announced=announced, counted_on=counted_on, held=held
    )


def test_an_orphan_stops_only_after_its_leaderships_have_moved() -> None:
    assert next_step(controller_lives=False) is OrphanStep.NOTHING
    assert next_step(announced=False) is OrphanStep.ASK_RELIEF
    assert next_step(counted_on=1) is OrphanStep.NOTHING, "no other broker may be able to lead its partitions"
    assert next_step(held=True) is OrphanStep.NOTHING
    assert next_step() is OrphanStep.STOP


def test_a_dead_driver_stops_no_broker() -> None:
    """All brokers are orphans then: each one that exits removes its replicas, and the last one removes everything."""
    for counted_on in (0, 1):
        assert next_step(left_out=False, announced=False, counted_on=counted_on) is OrphanStep.NOTHING
        assert next_step(left_out=False, counted_on=counted_on) is OrphanStep.SERVE_ON
