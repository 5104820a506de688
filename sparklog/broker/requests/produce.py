"""Produce requests: cut into batches, appended by the partitions' leaders, answered when ``acks`` is satisfied.

Cutting is all that is read of a batch here: its 96-byte header. What the Arrow bytes hold is checked by the partition
right before it appends them. A request with acks=all stays open here until every partition has answered.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from typing import cast

from sparklog.broker.internal_topics import refuse_internal
from sparklog.broker.replication.partition import Answer, Batches, CheckedBatches, Partition, PendingProduce
from sparklog.broker.requests.batch_checks import check_batches, check_count, is_short
from sparklog.broker.requests.slices import Steps
from sparklog.broker.state import BrokerState
from sparklog.errors import BrokerError, ErrorCode
from sparklog.model import INTERNAL_PREFIX, NO_EPOCH, NO_LEADER
from sparklog.net.server import ServerConnection
from sparklog.protocol.messages import ACKS_ALL, ErrorReply, Produce, ProducePartition, ProduceReply, ProduceResult
from sparklog.record.header import HEADER_BYTES, Flag, unpack_header

_log = logging.getLogger(__name__)

_ACKS = frozenset({0, 1, ACKS_ALL})
_MAX_TIMEOUT_MS = 3_600_000
#: Flags that say what may become of a batch: those that only the log sets, and whether it is in a transaction.
_TELLING = int(Flag.CONTROL | Flag.OFFSET_ARRAY | Flag.FIRST_OF_SEGMENT | Flag.TRANSACTIONAL | Flag.PROJECTED)
_TRANSACTIONAL = int(Flag.TRANSACTIONAL)


class _SingleProduce:
    """One request of one partition. Owner: the partition, which answers once."""

    __slots__ = ("_acks", "_broker", "_cid", "_connection", "_tp")

    def __init__(self, broker: BrokerState, connection: ServerConnection, request: Produce) -> None:
        self._broker = broker
        self._connection = connection
        self._cid = request.cid
        self._acks = request.acks
        wanted = request.partitions[0]
        self._tp = wanted.topic, wanted.partition

    def answered(self, answer: Answer) -> None:
        result = _result_of(self._broker, self._tp, answer)
        _finish(self._broker, self._connection, self._cid, acks=self._acks, results=(result,))


class _MultiProduce:
    """One request whose partitions have not all answered. Owner: the callbacks it gave to the partitions."""

    __slots__ = ("_acks", "_broker", "_cid", "_connection", "_missing", "_results", "_wanted")

    def __init__(self, broker: BrokerState, connection: ServerConnection, request: Produce) -> None:
        self._broker = broker
        self._connection = connection
        self._cid = request.cid
        self._acks = request.acks
        self._wanted = request.partitions
        self._results: list[ProduceResult | None] = [None] * len(request.partitions)
        self._missing = len(request.partitions)

    def answered(self, index: int, answer: Answer) -> None:
        assert self._results[index] is None, "a partition answers once"
        wanted = self._wanted[index]
        self._results[index] = _result_of(self._broker, (wanted.topic, wanted.partition), answer)
        self._missing -= 1
        if self._missing == 0:
            results = cast("list[ProduceResult]", self._results)  # none is missing
            _finish(self._broker, self._connection, self._cid, acks=self._acks, results=tuple(results))

    def fail(self, error: Exception) -> None:
        """A bug of ours: the request as a whole is answered, and what its partitions still say is not."""
        self._broker.counters["requests.failed"] += 1
        _log.error("produce from %s failed", self._connection.peer, exc_info=error)
        self._missing = 0
        if self._acks == 0:
            self._connection.done(self._cid)
        else:
            detail = f"{type(error).__name__}: {error}"
            self._connection.reply(ErrorReply(self._cid, ErrorCode.UNKNOWN_SERVER_ERROR, detail))


def _result_of(broker: BrokerState, tp: tuple[str, int], answer: Answer) -> ProduceResult:
    hosted = broker.partitions.get(tp)
    start = -1 if hosted is None else hosted.log.log_start_offset
    code = answer.code
    if code is ErrorCode.NONE:
        return ProduceResult(code, answer.base_offset, answer.append_time_us, start)
    broker.counters["produce.errors"] += 1
    leader = (NO_LEADER, NO_EPOCH)
    if code is ErrorCode.NOT_LEADER_OR_FOLLOWER and hosted is not None:
        leader = (hosted.replica.leader, hosted.replica.leader_epoch)
    return ProduceResult(code, answer.base_offset, answer.append_time_us, start, answer.detail, *leader)


def _finish(
    broker: BrokerState, connection: ServerConnection, cid: int, *, acks: int, results: tuple[ProduceResult, ...]
) -> None:
    if acks != 0:
        broker.fetches.after_consumers(connection.reply, ProduceReply(cid, results))
        return
    connection.done(cid)
    # Nothing else can tell a producer without answers that it writes to the wrong broker. Source: Kafka's acks=0.
    if any(BrokerError(result.code).refresh_metadata for result in results):
        connection.close()


def handle_produce(broker: BrokerState, connection: ServerConnection, request: Produce, body: memoryview) -> None:
    """Answer with per-partition results; a request that contradicts itself is refused as a whole."""
    refusal = _refusal(broker, request, len(body))
    if refusal is not None:
        broker.counters["produce.requests.refused"] += 1
        if request.acks == 0:
            connection.done(request.cid)
        else:
            connection.reply(ErrorReply(request.cid, refusal.code, refusal.detail))
        return
    counters, partitions = broker.counters, request.partitions
    counters["produce.requests"] += 1
    counters["produce.bytes"] += len(body)
    timeout_ms = request.timeout_ms
    if not 0 <= timeout_ms <= _MAX_TIMEOUT_MS:
        timeout_ms = min(max(timeout_ms, 0), _MAX_TIMEOUT_MS)
    deadline_ms = broker.now_ms() + timeout_ms
    if len(partitions) == 1 and _is_short(broker, partitions[0]):  # as it is where latency counts
        answered = _SingleProduce(broker, connection, request).answered
        _produce(broker, request, partitions[0], body, deadline_ms=deadline_ms, answered=answered)
        return
    if not partitions:
        _finish(broker, connection, request.cid, acks=request.acks, results=())
        return
    open_produce = _MultiProduce(broker, connection, request)
    steps = _steps(broker, request, body, deadline_ms=deadline_ms, open_produce=open_produce)
    broker.slices.run(connection, steps, open_produce.fail)


def _is_short(broker: BrokerState, wanted: ProducePartition) -> bool:
    hosted = broker.partitions.get((wanted.topic, wanted.partition))
    return hosted is None or is_short(wanted.batch_count, hosted.rules)


def _steps(
    broker: BrokerState, request: Produce, body: memoryview, *, deadline_ms: int, open_produce: _MultiProduce
) -> Steps:
    """Yields where others may have a turn: a thousand new logs, and a thousand batches that each decompress to
    megabytes, take longer than a broker may be silent."""
    at = 0
    for index, wanted in enumerate(request.partitions):
        if broker.slices.over():
            yield None
        size = wanted.batch_count * HEADER_BYTES + wanted.body_bytes
        part, answered = body[at : at + size], partial(open_produce.answered, index)
        at += size
        if _is_short(broker, wanted):
            _produce(broker, request, wanted, part, deadline_ms=deadline_ms, answered=answered)
        else:
            yield from _produce_checked(broker, request, wanted, part, deadline_ms=deadline_ms, answered=answered)


def _owed(broker: BrokerState, acks: int) -> int:
    """A broker that hands its leaderships over hears last that others lead, and what it alone has would be cut. So who
    asked for the leader's log is answered when its followers have it: a planned stop loses nothing acknowledged."""
    return ACKS_ALL if acks == 1 and broker.hands_over else acks


def _refusal(broker: BrokerState, request: Produce, body_bytes: int) -> BrokerError | None:
    if request.acks not in _ACKS:
        return BrokerError(ErrorCode.INVALID_REQUIRED_ACKS, f"acks: expected 0, 1 or -1 (all), found {request.acks}")
    if broker.quiesced:
        return BrokerError(
            ErrorCode.BROKER_STOPPING, f"broker {broker.broker_id} is stopping and accepts no new writes"
        )
    said = 0
    for wanted in request.partitions:
        said += wanted.batch_count * HEADER_BYTES + wanted.body_bytes
        if wanted.batch_count < 0 or wanted.body_bytes < 0:
            return BrokerError(
                ErrorCode.INVALID_REQUEST,
                f"{wanted.topic[:249]}-{wanted.partition}: {wanted.batch_count} batches in {wanted.body_bytes} bytes "
                "found, neither may be negative",
            )
    if said != body_bytes:
        return BrokerError(
            ErrorCode.INVALID_REQUEST, f"body of {body_bytes} bytes found, {said} announced by the partitions"
        )
    return None


def _produce(
    broker: BrokerState,
    request: Produce,
    wanted: ProducePartition,
    body: memoryview,
    *,
    deadline_ms: int,
    answered: Callable[[Answer], None],
) -> None:
    """One of the request's partitions, whose headers and batches are ``body``."""
    transaction = request.transaction
    try:
        partition = _writable(broker, wanted)
        batches = cut_batches(body, wanted.batch_count, transactional=bool(transaction))
        broker.counters["produce.batches"] += len(batches)
        if not transaction:
            _check_outside_transaction(partition, batches)
    except BrokerError as error:
        answered(Answer(error.code, -1, -1, error.detail))
        return
    _append(broker, request, wanted, batches, partition=partition, deadline_ms=deadline_ms, answered=answered)


def _produce_checked(
    broker: BrokerState,
    request: Produce,
    wanted: ProducePartition,
    body: memoryview,
    *,
    deadline_ms: int,
    answered: Callable[[Answer], None],
) -> Steps:
    """As ``_produce``, for batches whose check takes more than a turn of the loop: they are checked first."""
    try:
        check_count(wanted.batch_count)
        partition = _writable(broker, wanted)
        batches = cut_batches(body, wanted.batch_count, transactional=bool(request.transaction))
        broker.counters["produce.batches"] += len(batches)
        partition.require_leader(NO_EPOCH)
        checked = yield from check_batches(partition, batches, broker.slices)
        partition = _writable(broker, wanted)  # another one, perhaps, than before the check
        if not request.transaction:
            _check_outside_transaction(partition, batches)
    except BrokerError as error:
        answered(Answer(error.code, -1, -1, error.detail))
        return
    _append(
        broker,
        request,
        wanted,
        batches,
        partition=partition,
        deadline_ms=deadline_ms,
        answered=answered,
        checked=checked,
    )


def _writable(broker: BrokerState, wanted: ProducePartition) -> Partition:
    """Raises BrokerError: this broker takes no writes, or not to this partition."""
    if broker.quiesced:  # since the request came
        raise BrokerError(ErrorCode.BROKER_STOPPING, f"broker {broker.broker_id} is stopping and accepts no new writes")
    topic = wanted.topic
    partition = broker.partitions.require((topic, wanted.partition), wanted.topic_id)
    if topic.startswith(INTERNAL_PREFIX):
        refuse_internal(topic, "not written to")
    return partition


def _append(
    broker: BrokerState,
    request: Produce,
    wanted: ProducePartition,
    batches: Batches,
    *,
    partition: Partition,
    deadline_ms: int,
    answered: Callable[[Answer], None],
    checked: CheckedBatches | None = None,
) -> None:
    transaction, acks = request.transaction, _owed(broker, request.acks)
    if transaction:
        try:
            _produce_in_transaction(
                broker,
                wanted,
                batches,
                partition=partition,
                key=transaction,
                acks=acks,
                deadline_ms=deadline_ms,
                answered=answered,
                checked=checked,
            )
        except BrokerError as error:
            answered(Answer(error.code, -1, -1, error.detail))
        return
    pending = PendingProduce(batches, answered, checked=checked)
    partition.produce(pending, acks=acks, deadline_ms=deadline_ms)


def _produce_in_transaction(
    broker: BrokerState,
    wanted: ProducePartition,
    batches: Batches,
    *,
    partition: Partition,
    key: str,
    acks: int,
    deadline_ms: int,
    answered: Callable[[Answer], None],
    checked: CheckedBatches | None,
) -> None:
    """Append once the transaction's coordinator has vouched for the producer. Raises BrokerError when it is refused at
    once."""
    tp = partition.tp

    def append() -> None:
        try:
            hosted = broker.partitions.require(tp, wanted.topic_id)
        except BrokerError as error:  # it was dropped, or made anew, while the coordinator was asked
            answered(Answer(error.code, -1, -1, error.detail))
        else:
            pending = PendingProduce(batches, answered, checked=checked)
            hosted.produce(pending, acks=acks, deadline_ms=deadline_ms)

    broker.verifications.produce(
        partition, batches, key=key, acks=acks, deadline_ms=deadline_ms, append=append, answered=answered
    )


def _check_outside_transaction(partition: Partition, batches: Batches) -> None:
    """Raises BrokerError INVALID_TXN_STATE when a batch of no transaction comes from a producer that is in one."""
    for header, _ in batches:
        if header.producer_id >= 0 and partition.log.has_open_transaction(header.producer_id):
            detail = f"{partition.tp}: producer {header.producer_id} has a transaction open, a batch outside it found"
            raise BrokerError(ErrorCode.INVALID_TXN_STATE, detail)


def _misplaced(number: int, flags: int, kind: int) -> BrokerError:
    if flags & _TELLING & ~Flag.TRANSACTIONAL or flags & Flag.TRANSACTIONAL == kind:
        return BrokerError(ErrorCode.INVALID_RECORD, f"batch {number}: flags {Flag(flags)!r} are not a producer's")
    found, expected = ("no", "one") if kind else ("a", "none")
    detail = f"batch {number}: {found} transactional batch found, {expected} expected: that is what the request says"
    return BrokerError(ErrorCode.INVALID_RECORD, detail)


def cut_batches(body: memoryview, batch_count: int, *, transactional: bool = False) -> Batches:
    """Split headers and bodies of one partition. ``transactional``: what the request says of all of them.

    Raises:
        BrokerError: CORRUPT_MESSAGE for a bad header CRC or lengths that do not add up; INVALID_RECORD for what only
            the log itself may write, and for a batch that is transactional where the request is not, or the other way.
    """
    if batch_count == 0:
        raise BrokerError(ErrorCode.INVALID_RECORD, "expected at least one batch, found none")
    kind = _TRANSACTIONAL if transactional else 0
    if batch_count == 1:
        header = unpack_header(body)
        sound = header.flags & _TELLING == kind and not header.offset_array_length
        if sound and len(body) == HEADER_BYTES + header.length:
            return [(header, body[HEADER_BYTES:])]
    batches = []  # or what is wrong with the one
    at = batch_count * HEADER_BYTES
    for number in range(batch_count):
        header = unpack_header(body, number * HEADER_BYTES)
        if header.flags & _TELLING != kind or header.offset_array_length:
            raise _misplaced(number, header.flags, kind)
        end = at + header.length
        if end > len(body):
            raise BrokerError(
                ErrorCode.CORRUPT_MESSAGE,
                f"batch {number}: header says {header.length} bytes, {len(body) - at} are left",
            )
        batches.append((header, body[at:end]))
        at = end
    if at != len(body):
        raise BrokerError(
            ErrorCode.CORRUPT_MESSAGE, f"bodies of {len(body)} bytes found, headers say {at} with the headers"
        )
    return batches
