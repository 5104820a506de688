"""Produce requests: the batches of a request are appended to its partitions, and the response waits for ``acks``.

To split a request into batches, the broker reads only the 96-byte header of each batch. The Arrow bytes are checked
before the append. This module keeps a request with acks=all open until every partition has a result.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

from sparklog.broker.context import BrokerContext
from sparklog.broker.internal_topics import refuse_internal
from sparklog.broker.replication.partition import Answer, Batches, Partition, PendingProduce
from sparklog.broker.replication.partitions import Partitions
from sparklog.broker.requests.batch_checks import LOOP_BYTES, check_batches, check_count
from sparklog.broker.requests.fetch import Fetches
from sparklog.broker.requests.slices import Slices, Steps
from sparklog.broker.transactions.verification import TransactionVerification
from sparklog.errors import BrokerError, ErrorCode
from sparklog.model import INTERNAL_PREFIX, NO_EPOCH, NO_LEADER
from sparklog.net.server_connection import ServerConnection
from sparklog.protocol.messages import ACKS_ALL, ErrorReply, Produce, ProducePartition, ProduceReply, ProduceResult
from sparklog.record.header import HEADER_BYTES, Flag, unpack_header

_log = logging.getLogger(__name__)

_ACKS = frozenset({0, 1, ACKS_ALL})
_MAX_TIMEOUT_MS = 3_600_000
#: Flags that change the meaning of a batch: those that only the log sets, and the transaction flag.
_CHECKED_FLAGS = int(Flag.CONTROL | Flag.OFFSET_ARRAY | Flag.FIRST_OF_SEGMENT | Flag.TRANSACTIONAL | Flag.PROJECTED)
_TRANSACTIONAL = int(Flag.TRANSACTIONAL)


class Throttling(Protocol):
    """The part of the quota manager that produce requests use."""

    #: Whether any quota is set.
    active: bool

    def throttle_ms(self, connection: ServerConnection) -> int:
        """Return the time in milliseconds that the next request of this connection must wait."""


class _OpenProduce:
    """A produce request that waits for the results of some partitions.

    The callbacks that the partitions call with their results refer to it.
    """

    __slots__ = ("_connection", "_missing", "_request", "_requests", "_results")

    def __init__(self, requests: ProduceRequests, connection: ServerConnection, request: Produce) -> None:
        self._requests = requests
        self._connection = connection
        self._request = request
        self._missing = missing = len(request.partitions)
        #: The result of each partition, or None.
        self._results: list[Any] = [None] * missing

    def on_result(self, index: int, answer: Answer) -> None:
        requests, results = self._requests, self._results
        assert results[index] is None, "a partition has one result"
        results[index] = requests.result_of(self._request.partitions[index], answer)
        self._missing -= 1
        if not self._missing:  # all results are present
            requests.finish(self._connection, self._request, tuple(results))

    def fail(self, error: Exception) -> None:
        """Respond to the whole request with an error after an unexpected exception.

        Results that arrive later are ignored.
        """
        self._requests.counters["requests.failed"] += 1
        _log.error("produce from %s failed", self._connection.peer, exc_info=error)
        self._missing = 0
        if self._request.acks == 0:
            self._connection.done(self._request.cid)
        else:
            detail = f"{type(error).__name__}: {error}"
            self._connection.reply(ErrorReply(self._request.cid, ErrorCode.UNKNOWN_SERVER_ERROR, detail))


class ProduceRequests:
    """The handler of produce requests.

    Not thread-safe: use it only on the broker's event loop.
    """

    def __init__(
        self,
        context: BrokerContext,
        partitions: Partitions,
        *,
        slices: Slices,
        fetches: Fetches,
        verifications: TransactionVerification,
        quotas: Throttling,
    ) -> None:
        self._context = context
        self._quotas = quotas
        self.counters = context.counters
        self._partitions = partitions
        self._slices = slices
        self._fetches = fetches
        self._verifications = verifications

    def handle(self, connection: ServerConnection, request: Produce, body: memoryview) -> None:
        """Append the batches of each partition. If the request is inconsistent, refuse all of it."""
        body_bytes = len(body)
        refusal = self._refusal(request, body_bytes)
        if refusal is not None:
            self.counters["produce.requests.refused"] += 1
            if request.acks == 0:
                connection.done(request.cid)
            else:
                connection.reply(ErrorReply(request.cid, refusal.code, refusal.detail))
            return
        counters, partitions = self.counters, request.partitions
        counters["produce.requests"] += 1
        counters["produce.bytes"] += body_bytes
        timeout_ms = request.timeout_ms
        if not 0 <= timeout_ms <= _MAX_TIMEOUT_MS:
            timeout_ms = min(max(timeout_ms, 0), _MAX_TIMEOUT_MS)
        deadline_ms = self._context.now_ms() + timeout_ms
        if not partitions:
            self.finish(connection, request, ())
            return
        open_produce = _OpenProduce(self, connection, request)
        if len(partitions) == 1 and self._is_short(partitions[0]):  # a short request does not wait for large requests
            on_result = partial(open_produce.on_result, 0)
            self._produce(request, partitions[0], body, deadline_ms=deadline_ms, on_result=on_result)
            return
        steps = self._steps(request, body, deadline_ms=deadline_ms, open_produce=open_produce)
        self._slices.run(connection, steps, open_produce.fail)

    def _steps(self, request: Produce, body: memoryview, *, deadline_ms: int, open_produce: _OpenProduce) -> Steps:
        """Append the batches of each partition. Yield whenever the event loop may run other work.

        A request with a thousand new logs, or with a thousand batches of megabytes after decompression, takes longer
        than a broker may be unresponsive.
        """
        at = 0
        for index, wanted in enumerate(request.partitions):
            if self._slices.over():
                yield None
            size = wanted.batch_count * HEADER_BYTES + wanted.body_bytes
            part, on_result = body[at : at + size], partial(open_produce.on_result, index)
            at += size
            if self._is_short(wanted):
                self._produce(request, wanted, part, deadline_ms=deadline_ms, on_result=on_result)
            else:
                yield from self._produce_checked(request, wanted, part, deadline_ms=deadline_ms, on_result=on_result)

    def _is_short(self, wanted: ProducePartition) -> bool:
        hosted = self._partitions.get((wanted.topic, wanted.partition))
        # The check of one batch is short enough to run on the event loop, whatever it contains.
        return hosted is None or (wanted.batch_count == 1 and hosted.rules.max_message_bytes <= LOOP_BYTES)

    def _effective_acks(self, acks: int) -> int:
        """Return the acks that this produce must wait for: during a controlled shutdown, all instead of 1.

        A stopping broker learns only later that other brokers lead its partitions. Meanwhile the broker may append
        records that no new leader has, and that would be truncated later. So requests with acks=1 wait for the
        followers too, and a planned stop loses no acknowledged record.
        """
        return ACKS_ALL if acks == 1 and self._context.moves_leaderships else acks

    def _refusal(self, request: Produce, body_bytes: int) -> BrokerError | None:
        if request.acks not in _ACKS:
            return BrokerError(
                ErrorCode.INVALID_REQUIRED_ACKS, f"acks: expected 0, 1 or -1 (all), found {request.acks}"
            )
        if self._context.quiesced:
            return BrokerError(
                ErrorCode.BROKER_STOPPING, f"broker {self._context.broker_id} is stopping and accepts no new writes"
            )
        announced = 0
        for wanted in request.partitions:
            announced += wanted.batch_count * HEADER_BYTES + wanted.body_bytes
            if wanted.batch_count < 0 or wanted.body_bytes < 0:
                return BrokerError(
                    ErrorCode.INVALID_REQUEST,
                    f"{wanted.topic[:249]}-{wanted.partition}: {wanted.batch_count} batches in {wanted.body_bytes} "
                    "bytes found, neither may be negative",
                )
        if announced != body_bytes:
            return BrokerError(
                ErrorCode.INVALID_REQUEST, f"body of {body_bytes} bytes found, {announced} announced by the partitions"
            )
        return None

    def _produce(
        self,
        request: Produce,
        wanted: ProducePartition,
        body: memoryview,
        *,
        deadline_ms: int,
        on_result: Callable[[Answer], None],
    ) -> None:
        """Append the batches of one partition. ``body`` has their headers and bodies."""
        transaction = request.transaction
        try:
            partition = self._writable(wanted)
            batches = cut_batches(body, wanted.batch_count, transactional=bool(transaction))
            self.counters["produce.batches"] += len(batches)
            if not transaction:
                _check_outside_transaction(partition, batches)
        except BrokerError as error:
            on_result(Answer(error.code, -1, -1, error.detail))
            return
        pending = PendingProduce(batches, on_result)
        if transaction:
            self._produce_in_transaction(request, wanted, pending, partition=partition, deadline_ms=deadline_ms)
        else:
            partition.produce(pending, acks=self._effective_acks(request.acks), deadline_ms=deadline_ms)

    def _produce_checked(
        self,
        request: Produce,
        wanted: ProducePartition,
        body: memoryview,
        *,
        deadline_ms: int,
        on_result: Callable[[Answer], None],
    ) -> Steps:
        """Do the work of ``_produce``, but check the batches first, in slices, because the check takes long."""
        try:
            check_count(wanted.batch_count)
            partition = self._writable(wanted)
            batches = cut_batches(body, wanted.batch_count, transactional=bool(request.transaction))
            self.counters["produce.batches"] += len(batches)
            partition.require_leader(NO_EPOCH)
            checked = yield from check_batches(partition, batches, self._slices)
            partition = self._writable(wanted)  # the topic may have been recreated during the check
            if not request.transaction:
                _check_outside_transaction(partition, batches)
        except BrokerError as error:
            on_result(Answer(error.code, -1, -1, error.detail))
            return
        pending = PendingProduce(batches, on_result, checked=checked)
        if request.transaction:
            self._produce_in_transaction(request, wanted, pending, partition=partition, deadline_ms=deadline_ms)
        else:
            partition.produce(pending, acks=self._effective_acks(request.acks), deadline_ms=deadline_ms)

    def _writable(self, wanted: ProducePartition) -> Partition:
        """Return the partition. Raise BrokerError if clients cannot write to this broker or to this partition."""
        if self._context.quiesced:  # the broker may have begun to stop since the request arrived
            raise BrokerError(
                ErrorCode.BROKER_STOPPING, f"broker {self._context.broker_id} is stopping and accepts no new writes"
            )
        topic = wanted.topic
        partition = self._partitions.require((topic, wanted.partition), wanted.topic_id)
        if topic.startswith(INTERNAL_PREFIX):
            refuse_internal(topic, "not written to")
        return partition

    def _produce_in_transaction(
        self,
        request: Produce,
        wanted: ProducePartition,
        pending: PendingProduce,
        *,
        partition: Partition,
        deadline_ms: int,
    ) -> None:
        """Append the batches after the transaction's coordinator has verified the producer."""
        tp, on_result, acks = partition.tp, pending.on_result, self._effective_acks(request.acks)

        def append() -> None:
            try:
                hosted = self._partitions.require(tp, wanted.topic_id)
            except BrokerError as error:  # the partition was dropped or recreated during the verification
                on_result(Answer(error.code, -1, -1, error.detail))
            else:
                hosted.produce(pending, acks=acks, deadline_ms=deadline_ms)

        try:
            self._verifications.produce(
                partition,
                pending.batches,
                key=request.transaction,
                acks=acks,
                deadline_ms=deadline_ms,
                append=append,
                on_result=on_result,
            )
        except BrokerError as error:
            on_result(Answer(error.code, -1, -1, error.detail))

    def result_of(self, wanted: ProducePartition, answer: Answer) -> ProduceResult:
        hosted = self._partitions.get((wanted.topic, wanted.partition))
        start = -1 if hosted is None else hosted.log.offsets.log_start
        code = answer.code
        if code is ErrorCode.NONE:
            return ProduceResult(code, answer.base_offset, answer.append_time_us, start)
        self.counters["produce.errors"] += 1
        leader = (NO_LEADER, NO_EPOCH)
        if code is ErrorCode.NOT_LEADER_OR_FOLLOWER and hosted is not None:
            leader = (hosted.replica.leader, hosted.replica.leader_epoch)
        return ProduceResult(code, answer.base_offset, answer.append_time_us, start, answer.detail, *leader)

    def finish(self, connection: ServerConnection, request: Produce, results: tuple[ProduceResult, ...]) -> None:
        if request.acks != 0:
            throttle_ms = self._quotas.throttle_ms(connection) if self._quotas.active else 0
            self._fetches.reply_after_consumers(connection.reply, ProduceReply(request.cid, results, throttle_ms))
            return
        connection.done(request.cid)
        # A producer with acks=0 gets no responses. If it writes to the wrong broker, it learns of that only because the
        # connection is closed. Source: Kafka's acks=0.
        if any(BrokerError(result.code).refresh_metadata for result in results):
            connection.close()


def _check_outside_transaction(partition: Partition, batches: Batches) -> None:
    """Raise BrokerError INVALID_TXN_STATE for a batch without a transaction if its producer has a transaction open."""
    for header, _ in batches:
        if header.producer_id >= 0 and header.producer_id in partition.log.transactions:
            detail = f"{partition.tp}: producer {header.producer_id} has a transaction open, a batch outside it found"
            raise BrokerError(ErrorCode.INVALID_TXN_STATE, detail)


def _misplaced(number: int, flags: int, kind: int) -> BrokerError:
    if flags & _CHECKED_FLAGS & ~Flag.TRANSACTIONAL or flags & Flag.TRANSACTIONAL == kind:
        return BrokerError(ErrorCode.INVALID_RECORD, f"batch {number}: flags {Flag(flags)!r} are not a producer's")
    found, expected = ("no", "one") if kind else ("a", "none")
    detail = f"batch {number}: {found} transactional batch found, {expected} expected by the request's transactional id"
    return BrokerError(ErrorCode.INVALID_RECORD, detail)


def cut_batches(body: memoryview, batch_count: int, *, transactional: bool = False) -> Batches:
    """Split the body of one partition into batches, each with its header and its own body.

    ``transactional`` is whether the request belongs to a transaction.

    Raises:
        BrokerError: CORRUPT_MESSAGE for a bad header CRC or lengths that do not add up. INVALID_RECORD if there is no
            batch, for flags that only the log may set, and for a batch whose transaction flag differs from the
            request's.
    """
    if batch_count == 0:
        raise BrokerError(ErrorCode.INVALID_RECORD, "expected at least one batch, found none")
    kind = _TRANSACTIONAL if transactional else 0
    if batch_count == 1:
        header = unpack_header(body)
        sound = header.flags & _CHECKED_FLAGS == kind and not header.offset_array_length
        if sound and len(body) == HEADER_BYTES + header.length:
            return [(header, body[HEADER_BYTES:])]
    batches = []  # several batches, or one invalid batch
    at = batch_count * HEADER_BYTES
    for number in range(batch_count):
        header = unpack_header(body, number * HEADER_BYTES)
        if header.flags & _CHECKED_FLAGS != kind or header.offset_array_length:
            raise _misplaced(number, header.flags, kind)
        end = at + header.length
        if end > len(body):
            raise BrokerError(
                ErrorCode.CORRUPT_MESSAGE,
                f"batch {number}: header announces {header.length} bytes, {len(body) - at} are left",
            )
        batches.append((header, body[at:end]))
        at = end
    if at != len(body):
        raise BrokerError(
            ErrorCode.CORRUPT_MESSAGE, f"{len(body)} bytes found, the headers announce {at} with the headers"
        )
    return batches
