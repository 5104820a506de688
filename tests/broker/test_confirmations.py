"""Tests of a transaction coordinator's final refusals: it sends them only after a write of its epoch has been
committed."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, cast

import pytest

from sparklog.broker.replication.partition import Answer, PendingProduce
from sparklog.broker.transactions.transaction_host import TransactionHost
from sparklog.coordinator.effects import Outcome, Refused
from sparklog.coordinator.events import TouchRequested
from sparklog.errors import ErrorCode
from tests.broker.staged import Hosted, Stage

COMMITTED = Answer(ErrorCode.NONE, 0, 0, "")
UNAVAILABLE = [ErrorCode.COORDINATOR_NOT_AVAILABLE]


class Led(Hosted):
    """A log whose writes wait until the test gives their outcome."""

    def produce(self, pending: PendingProduce, *, acks: int, deadline_ms: int) -> None:
        self.appended.append(pending)

    def answer(self, answer: Answer) -> None:
        """Give the outcome of the last write."""
        self.appended[-1].on_result(answer)


class Coordinator:
    """A coordinator that serves and knows no transaction: it refuses every request about one permanently."""

    def __init__(self) -> None:
        self.led = Led()
        broker = Stage().broker
        self.context = broker.context
        self.host = TransactionHost(
            broker.context,
            cast(Any, self.led),
            decisions=broker.marker_sender,
            log_start_moved=broker.fetches.log_start_moved,
        )
        self.host.not_ready_reason = ""
        self.failed = 0
        self.host.on_failed = self._on_failed

    def _on_failed(self) -> None:
        self.failed += 1

    def ask(self) -> list[ErrorCode]:
        """Collect the refusals that are sent later."""
        told: list[ErrorCode] = []

        def answered(outcome: Outcome) -> None:
            assert isinstance(outcome, Refused)
            told.append(outcome.code)

        self.host.ask(lambda ticket: TouchRequested(ticket, "key", "run"), answered)
        return told


def play(story: Callable[[Coordinator], None]) -> None:
    async def staged() -> None:
        coordinator = Coordinator()
        story(coordinator)
        coordinator.host.end()

    asyncio.run(staged())


def test_requests_during_a_write_share_the_next_write() -> None:
    def story(it: Coordinator) -> None:
        first, second, third = it.ask(), it.ask(), it.ask()
        assert (first, len(it.led.appended)) == ([], 1)
        it.led.answer(COMMITTED)
        assert (first, second, third, len(it.led.appended)) == ([ErrorCode.INVALID_TXN_STATE], [], [], 2)
        it.led.answer(COMMITTED)
        assert (second, third) == (first, first)
        assert (len(it.led.appended), it.host.not_ready_reason, it.failed) == (2, "", 0), (
            "no request waits, so nothing is written"
        )

    play(story)


@pytest.mark.parametrize("code", [ErrorCode.NOT_ENOUGH_REPLICAS, ErrorCode.KAFKA_STORAGE_ERROR])
def test_a_request_is_accepted_again_if_its_write_failed(code: ErrorCode) -> None:
    def story(it: Coordinator) -> None:
        first, second = it.ask(), it.ask()
        it.led.answer(Answer(code, 0, 0, "why"))
        assert (first, second, it.host.not_ready_reason) == (UNAVAILABLE, [], "")
        it.led.answer(COMMITTED)
        assert (second, it.failed) == ([ErrorCode.INVALID_TXN_STATE], 0)

    play(story)


def test_a_write_with_an_unknown_outcome_ends_the_coordinator() -> None:
    def story(it: Coordinator) -> None:
        first, second = it.ask(), it.ask()
        it.led.answer(Answer(ErrorCode.REQUEST_TIMED_OUT, 0, 0, "why"))
        assert (first, second, it.host.not_ready_reason, it.failed) == (UNAVAILABLE, UNAVAILABLE, "failed", 1)

    play(story)


def test_a_deposed_coordinator_redirects_to_the_next_one() -> None:
    def story(it: Coordinator) -> None:
        first, second = it.ask(), it.ask()
        it.led.replica.is_leader = False
        it.led.answer(Answer(ErrorCode.NOT_LEADER_OR_FOLLOWER, 0, 0, "why"))
        assert first == second == [ErrorCode.NOT_COORDINATOR]
        assert (it.host.not_ready_reason, it.failed, len(it.led.appended)) == ("ended", 0, 1)

    play(story)


@pytest.mark.parametrize("how", ["end", "fail"])
def test_each_waiter_for_a_write_is_notified_once(how: str) -> None:
    def story(it: Coordinator) -> None:
        first, second = it.ask(), it.ask()
        if how == "end":
            it.host.end()
        else:
            it.host._fail()
        assert first == second and len(first) == 1 and first != [ErrorCode.INVALID_TXN_STATE]
        it.led.answer(COMMITTED)
        assert (len(first), len(second), len(it.led.appended)) == (1, 1, 1)

    play(story)


def test_a_response_callback_that_raises_leaves_no_waiters() -> None:
    def story(it: Coordinator) -> None:
        first = it.ask()

        def raises(outcome: Outcome) -> None:
            raise RuntimeError("no such connection")

        it.host.ask(lambda ticket: TouchRequested(ticket, "key", "run"), raises)
        third = it.ask()
        it.led.answer(COMMITTED)
        assert (first, third) == ([ErrorCode.INVALID_TXN_STATE], [])
        it.led.answer(COMMITTED)
        assert third == UNAVAILABLE, "by what is left of it"
        assert (it.host.not_ready_reason, it.failed) == ("failed", 1)

    play(story)
