"""Tests of a leader's verification of the first batch of a transaction, and of coordinators that do not respond."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from sparklog.broker.replication.partition import Answer
from sparklog.errors import BrokerError, ErrorCode
from sparklog.protocol.messages import ACKS_ALL, Reply, Request, TransactionMarker, VerifyTransaction
from sparklog.protocol.messages import VerifyTransactionReply as Vouched
from sparklog.record.codec import encode_batch
from sparklog.storage.transactions import OpenTransaction
from tests.broker.staged import TOPIC_ID, TP, Stage, until
from tests.broker.support import rows

PRODUCER = 77


class Asked:
    """One transactional batch at the leader, and its outcome."""

    def __init__(self, stage: Stage, *, timeout_ms: int = 20_000, epoch: int = 0, adds: bool = False) -> None:
        self.appended = 0
        self.answer: Answer | None = None
        header, body = encode_batch(
            rows(1), schema_id=0, compression=None, event_time=None, producer_id=PRODUCER, producer_epoch=epoch,
            first_sequence=0, transactional=True,
        )  # fmt: skip
        stage.broker.verifications.produce(
            stage.hosted,  # type: ignore[arg-type]
            [(header, memoryview(body))],
            key="id:k",
            acks=ACKS_ALL,
            deadline_ms=stage.context.now_ms() + timeout_ms,
            append=self._append,
            on_result=self._answered,
            adds=adds,
        )

    def _append(self) -> None:
        self.appended += 1

    def _answered(self, answer: Answer) -> None:
        self.answer = answer

    @property
    def over(self) -> bool:
        return bool(self.appended) or self.answer is not None


def play(story: Callable[[], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(story())


def coordinator(*said: Vouched | Exception, asked: list[Request] | None = None) -> Any:
    """Return a broker that gives one response after the other, and repeats the last one."""
    answers = list(said)

    async def ask(broker_id: int, message: Request) -> Reply:
        if asked is not None:
            asked.append(message)
        await asyncio.sleep(0)
        answer = answers.pop(0) if len(answers) > 1 else answers[0]
        if isinstance(answer, Exception):
            raise answer
        return answer

    return ask


def test_a_coordinator_of_the_known_or_a_later_epoch_is_trusted() -> None:
    async def story() -> None:
        for epoch in (5, 6):
            asked: list[Request] = []
            stage = Stage(coordinator(Vouched(0, epoch), asked=asked))
            batch = Asked(stage)
            await until(lambda: batch.over)  # noqa: B023
            assert (batch.appended, batch.answer) == (1, None)
            assert asked == [VerifyTransaction(0, "id:k", PRODUCER, 0, *TP, TOPIC_ID)]

    play(story)


@pytest.mark.parametrize("heard", ["from the controller", "from a marker", "from an answer"])
def test_a_deposed_coordinator_is_not_trusted(heard: str) -> None:
    """The coordinator does not know that it is deposed, and still confirms. The leader knows the next epoch, and
    asks again."""

    async def story() -> None:
        stage = Stage(coordinator(Vouched(0, 5), Vouched(0, 5), Vouched(0, 6)))
        if heard == "from the controller":
            stage.tell(coordinator=2, epoch=6)
        elif heard == "from a marker":
            marker = TransactionMarker("t", 0, (), ((1, 0),), TOPIC_ID, coordinator=0, coordinator_epoch=6)
            stage.broker.markers.write(marker, lambda _: None)
        else:
            stage.broker.coordinator_epochs.record(0, 6)
        batch = Asked(stage)
        await until(lambda: stage.context.counters["verifications.retried"])
        assert not batch.over, "a deposed coordinator was trusted"
        await until(lambda: batch.over)
        assert batch.appended == 1
        assert stage.context.counters["verifications.retried"] == 2

    play(story)


def test_the_wait_for_a_deposed_coordinator_is_bounded() -> None:
    async def story() -> None:
        stage = Stage(coordinator(Vouched(0, 4)))
        batch = Asked(stage, timeout_ms=50)
        await until(lambda: batch.over)
        assert batch.answer is not None and batch.answer.code is ErrorCode.REQUEST_TIMED_OUT
        assert "leader epoch 4, 5 is known" in batch.answer.detail

    play(story)


@pytest.mark.parametrize("change", ["next epoch", "follower", "gone"])
def test_a_verification_counts_only_in_its_own_epoch(change: str) -> None:
    """The marker may have gone to the leader in between, and this broker would append after it."""

    async def story() -> None:
        answered = asyncio.Event()

        async def ask(broker_id: int, message: Request) -> Reply:
            await answered.wait()
            return Vouched(0, 5)

        stage = Stage(ask)
        batch = Asked(stage)
        await asyncio.sleep(0)
        match change:
            case "next epoch":
                stage.hosted.replica.leader_epoch = 2
            case "follower":
                stage.hosted.replica.is_leader = False
            case _:
                del stage.partitions[TP]
        answered.set()
        await until(lambda: batch.over)
        assert batch.answer is not None and batch.answer.code is ErrorCode.NOT_LEADER_OR_FOLLOWER
        assert not batch.appended

    play(story)


def test_an_unexpected_error_is_reported_and_the_next_batch_verified() -> None:
    async def story() -> None:
        stage = Stage(coordinator(RuntimeError("a bug"), Vouched(0, 5)))
        first, behind = Asked(stage), Asked(stage)
        await until(lambda: first.over and behind.over)
        for batch in (first, behind):
            assert batch.answer is not None and batch.answer.code is ErrorCode.UNKNOWN_SERVER_ERROR
            assert "a bug" in batch.answer.detail
        again = Asked(stage)
        await until(lambda: again.over)
        assert again.appended == 1

    play(story)


def test_a_refusal_is_final_and_a_missing_broker_is_retried() -> None:
    async def story() -> None:
        refused = Asked(Stage(coordinator(BrokerError(ErrorCode.INVALID_TXN_STATE, "never heard of it"))))
        away = BrokerError(ErrorCode.NETWORK_EXCEPTION, "away")
        healed = Asked(Stage(coordinator(away, away, Vouched(0, 5))))
        await until(lambda: refused.over and healed.over)
        assert refused.answer is not None and refused.answer.code is ErrorCode.INVALID_TXN_STATE
        assert healed.appended == 1

    play(story)


def test_each_transaction_of_a_kafka_producer_is_verified() -> None:
    async def story() -> None:
        asked: list[Request] = []
        stage = Stage(ask=coordinator(Vouched(0, 5, 3), asked=asked))
        first = Asked(stage, epoch=1, adds=True)
        await until(lambda: first.over)
        assert first.appended and asked == [VerifyTransaction(0, "id:k", PRODUCER, 1, "t", 0, TOPIC_ID, True)]
        stage.hosted.log.open[PRODUCER] = OpenTransaction(1, 10)
        assert Asked(stage, epoch=1).appended == 1, "the open transaction is verified"
        stage.broker.markers.write(TransactionMarker("t", 0, ((PRODUCER, 1),), (), decision=4), lambda result: None)
        late = Asked(stage, epoch=1)
        assert not late.appended, "the transaction is being ended"
        await until(lambda: late.over)
        assert late.appended and len(asked) == 2, "the coordinator has confirmed the next one"
        stage.hosted.log.in_log.add(0)
        assert Asked(stage, epoch=2).appended == 1 and len(asked) == 2, "a batch that is in the log needs no question"

    play(story)
