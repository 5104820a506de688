"""Tests of topics that cannot be read when a term begins: brokers keep their logs of them."""

from __future__ import annotations

import pytest

from sparklog.controller.controller import Controller, ControllerSettings
from sparklog.controller.effects import SendUpdate
from sparklog.controller.events import BrokersRead, Event, Loaded, TopicRead, TopicSnapshot
from sparklog.model import LeaderAndIsr, VersionedState

from .support import registration, topic

T = TopicSnapshot(topic("t", (1,)), {0: VersionedState(LeaderAndIsr(1, 1, (1,), 1), 0, 1)})


@pytest.mark.parametrize("unreadable", [(), ("u",)])
def test_an_update_is_full_only_if_all_topics_are_readable(unreadable: tuple[str, ...]) -> None:
    core = Controller(controller_id="c", controller_epoch=2, settings=ControllerSettings())
    [first] = sent(core, Loaded((registration(1),), {}, (T,), {}, unreadable=frozenset(unreadable)))
    assert [change.name for change in first.update.topics] == ["t"]
    assert first.update.full == (not unreadable), "a broker deletes logs that a full update does not name"
    # The record is fixed, and the states are not known yet: another new broker receives the same update.
    sent(core, TopicRead(TopicSnapshot(topic("u", (1,)), {})))
    [second] = sent(core, BrokersRead((registration(1), registration(2))))
    assert second.update.full == (not unreadable)


def sent(core: Controller, event: Event) -> list[SendUpdate]:
    return [effect for effect in core.step(event, 0) if isinstance(effect, SendUpdate)]
