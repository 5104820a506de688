"""What a broker answers to updates that it does not follow."""

from __future__ import annotations

from pathlib import Path

import pytest

from sparklog.broker.control import handle_control_update
from sparklog.broker.state import BrokerState
from sparklog.errors import ErrorCode
from sparklog.protocol.messages import ControlUpdate, ControlUpdateReply
from tests.broker.support import broker_state


class Answers:
    """A connection as far as an answer needs one."""

    def __init__(self) -> None:
        self.given: list[ControlUpdateReply] = []

    def reply(self, answer: ControlUpdateReply) -> None:
        self.given.append(answer)


@pytest.fixture
def broker(tmp_path: Path) -> BrokerState:
    broker = broker_state(1, tmp_path)
    broker.incarnation = 4
    return broker


def update(*, epoch: int, sequence: int, incarnation: int = 4) -> ControlUpdate:
    return ControlUpdate(0, "c", epoch, incarnation, False, None, (), (), sequence=sequence)


@pytest.mark.parametrize(
    ("late", "code"),
    [
        (update(epoch=6, sequence=9), ErrorCode.STALE_CONTROLLER_EPOCH),
        (update(epoch=7, sequence=2), ErrorCode.STALE_CONTROLLER_EPOCH),
        (update(epoch=7, sequence=4, incarnation=3), ErrorCode.STALE_BROKER_EPOCH),
    ],
    ids=["of an earlier controller", "overtaken within its epoch", "meant for an earlier incarnation"],
)
def test_what_is_not_followed_is_never_answered_as_if_it_were(
    broker: BrokerState, late: ControlUpdate, code: ErrorCode
) -> None:
    """A controller that begins to count anew under an epoch that had a term before would tell its brokers nothing,
    and believe that it did."""
    broker.cache.apply(update(epoch=7, sequence=3))
    answers = Answers()
    handle_control_update(broker, answers, late, memoryview(b""))  # type: ignore[arg-type]
    assert [answer.code for answer in answers.given] == [code]
    assert broker.counters["control.updates"] == 0
