"""The search for hanging transactions, which are open in a partition but unknown to every coordinator.

Normally there are none. A leader accepts a batch only after a coordinator has verified the transaction, and a
coordinator drops a transaction only after all its markers are written. But a bug, or a log restored from a backup, may
cause a hanging transaction, and it would block readers of committed records forever. So leaders search for transactions
that have been open for a long time, and ask every coordinator about them.

If no coordinator, each in its newest epoch, knows a transaction, then the transaction is over. A coordinator registers
it before its first batch and drops it after its last marker, and no producer id is used twice. The leader then ends the
transaction with an abort marker.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections.abc import Callable, Iterable, Iterator

from sparklog.broker.context import BrokerContext
from sparklog.broker.inter_broker_client import InterBrokerClient
from sparklog.broker.internal_topics import TRANSACTIONS, coordinator_of, partition_of
from sparklog.broker.replication.partition import Partition
from sparklog.broker.replication.partitions import Partitions
from sparklog.broker.requests.delayed_replies import reply_later
from sparklog.broker.transactions.coordinator_epochs import CoordinatorEpochs
from sparklog.broker.transactions.hosted_coordinators import HostedCoordinators
from sparklog.broker.transactions.marker_append import MarkerAppend
from sparklog.broker.transactions.transaction_host import TransactionHost
from sparklog.errors import BrokerError, ErrorCode, StorageError
from sparklog.model import NO_EPOCH, TopicPartition
from sparklog.net.server_connection import ServerConnection
from sparklog.protocol.messages import (
    MAX_ENTRIES,
    AbortHanging,
    Ack,
    FindHanging,
    FindHangingReply,
    FoundHangingTransaction,
    ListParticipants,
    ListParticipantsReply,
    PartitionResult,
    Reply,
    TransactionMarker,
)
from sparklog.record.header import unpack_headers

_log = logging.getLogger(__name__)

_ANSWER_TIMEOUT_S = 10.0
_LONGEST_INTERVAL_S = 60.0


class HangingTransactions:
    """The component that finds hanging transactions and aborts them.

    Not thread-safe: use it on the broker's event loop. ``start`` begins the search, and ``close`` closes the
    connections to other brokers.
    """

    def __init__(
        self,
        context: BrokerContext,
        partitions: Partitions,
        *,
        epochs: CoordinatorEpochs,
        markers: MarkerAppend,
        transactions: HostedCoordinators[TransactionHost],
    ) -> None:
        self._context = context
        self._partitions = partitions
        self._epochs = epochs
        self._markers = markers
        self._transactions = transactions
        self._peers = InterBrokerClient(context, "hanging transactions")

    def start(self) -> None:
        self._context.spawn(self._run(), "hanging transactions")

    def close(self) -> None:
        self._peers.close()

    async def _run(self) -> None:
        after_ms = self._context.config.transaction_hanging_after_ms
        while True:
            await asyncio.sleep(min(after_ms / 2000, _LONGEST_INTERVAL_S))
            if self._context.quiesced:
                continue
            try:
                for found in await self.find(after_ms):
                    await self._end(found)
            except BrokerError as error:
                self._context.counters["transactions.hanging.unclear"] += 1
                _log.warning(
                    "transactions have been open for longer than %d ms, but no coordinator responds: %s",
                    after_ms,
                    error,
                )
            except Exception:
                _log.exception("the search for hanging transactions failed")

    async def _end(self, found: FoundHangingTransaction) -> None:
        _log.error("%s-%d: producer %d has an open transaction since offset %d that no coordinator knows: aborting it",
                   found.topic, found.partition, found.producer_id, found.first_offset)  # fmt: skip
        try:
            await self.write_marker(found)
        except BrokerError as error:
            _log.warning("%s-%d: could not abort it yet: %s", found.topic, found.partition, error)
        else:
            self._context.counters["transactions.hanging.aborted"] += 1

    # --- open transactions of this broker ---

    async def find(self, open_ms: int) -> list[FoundHangingTransaction]:
        """Return the transactions that have been open for at least ``open_ms`` and that no coordinator knows.

        Only partitions that this broker leads are searched.

        Raises:
            BrokerError: a coordinator did not respond.
        """
        before_ms = time.time_ns() // 1_000_000 - open_ms
        old = (one for one in self._open() if one.began_ms <= before_ms)
        suspects = list(itertools.islice(old, MAX_ENTRIES))
        if not suspects:
            return []
        known = await self.participants({suspect.producer_id for suspect in suspects})
        return [one for one in suspects if one.producer_id not in known and self._still_open(one)]

    def _open(self) -> Iterator[FoundHangingTransaction]:
        for partition in self._partitions.maintenance_index.in_transaction():
            if not partition.replica.is_leader or partition.offline is not None:
                continue
            for producer_id, begun in partition.log.transactions.open().items():
                began_ms = _append_ms(partition, begun.first_offset)
                yield FoundHangingTransaction(*partition.tp, producer_id, begun.epoch, begun.first_offset, began_ms)

    def _still_open(self, found: FoundHangingTransaction) -> bool:
        partition = self._partitions.get(TopicPartition(found.topic, found.partition))
        if partition is None or not partition.replica.is_leader:
            return False
        begun = partition.log.transactions.open().get(found.producer_id)
        return begun is not None and begun.first_offset == found.first_offset

    def one(self, tp: TopicPartition, producer_id: int) -> FoundHangingTransaction:
        """Return the open transaction of ``producer_id`` in this partition.

        Raises:
            BrokerError: INVALID_TXN_STATE if there is none; NOT_LEADER_OR_FOLLOWER if this broker does not lead the
                partition.
        """
        partition = self._partitions.require(tp)
        partition.require_leader(-1)
        begun = partition.log.transactions.open().get(producer_id)
        if begun is None:
            raise BrokerError(ErrorCode.INVALID_TXN_STATE, f"{tp}: producer {producer_id} has no open transaction")
        return FoundHangingTransaction(*tp, producer_id, begun.epoch, begun.first_offset, 0)

    # --- the coordinators' knowledge ---

    async def participants(self, producer_ids: Iterable[int]) -> dict[int, str]:
        """Ask all coordinators which of the producers take part in a transaction.

        The result maps the id of each such producer to the key of its transaction: a transactional id or the name of a
        sink.

        Raises:
            BrokerError: a coordinator did not respond, or another broker has become coordinator since.
        """
        wanted = sorted(producer_ids)
        topic = self._context.cache.topic(TRANSACTIONS)
        if topic is None:
            raise BrokerError(ErrorCode.COORDINATOR_NOT_AVAILABLE, f"this broker does not know {TRANSACTIONS}")
        leaders = {decision.state.leader for decision in topic.partitions.values()}
        replies = await asyncio.gather(*(self._ask(leader, ListParticipants(0, tuple(wanted))) for leader in leaders))
        responded = {number: epoch for reply in replies for number, epoch in reply.coordinators}
        for number in topic.partitions:
            newest = self._epochs.newest(number)
            if responded.get(number, -1) < newest:
                detail = f"{TRANSACTIONS}-{number}: no broker responded for leader epoch {newest}"
                raise BrokerError(ErrorCode.COORDINATOR_NOT_AVAILABLE, detail)
        return {producer_id: key for reply in replies for producer_id, key in reply.participants}

    async def takes_part(self, key: str, producer_id: int) -> tuple[bool, int]:
        """Ask the coordinator of ``key`` whether ``producer_id`` takes part in a transaction of ``key``.

        Return the response, and the leader epoch of the coordinator that responded. The response is true until the
        transaction has ended completely. A key is a transactional id or the name of a sink.

        Raises:
            BrokerError: the coordinator did not respond, or another broker has become coordinator since.
        """
        cache = self._context.cache
        leader, tp = coordinator_of(cache, TRANSACTIONS, key), partition_of(cache, TRANSACTIONS, key)
        if leader is None or tp is None:
            raise BrokerError(ErrorCode.COORDINATOR_NOT_AVAILABLE, f"{key}: no coordinator is available")
        reply = await self._ask(leader, ListParticipants(0, (producer_id,)))
        epoch = dict(reply.coordinators).get(tp.partition, NO_EPOCH)
        self._epochs.accept(key, epoch)
        return (producer_id, key) in reply.participants, epoch

    async def _ask(self, leader: int, request: ListParticipants) -> ListParticipantsReply:
        if leader == self._context.broker_id:
            return list_participants(self._transactions, request)
        still: Callable[[], bool] = lambda: True  # noqa: E731
        reply = await self._peers.ask(leader, request, timeout_s=_ANSWER_TIMEOUT_S, still=still)
        assert isinstance(reply, ListParticipantsReply)
        return reply

    # --- the end ---

    async def write_marker(self, found: FoundHangingTransaction) -> None:
        """Write an abort marker for the transaction, and wait until the marker is committed. Raises BrokerError."""
        done: asyncio.Future[PartitionResult] = asyncio.get_running_loop().create_future()

        def on_result(result: PartitionResult) -> None:
            if not done.done():
                done.set_result(result)

        producer = (found.producer_id, found.producer_epoch)
        self._markers.write(TransactionMarker(found.topic, found.partition, (), (producer,)), on_result)
        result = await done
        if result.code != ErrorCode.NONE:
            raise BrokerError(result.code, result.detail)


def _append_ms(partition: Partition, offset: int) -> int:
    """Return the append time of the batch at ``offset``, in milliseconds since the Unix epoch; 0 if it was deleted.

    Raises:
        BrokerError: the log cannot be read.
    """
    log = partition.log
    if offset < log.log_start_offset:
        return 0
    try:
        found = log.read_headers(offset, max_batches=1, end_offset=log.log_end_offset)
    except StorageError as error:
        raise partition.storage_failed(error) from error
    return unpack_headers(found.headers)[0].append_time // 1000 if found.batch_count else 0


def list_participants(
    transactions: HostedCoordinators[TransactionHost], request: ListParticipants
) -> ListParticipantsReply:
    """Return the requested producer ids that take part in transactions of this broker's coordinators.

    Raises BrokerError while one of these coordinators is not ready.
    """
    hosts = transactions.all_ready()
    return ListParticipantsReply(
        request.cid,
        tuple((host.partition.tp.partition, host.epoch) for host in hosts),
        tuple(found for host in hosts for found in host.participants(request.producer_ids)),
    )


class HangingTransactionRequests:
    """The handlers of the requests that find and abort hanging transactions."""

    def __init__(
        self, context: BrokerContext, hanging: HangingTransactions, transactions: HostedCoordinators[TransactionHost]
    ) -> None:
        self._context = context
        self._hanging = hanging
        self._transactions = transactions

    def list_participants(self, connection: ServerConnection, request: ListParticipants, body: memoryview) -> None:
        connection.reply(list_participants(self._transactions, request))

    def find(self, connection: ServerConnection, request: FindHanging, body: memoryview) -> None:
        async def find() -> Reply:
            return FindHangingReply(request.cid, tuple(await self._hanging.find(max(request.open_ms, 0))))

        reply_later(self._context, connection, request, find())

    def abort(self, connection: ServerConnection, request: AbortHanging, body: memoryview) -> None:
        reply_later(self._context, connection, request, self._abort(request))

    async def _abort(self, request: AbortHanging) -> Reply:
        tp = TopicPartition(request.topic, request.partition)
        self._hanging.one(tp, request.producer_id)
        known = await self._hanging.participants({request.producer_id})
        if request.producer_id in known:
            holder = f"{tp}: producer {request.producer_id} takes part in {known[request.producer_id]!r}"
            detail = f"{holder}, which its coordinator will end: abort that"
            raise BrokerError(ErrorCode.INVALID_TXN_STATE, detail)
        await self._hanging.write_marker(self._hanging.one(tp, request.producer_id))
        return Ack(request.cid)
