"""Handlers of requests about transactions.

A handler passes the request to the coordinator of the transaction's key and responds with the coordinator's result. A
key is a transactional id or the name of a sink.
"""

from __future__ import annotations

import asyncio
import heapq
from collections.abc import Callable, Generator

from sparklog.broker.context import BrokerContext
from sparklog.broker.groups.group_requests import below_zero
from sparklog.broker.lifecycle.zk_registration import ZkRegistration
from sparklog.broker.requests.delayed_replies import limit_s
from sparklog.broker.requests.slices import Slices, answer_in_slices
from sparklog.broker.transactions.hosted_coordinators import HostedCoordinators
from sparklog.broker.transactions.transaction_host import TransactionHost
from sparklog.coordinator import events
from sparklog.coordinator.effects import Begun, Done, Ended, Outcome, Refused, Settled
from sparklog.coordinator.records import PartitionPlace
from sparklog.errors import BrokerError, ClusterError, ErrorCode
from sparklog.model import TopicPartition, is_internal
from sparklog.net.server_connection import ServerConnection
from sparklog.protocol.messages import (
    AbortTransaction,
    Ack,
    AddToTransaction,
    BeginTransaction,
    BeginTransactionReply,
    DescribedTransaction,
    EndTransaction,
    EndTransactionReply,
    ErrorReply,
    ListTransactions,
    ListTransactionsReply,
    Reply,
    SettleVersion,
    SettleVersionReply,
    TouchTransaction,
    VerifyTransaction,
    VerifyTransactionReply,
)

#: The maximum wait for the confirmation of a refusal. The leader that asks waits longer.
_CONFIRM_S = 2.0


class TransactionRequests:
    """The handlers of requests about transactions.

    Not thread-safe: use them only on the broker's event loop.
    """

    def __init__(
        self,
        context: BrokerContext,
        slices: Slices,
        *,
        transactions: HostedCoordinators[TransactionHost],
        registry: ZkRegistration,
    ) -> None:
        self._context = context
        self._slices = slices
        self._transactions = transactions
        self._registry = registry

    def begin(self, connection: ServerConnection, request: BeginTransaction, body: memoryview) -> None:
        if request.by_topic and request.version < 0:
            detail = f"version {request.version} by topic found, 0 or more expected"
            raise BrokerError(ErrorCode.INVALID_REQUEST, detail)
        if not request.run_id or request.version < -1 or request.timeout_ms <= 0 or request.turn < 0:
            detail = (
                f"run {request.run_id!r}, version {request.version}, timeout {request.timeout_ms} ms, "
                f"turn {request.turn} found; expected a name, -1 or more, more than 0, 0 or more"
            )
            raise BrokerError(ErrorCode.INVALID_REQUEST, detail)
        self._transactions.of(request.key)
        self._context.spawn(self._begin(connection, request), f"begin of {request.key}")

    async def _begin(self, connection: ServerConnection, request: BeginTransaction) -> None:
        """Begin a transaction. Each request uses a new producer id, even if no transaction begins."""
        try:
            producer_id = await self._registry.next_producer_id()
            host = self._transactions.of(request.key)
        except BrokerError as error:
            connection.reply(ErrorReply(request.cid, error.code, error.detail))
            return
        except ClusterError as error:
            connection.reply(ErrorReply(request.cid, ErrorCode.COORDINATOR_NOT_AVAILABLE, str(error)))
            return
        host.ask(
            lambda ticket: events.BeginRequested(
                ticket,
                request.key,
                request.run_id,
                request.version,
                request.timeout_ms,
                producer_id,
                request.turn,
                request.by_topic,
            ),
            _answering(connection, request.cid),
        )

    def settle_version(self, connection: ServerConnection, request: SettleVersion, body: memoryview) -> None:
        if not request.run_id:
            raise BrokerError(ErrorCode.INVALID_REQUEST, "the run is empty: expected a name")
        self._transactions.of(request.key).ask(
            lambda ticket: events.SettleRequested(ticket, request.key, request.run_id, request.topic_id),
            _answering(connection, request.cid),
        )

    def add(self, connection: ServerConnection, request: AddToTransaction, body: memoryview) -> None:
        places = tuple(self._place(TopicPartition(*named)) for named in request.partitions)
        if request.offsets and not request.group:
            raise BrokerError(ErrorCode.INVALID_REQUEST, f"{len(request.offsets)} offsets of no group found")
        for detail in filter(None, map(below_zero, request.offsets)):
            raise BrokerError(ErrorCode.INVALID_REQUEST, detail)
        self._transactions.of(request.key).ask(
            lambda ticket: events.AddRequested(
                ticket,
                request.key,
                request.run_id,
                request.producer_id,
                request.producer_epoch,
                places,
                request.group,
                request.offsets,
                request.version,
                request.turn,
            ),
            _answering(connection, request.cid),
        )

    def _place(self, tp: TopicPartition) -> PartitionPlace:
        """Return the partition with its topic id, which distinguishes the topic from a later one with the same name.

        Raises BrokerError if the topic is internal or unknown.
        """
        if is_internal(tp.topic):
            raise BrokerError(ErrorCode.INVALID_TOPIC_EXCEPTION, f"{tp}: clients cannot write to internal topics")
        known = self._context.cache.partition(tp)
        if known is None:
            raise BrokerError(ErrorCode.UNKNOWN_TOPIC_OR_PARTITION, f"this broker does not know partition {tp}")
        return PartitionPlace(tp.topic, tp.partition, known.topic_id)

    def touch(self, connection: ServerConnection, request: TouchTransaction, body: memoryview) -> None:
        self._transactions.of(request.key).ask(
            lambda ticket: events.TouchRequested(ticket, request.key, request.run_id, request.version, request.turn),
            _answering(connection, request.cid),
        )

    def end(self, connection: ServerConnection, request: EndTransaction, body: memoryview) -> None:
        if not request.run_id or request.version < -1:
            detail = f"run {request.run_id!r}, version {request.version} found; expected a name, -1 or more"
            raise BrokerError(ErrorCode.INVALID_REQUEST, detail)
        deadline_ms = self._context.wall_ms() + int(limit_s(request.timeout_ms) * 1000)
        self._transactions.of(request.key).ask(
            lambda ticket: events.EndRequested(
                ticket,
                request.key,
                request.run_id,
                request.version,
                request.commit,
                request.winners,
                deadline_ms,
                request.turn,
            ),
            _answering(connection, request.cid),
        )

    def verify(self, connection: ServerConnection, request: VerifyTransaction, body: memoryview) -> None:
        host = self._transactions.of(request.key)
        told = False

        def on_result(outcome: Outcome) -> None:
            nonlocal told
            if told:
                return
            told = True
            if isinstance(outcome, Refused):
                connection.reply(ErrorReply(request.cid, outcome.code, outcome.detail))
            else:
                connection.reply(confirmed(request.cid, host, outcome))

        ask_host(host, request, on_result)
        if not told:
            # This is earlier than the timeout of the leader that asks. After its timeout the leader would close the
            # connection, which other verifications use too.
            asyncio.get_running_loop().call_later(_CONFIRM_S, on_result, _unconfirmed(request, _CONFIRM_S))

    def abort(self, connection: ServerConnection, request: AbortTransaction, body: memoryview) -> None:
        def on_outcome(outcome: Outcome) -> None:
            reply = reply_about(request.cid, outcome)
            connection.reply(reply)
            self._context.audit.replied(connection, request, reply)

        self._transactions.of(request.key).ask(lambda ticket: events.AbortRequested(ticket, request.key), on_outcome)

    def list_transactions(self, connection: ServerConnection, request: ListTransactions, body: memoryview) -> None:
        answer_in_slices(self._slices, connection, request, self._list_transactions(request.cid))

    def _list_transactions(self, cid: int) -> Generator[None, None, Reply]:
        """Return a reply with all transactions, sorted by key.

        There may be hundreds of thousands of transactions, so the sorted lists of the coordinators are merged.
        """
        listings: list[list[DescribedTransaction]] = []
        for host in self._transactions.all_ready():
            found: list[DescribedTransaction] = []
            for key in host.names():
                described = yield from self._describe(host, key)
                if described is not None:
                    found.append(described)
            listings.append(found)
        together: list[DescribedTransaction] = []
        for described in heapq.merge(*listings, key=lambda one: one.key):
            if self._slices.over():
                yield
            together.append(described)
        return ListTransactionsReply(cid, tuple(together))

    def _describe(self, host: TransactionHost, key: str) -> Generator[None, None, DescribedTransaction | None]:
        if self._slices.over():
            yield
        parts = host.describe(key)
        try:
            while True:
                next(parts)
                if self._slices.over():
                    yield
        except StopIteration as described:
            found: DescribedTransaction | None = described.value
            return found


async def verify(
    transactions: HostedCoordinators[TransactionHost], request: VerifyTransaction, *, timeout_s: float
) -> VerifyTransactionReply:
    """Ask this broker's own coordinator whether a producer may append in its transaction.

    Raises:
        BrokerError: the producer may not append, this broker does not coordinate the key, or the coordinator could not
            confirm its refusal in time.
    """
    host = transactions.of(request.key)
    outcome: asyncio.Future[Outcome] = asyncio.get_running_loop().create_future()
    ask_host(host, request, lambda found: None if outcome.done() else outcome.set_result(found))
    if not outcome.done():
        await asyncio.wait({outcome}, timeout=timeout_s)
    if not outcome.done():
        outcome.set_result(_unconfirmed(request, timeout_s))
    found = outcome.result()
    if isinstance(found, Refused):
        raise BrokerError(found.code, found.detail)
    return confirmed(0, host, found)


def confirmed(cid: int, host: TransactionHost, outcome: Outcome) -> VerifyTransactionReply:
    return VerifyTransactionReply(cid, host.epoch, outcome.decision if isinstance(outcome, Done) else -1)


def _unconfirmed(request: VerifyTransaction, waited_s: float) -> Refused:
    detail = f"{request.key}: its coordinator could confirm nothing within {waited_s:.1f} s"
    return Refused(ErrorCode.COORDINATOR_NOT_AVAILABLE, detail)


def ask_host(host: TransactionHost, request: VerifyTransaction, on_result: Callable[[Outcome], None]) -> None:
    """Ask the coordinator whether the producer may append. If the producer may, ``on_result`` is called at once.

    If the request adds a partition or offsets to the transaction, ``on_result`` is called once they are durable.
    """
    place = PartitionPlace(request.topic, request.partition, request.topic_id)
    if request.adds or request.group:
        producer = (request.key, request.producer_id, request.producer_epoch)
        places = () if request.group else (place,)
        host.ask(
            lambda ticket: events.KafkaAddRequested(
                ticket, *producer, places, request.group, request.offsets, request.adds
            ),
            on_result,
        )
        return
    host.ask(
        lambda ticket: events.VerifyRequested(ticket, request.key, request.producer_id, request.producer_epoch, place),
        on_result,
    )


def _answering(connection: ServerConnection, cid: int) -> Callable[[Outcome], None]:
    return lambda outcome: connection.reply(reply_about(cid, outcome))


def reply_about(cid: int, outcome: Outcome) -> Reply:
    """Return the message that reports an outcome of the coordinator to its client."""
    match outcome:
        case Begun():
            return BeginTransactionReply(
                cid, outcome.committed, outcome.last_version, outcome.producer_id, outcome.producer_epoch, outcome.run
            )
        case Settled():
            return SettleVersionReply(cid, outcome.last_version)
        case Ended():
            return EndTransactionReply(cid, outcome.complete, outcome.replayed)
        case Done():
            return Ack(cid)
        case Refused():
            return ErrorReply(cid, outcome.code, outcome.detail)
        case _:
            raise AssertionError(f"not about a transaction: {outcome!r}")
