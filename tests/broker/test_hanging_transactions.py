"""Tests of the transactions that a leader considers as hanging, without processes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from sparklog.errors import BrokerError, ErrorCode
from sparklog.protocol.messages import (
    AbortHanging,
    Ack,
    ErrorReply,
    FindHanging,
    FindHangingReply,
    ListParticipants,
    ListParticipantsReply,
    Reply,
    Request,
)
from sparklog.record.marker import decode_marker
from sparklog.storage.transactions import OpenTransaction
from tests.broker.staged import TP, Stage, until


class Coordinators:
    """Broker 1, which coordinates all keys."""

    def __init__(self, known: dict[int, str], *, epoch: int = 5) -> None:
        self.known = known
        self.epoch = epoch
        self.coordinates: tuple[int, ...] = (0,)
        self.meanwhile: Callable[[], object] = lambda: None

    async def __call__(self, broker_id: int, message: Request) -> Reply:
        assert isinstance(message, ListParticipants) and broker_id == 1
        await asyncio.sleep(0)
        self.meanwhile()
        found = tuple((one, self.known[one]) for one in message.producer_ids if one in self.known)
        return ListParticipantsReply(0, tuple((number, self.epoch) for number in self.coordinates), found)


def staged(coordinators: Coordinators, **settings: str) -> Stage:
    """Open transactions of producers 7 and 8 that began before the log start."""
    stage = Stage(coordinators, settings={key.replace("_", "."): value for key, value in settings.items()})
    stage.hosted.log.open = {7: OpenTransaction(0, 3), 8: OpenTransaction(0, 4)}
    return stage


def ended(stage: Stage) -> list[int]:
    """Return the producer ids with markers, all of them aborts."""
    found = []
    for pending in stage.hosted.appended:
        ((header, body),) = pending.batches
        marker = decode_marker(header, body)
        assert not marker.committed
        found += [producer_id for producer_id, _ in marker.aborted]
    return found


def ask(stage: Stage, request: Request) -> list[Any]:
    replies: list[Any] = []
    stage.handle(
        SimpleNamespace(
            reply=replies.append, peer="test", peer_host="test", principal="User:test", listener="PLAINTEXT"
        ),
        request,
    )
    return replies


def test_only_transactions_unknown_to_every_coordinator_are_ended() -> None:
    async def story() -> None:
        stage = staged(Coordinators({7: "id:live"}), transaction_hanging_after_ms="1000")
        stage.broker.hanging.start()
        await until(lambda: stage.context.counters["transactions.hanging.aborted"])
        assert ended(stage) == [8]
        assert stage.broker.fences.has(TP, 8) and not stage.broker.fences.has(TP, 7)
        await stage.context.end_tasks()

    asyncio.run(story())


@pytest.mark.parametrize("lack", ["an old epoch", "not all of them", "no answer"])
def test_nothing_ends_until_all_coordinators_respond_in_new_epochs(lack: str) -> None:
    async def story() -> None:
        coordinators = Coordinators({}, epoch=4 if lack == "an old epoch" else 5)
        stage = staged(coordinators)
        if lack == "not all of them":
            coordinators.coordinates = ()
        elif lack == "no answer":
            coordinators.meanwhile = _away
        with pytest.raises(BrokerError):
            await stage.broker.hanging.find(0)
        replies = ask(stage, AbortHanging(0, *TP, 8))
        await until(lambda: replies)
        assert isinstance(replies[0], ErrorReply) and not ended(stage)

    asyncio.run(story())


def _away() -> None:
    raise BrokerError(ErrorCode.NETWORK_EXCEPTION, "away")


def test_a_coordinator_elected_during_the_search_is_asked_as_well() -> None:
    async def story() -> None:
        coordinators = Coordinators({})
        stage = staged(coordinators)
        coordinators.meanwhile = lambda: stage.broker.coordinator_epochs.record(0, 6)
        with pytest.raises(BrokerError, match="leader epoch 6"):
            await stage.broker.hanging.find(0)

    asyncio.run(story())


def test_a_transaction_that_ends_during_the_search_is_not_hanging() -> None:
    async def story() -> None:
        coordinators = Coordinators({})
        stage = staged(coordinators)
        coordinators.meanwhile = lambda: stage.hosted.log.open.pop(7, None)
        replies = ask(stage, FindHanging(0, 0))
        await until(lambda: replies)
        assert isinstance(replies[0], FindHangingReply)
        assert [(one.producer_id, one.first_offset) for one in replies[0].transactions] == [(8, 4)]

    asyncio.run(story())


def test_an_operator_cannot_abort_a_transaction_known_to_a_coordinator() -> None:
    async def story() -> None:
        stage = staged(Coordinators({7: "id:live"}))
        for producer_id, told in ((7, "id:live"), (9, "no open transaction")):
            replies = ask(stage, AbortHanging(0, *TP, producer_id))
            await until(lambda: replies)  # noqa: B023
            assert replies[0].code == ErrorCode.INVALID_TXN_STATE and told in replies[0].detail
        replies = ask(stage, AbortHanging(5, *TP, 8))
        await until(lambda: replies)
        assert (replies, ended(stage)) == ([Ack(5)], [8])

    asyncio.run(story())
