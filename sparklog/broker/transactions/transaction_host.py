"""A transaction coordinator in a broker. The marker sender delivers its decisions."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator
from typing import Any, Protocol

from sparklog.broker.context import BrokerContext
from sparklog.broker.replication.partition import Partition
from sparklog.broker.transactions.coordinator_runtime import CoordinatorRuntime
from sparklog.config import BrokerConfig
from sparklog.coordinator.effects import Outcome, Refused, SendMarkers, SendOffsets
from sparklog.coordinator.log_records import Record
from sparklog.coordinator.records import NO_PRODUCER, Participant, participant_record
from sparklog.coordinator.transactions import Transactions, TransactionSettings
from sparklog.errors import ErrorCode
from sparklog.protocol.messages import DescribedTransaction

#: Errors after which a client does not retry.
_FINAL = frozenset({ErrorCode.INVALID_TXN_STATE, ErrorCode.INVALID_PRODUCER_EPOCH, ErrorCode.UNKNOWN_PRODUCER_ID})
_NO_CHANGE = participant_record("", NO_PRODUCER, None)


class DecisionSender(Protocol):
    """The part of ``marker_sender.MarkerSender`` that a transaction coordinator uses.

    It sends markers and offsets after a transaction was committed or aborted.
    """

    def send_markers(self, host: CoordinatorRuntime, effect: SendMarkers) -> None: ...

    def send_offsets(self, host: CoordinatorRuntime, effect: SendOffsets) -> None: ...


class TransactionHost(CoordinatorRuntime):
    """The coordinator of the transactions in one partition of ``__transaction_state`` that this broker leads."""

    def __init__(
        self,
        context: BrokerContext,
        partition: Partition,
        *,
        decisions: DecisionSender,
        log_start_moved: Callable[[Partition], None],
    ) -> None:
        self._transactions = Transactions(_settings(context.config))
        self._decisions = decisions
        super().__init__(context, partition, self._transactions, log_start_moved=log_start_moved)

    def perform(self, effect: Any) -> None:
        match effect:
            case SendMarkers():
                self._decisions.send_markers(self, effect)
            case SendOffsets():
                self._decisions.send_offsets(self, effect)
            case _:
                raise AssertionError(f"not an order of a transaction coordinator: {effect!r}")

    def confirmation(self, outcome: Outcome) -> Record | None:
        """Return a record to commit before a final refusal is sent; None for other outcomes.

        A final refusal says that the transaction is not open, or that it belongs to another start of the producer or
        query. This may be wrong if this broker is no longer the leader, so its leadership is confirmed first.
        """
        return _NO_CHANGE if isinstance(outcome, Refused) and outcome.code in _FINAL else None

    def participants(self, producer_ids: Iterable[int]) -> Iterator[tuple[int, str]]:
        """Return the given producer ids that take part in transactions of this coordinator.

        Each id comes with the key of its transaction: a transactional id or the name of a sink.
        """
        return self._transactions.participants(producer_ids)

    def names(self) -> list[str]:
        """Return the keys (transactional ids and names of sinks) that this coordinator knows, sorted."""
        return self._transactions.names()

    def describe(self, key: str) -> Generator[None, None, DescribedTransaction | None]:
        """Return a description of a key's transaction for operators, or None if the key no longer exists.

        A key is a transactional id or the name of a sink. The function is a generator that yields before each
        participant (producer id), so that its caller can pause: a transaction may have 100,000 participants.
        """
        entry = self._transactions.entry(key)
        if entry is None:
            return None
        now, participants, due_ms = entry
        described = []
        for producer_id, participant in sorted(participants.items(), key=lambda found: found[0]):
            yield
            described.append((producer_id, participant.epoch, _partitions(participant)))
        return DescribedTransaction(
            key,
            now.state,
            now.run_id,
            now.run,
            now.version,
            now.last_version,
            now.began_ms,
            due_ms,
            tuple(described),
            *((-1, -1) if now.kafka is None else (now.kafka.producer_id, now.kafka.epoch)),
        )


def _partitions(participant: Participant) -> tuple[tuple[str, int], ...]:
    return tuple(sorted({(found.topic, number) for found in participant.topics for number in found.numbers}))


def _settings(config: BrokerConfig) -> TransactionSettings:
    return TransactionSettings(
        max_timeout_ms=config.transaction_max_timeout_ms,
        producer_expiration_ms=config.transactional_id_expiration_ms,
        sink_expiration_ms=config.sink_id_expiration_ms,
        max_keys=max(1, config.transactional_ids_max // config.transaction_partitions),
    )
