"""The coordinator of the fake cluster: the production core, with its log in a list and markers that are written
immediately."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from sparklog.broker.transactions.transaction_requests import reply_about
from sparklog.coordinator import events
from sparklog.coordinator.effects import (
    Append,
    Outcome,
    Refused,
    Respond,
    SendMarkers,
    SendOffsets,
)
from sparklog.coordinator.log_records import Record
from sparklog.coordinator.records import PartitionPlace
from sparklog.coordinator.transactions import Transactions
from sparklog.errors import BrokerError, ErrorCode
from sparklog.model import TopicPartition
from sparklog.protocol.messages import (
    AbortHanging,
    AbortTransaction,
    Ack,
    AddToTransaction,
    BeginTransaction,
    DescribedTransaction,
    EndTransaction,
    ErrorReply,
    FindHanging,
    FindHangingReply,
    FoundHangingTransaction,
    ListTransactions,
    ListTransactionsReply,
    Reply,
    SettleVersion,
    TouchTransaction,
)
from sparklog.record.header import BatchHeader
from sparklog.record.marker import Marker, encode_marker
from sparklog.record.schema import parse_schema

if TYPE_CHECKING:
    from tests.client.fake_cluster import FakeCluster

TransactionRequest = (
    BeginTransaction
    | SettleVersion
    | AddToTransaction
    | TouchTransaction
    | EndTransaction
    | AbortTransaction
    | ListTransactions
)


class FakeCoordinator:
    """The coordinator for all keys, on broker ``broker_id`` and the brokers' thread."""

    def __init__(self, cluster: FakeCluster) -> None:
        self.cluster = cluster
        self.broker_id = 0
        self.records: list[Record] = []
        #: Open transactions that leaders have and no coordinator knows.
        self.hanging: list[FoundHangingTransaction] = []
        self._tickets = 0
        self._waiting: dict[int, Callable[[Outcome], None]] = {}
        self._load()

    def move(self, broker_id: int) -> None:
        """Move to another coordinator, which loads the log."""
        self.broker_id = broker_id
        waiting, self._waiting = self._waiting, {}
        for answered in waiting.values():
            answered(Refused(ErrorCode.NOT_COORDINATOR, "moved"))
        self._load()

    def handle(
        self, broker_id: int, request: TransactionRequest | FindHanging | AbortHanging, reply: Callable[[Reply], None]
    ) -> None:
        if isinstance(request, FindHanging | AbortHanging):
            reply(self._hanging(broker_id, request))
            return
        if isinstance(request, ListTransactions):
            found = tuple(self._descriptions()) if broker_id == self.broker_id else ()
            reply(ListTransactionsReply(request.cid, found))
            return
        if broker_id != self.broker_id:
            reply(ErrorReply(request.cid, ErrorCode.NOT_COORDINATOR, f"broker {self.broker_id} coordinates"))
            return
        self._step(events.CoordinatorTicked())
        self._ask(lambda ticket: self._event(request, ticket), lambda outcome: reply(reply_about(request.cid, outcome)))

    def _hanging(self, broker_id: int, request: FindHanging | AbortHanging) -> Reply:
        led = [one for one in self.hanging if self.cluster.topics[one.topic].logs[one.partition].leader == broker_id]
        if isinstance(request, FindHanging):
            old = _now_ms() - request.open_ms
            return FindHangingReply(request.cid, tuple(one for one in led if one.began_ms <= old))
        for one in led:
            if (one.topic, one.partition, one.producer_id) == (request.topic, request.partition, request.producer_id):
                self.hanging.remove(one)
                return Ack(request.cid)
        return ErrorReply(request.cid, ErrorCode.INVALID_TXN_STATE, f"producer {request.producer_id} has nothing open")

    def verify(self, key: str, header: BatchHeader, tp: TopicPartition) -> None:
        """Check that this producer may append there. Raises BrokerError if not."""
        found: list[Outcome] = []
        self._ask(
            lambda ticket: events.VerifyRequested(
                ticket, key, header.producer_id, header.producer_epoch, PartitionPlace(tp.topic, tp.partition)
            ),
            found.append,
        )
        if isinstance(found[0], Refused):
            raise BrokerError(found[0].code, found[0].detail)

    def _load(self) -> None:
        self._core = Transactions()
        self._core.load(self.records)
        self._perform(self._core.start(_now_ms()))

    def _descriptions(self) -> Iterable[DescribedTransaction]:
        for key, now, participants, due_ms in self._core.entries():
            parts = tuple(
                (i, p.epoch, tuple(sorted((place.topic, place.partition) for place in p.places())))
                for i, p in participants.items()
            )
            yield DescribedTransaction(
                key, now.state, now.run_id, now.run, now.version, now.last_version, now.began_ms, due_ms, parts
            )

    def _event(self, request: TransactionRequest, ticket: int) -> events.TransactionRequest:
        match request:
            case BeginTransaction():
                self.cluster.next_producer_id += 1
                return events.BeginRequested(
                    ticket,
                    request.key,
                    request.run_id,
                    request.version,
                    request.timeout_ms,
                    self.cluster.next_producer_id,
                    request.turn,
                    request.by_topic,
                )
            case SettleVersion():
                return events.SettleRequested(ticket, request.key, request.run_id, request.topic_id)
            case AddToTransaction():
                return events.AddRequested(
                    ticket,
                    request.key,
                    request.run_id,
                    request.producer_id,
                    request.producer_epoch,
                    tuple(PartitionPlace(*named) for named in request.partitions),
                    request.group,
                    request.offsets,
                    request.version,
                    request.turn,
                )
            case TouchTransaction():
                return events.TouchRequested(ticket, request.key, request.run_id, request.version, request.turn)
            case EndTransaction():
                until_ms = _now_ms() + request.timeout_ms
                return events.EndRequested(
                    ticket,
                    request.key,
                    request.run_id,
                    request.version,
                    request.commit,
                    request.winners,
                    until_ms,
                    request.turn,
                )
            case AbortTransaction():
                return events.AbortRequested(ticket, request.key)
        raise AssertionError(request)

    def _ask(self, event_of: Callable[[int], events.TransactionRequest], answered: Callable[[Outcome], None]) -> None:
        self._tickets += 1
        self._waiting[self._tickets] = answered
        self._step(event_of(self._tickets))

    def _step(self, event: events.Event) -> None:
        self._perform(self._core.step(event, _now_ms()))

    def _perform(self, effects: Iterable[object]) -> None:
        todo = deque(effects)
        while todo:
            match todo.popleft():
                case Respond(ticket, outcome):
                    answered = self._waiting.pop(ticket, None)
                    if answered is not None:
                        answered(outcome)
                case Append(append, records):
                    self.records += records
                    todo += self._core.step(events.Appended(append), _now_ms())
                case SendMarkers(key, decision, markers, part):
                    for marker in markers:
                        self._mark(marker.topic, marker.partition, Marker(marker.committed, marker.aborted))
                    there = tuple(PartitionPlace(marker.topic, marker.partition) for marker in markers)
                    todo += self._core.step(events.MarkersWritten(key, decision, there, part), _now_ms())
                case SendOffsets(key, decision, group, offsets):
                    for found in offsets:
                        self.cluster.groups.offsets[group, found.topic, found.partition] = found.offset
                    todo += self._core.step(events.OffsetsWritten(key, decision, group), _now_ms())

    def _mark(self, name: str, partition: int, marker: Marker) -> None:
        topic = self.cluster.topics[name]
        schema = topic.schemas[-1]
        header, body = encode_marker(marker, parse_schema(schema.message), schema_id=schema.schema_id)
        topic.logs[partition].mark(header, bytes(body), marker)


def _now_ms() -> int:
    return time.time_ns() // 1_000_000
