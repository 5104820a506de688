"""Tests of the controller core: registrations that prove that ZooKeeper was restored from an older copy."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from sparklog.controller.controller import Controller, ControllerSettings
from sparklog.controller.effects import ControllerReport, Effect, RaiseCounters, SendUpdate, WriteStates
from sparklog.controller.election import EPOCH_STRIDE
from sparklog.controller.events import BrokersRead, Loaded, StatesWritten, TopicSnapshot, UpdateReplied
from sparklog.controller.zookeeper_rollback import MOST_RAISED
from sparklog.errors import ErrorCode
from sparklog.model import BrokerRegistration, LeaderAndIsr, SeenNumbers, TopicPartition, VersionedState

from .support import topic

TP = TopicPartition("t", 0)
STORED = VersionedState(LeaderAndIsr(1, 4, (1, 2), 6), 9, 3)


def registration(broker_id: int, seen: SeenNumbers, *, incarnation: int = 4) -> BrokerRegistration:
    return BrokerRegistration(broker_id, "host", 9092, "boot", "cluster", incarnation=incarnation, seen=seen)


def started(*brokers: BrokerRegistration) -> tuple[Controller, list[Effect]]:
    core = Controller(controller_id="own", controller_epoch=7, settings=ControllerSettings())
    loaded = Loaded(brokers, {}, (TopicSnapshot(topic("t", (1, 2)), {0: STORED}),), {})
    return core, core.step(loaded, 0)


@pytest.mark.parametrize(
    "seen", [SeenNumbers(8, "own"), SeenNumbers(7, "another"), SeenNumbers(7 + MOST_RAISED, "another")]
)
def test_a_registration_that_saw_a_later_controller_raises_all_counters(seen: SeenNumbers) -> None:
    seen = replace(seen, producer_ids=5000)
    core, effects = started(registration(1, SeenNumbers(6, "x", producer_ids=9000)), registration(2, seen))
    [order] = [effect for effect in effects if isinstance(effect, RaiseCounters)]
    assert order.controller_epoch > seen.controller_epoch + 100
    assert order.producer_ids > 9000
    assert not any(isinstance(effect, (WriteStates, SendUpdate)) for effect in effects)
    assert core.resigned


def test_a_broker_that_registers_later_is_checked_as_well() -> None:
    core, _ = started(registration(1, SeenNumbers(7, "own")))
    assert not core.resigned
    brokers = (registration(1, SeenNumbers(7, "own")), registration(2, SeenNumbers(12, "x")))
    assert any(isinstance(effect, RaiseCounters) for effect in core.step(BrokersRead(brokers), 10))


@pytest.mark.parametrize("seen", [SeenNumbers(), SeenNumbers(6, "x"), SeenNumbers(7, "own")])
def test_a_registration_with_nothing_later_raises_nothing(seen: SeenNumbers) -> None:
    core, effects = started(registration(1, seen))
    assert not core.resigned
    assert not any(isinstance(effect, RaiseCounters) for effect in effects)


def test_an_unreasonably_large_number_is_refused_with_advice() -> None:
    absurd = registration(2, SeenNumbers(8 + MOST_RAISED, "x"))
    core, effects = started(registration(1, SeenNumbers()), absurd)
    assert not core.resigned
    assert set(core.brokers.registrations) == {1}
    [report] = [e for e in effects if isinstance(e, ControllerReport) and e.kind == "controller.brokers.refused"]
    assert "sparklog zookeeper rebuild" in report.detail
    again = core.step(BrokersRead((registration(1, SeenNumbers()), absurd)), 10)
    assert not any(isinstance(e, ControllerReport) and e.kind == "controller.brokers.refused" for e in again)


def refused(core: Controller, effects: list[Effect], broker_id: int) -> list[Effect]:
    """Let the broker refuse the leader epoch that it receives."""
    [sent] = [e for e in effects if isinstance(e, SendUpdate) and e.broker.broker_id == broker_id]
    failed = (("t", 0, int(ErrorCode.FENCED_LEADER_EPOCH), "given before"),)
    return core.step(UpdateReplied(broker_id, sent.update_id, 0, failed), 20)


def test_a_reused_leader_epoch_is_raised_above_all_known_ones() -> None:
    core, effects = started(
        registration(1, SeenNumbers(leader_epoch=30), incarnation=3), registration(2, SeenNumbers(leader_epoch=11))
    )
    [write] = [e for e in refused(core, effects, 1) if isinstance(e, WriteStates)]
    state = write.writes[0].state
    # The leader stays, and continues with an epoch that no log contains.
    assert (state.leader, state.isr, state.leader_epoch) == (1, (1, 2), 30 + EPOCH_STRIDE)
    # No record is lost: a follower with more records than the copy's leader refuses to truncate.
    assert state.lossy_epoch < state.leader_epoch
    effects = core.step(StatesWritten({TP: 10}), 30)
    told = [e.update for e in effects if isinstance(e, SendUpdate)]
    assert any(decision.state == state for update in told for decision in update.partitions)
    assert not any(isinstance(e, WriteStates) for e in effects)


def test_an_unreasonable_leader_epoch_is_ignored() -> None:
    core, effects = started(registration(1, SeenNumbers(leader_epoch=MOST_RAISED + 5), incarnation=3))
    effects = refused(core, effects, 1)
    assert not any(isinstance(e, WriteStates) for e in effects)
    assert any(isinstance(e, ControllerReport) and e.kind == "controller.partitions.refused" for e in effects)
