"""The order in which a producer sends its batches, and the handling of failed batches.

This module is pure. Each partition has *queued* batches, and up to ``max_in_flight`` *outstanding* batches in the order
of their sequences. An outstanding batch is in flight or waits for a retry. A batch gets its sequence when it is first
sent, so that a batch that expires in the queue leaves no gap. These rules keep records in order and without duplicates:

- A batch is sent only when all earlier batches of its partition are done, or in flight to the same broker.
- OUT_OF_ORDER_SEQUENCE_NUMBER for a batch that has an earlier outstanding batch means that the broker refused the
  earlier batch. The later batch waits, and is sent again after the earlier one.
- The same error for the first outstanding batch proves that the log has neither this batch nor its predecessor: an
  earlier batch expired, or the log lost its end. The batch returns to the head of the queue, and the partition gets a
  new producer id once no batch of the old producer id is outstanding. A transaction has a single producer id, so in a
  transaction the batch fails permanently instead.

Source: KIP-98, KIP-360, and Kafka's limit of five requests in flight for idempotent producers.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Callable
from enum import Enum, auto
from typing import NamedTuple

from sparklog.client.cluster.backoff import Backoff
from sparklog.errors import TRAITS, ErrorCode
from sparklog.model import TopicPartition
from sparklog.protocol.fields import IN_ONE_REQUEST
from sparklog.record.codec import EncodedBatch
from sparklog.record.header import Flag

#: A broker remembers only the last five batches of a producer. If more batches were in flight, the broker could not
#: recognize all duplicates.
MAX_IN_FLIGHT = 5
_SEQUENCE_MASK = 2**31 - 1
_SEQUENCE_ERRORS = frozenset(
    {ErrorCode.OUT_OF_ORDER_SEQUENCE_NUMBER, ErrorCode.UNKNOWN_PRODUCER_ID, ErrorCode.INVALID_PRODUCER_EPOCH}
)


class ProducerIdentity(NamedTuple):
    """A producer id and its epoch, from an InitProducerId response."""

    producer_id: int
    epoch: int


class BatchState(Enum):
    """The state of a batch.

    WAITING: the batch waits to be sent again. DONE: the batch was acknowledged or has failed.
    """

    QUEUED = auto()
    IN_FLIGHT = auto()
    WAITING = auto()
    DONE = auto()


class ProducerBatch:
    """One encoded batch for one partition.

    ``handle`` links the batch to its caller. This module does not read it.
    """

    __slots__ = (
        "attempts",
        "broker_id",
        "deadline_ms",
        "encoded",
        "handle",
        "identity",
        "last_error",
        "last_refusal",
        "ordinal",
        "retry_at_ms",
        "state",
        "topic_id",
        "tp",
    )

    def __init__(
        self, tp: TopicPartition, encoded: EncodedBatch, *, topic_id: str, deadline_ms: float, handle: object = None
    ) -> None:
        self.tp = tp
        self.encoded = encoded
        self.topic_id = topic_id
        self.deadline_ms = deadline_ms
        self.handle = handle
        self.state = BatchState.QUEUED
        self.identity: ProducerIdentity | None = None
        #: The broker of the last attempt.
        self.broker_id = -1
        #: The number of failed attempts.
        self.attempts = 0
        self.retry_at_ms = 0.0
        self.last_error = ""
        #: The last error of a broker, which explains a failure better than a later network error.
        self.last_refusal = ""
        #: The batch's number among the sent batches of its partition; -1 before its first attempt.
        self.ordinal = -1

    @property
    def size(self) -> int:
        return int(self.encoded.header.length)

    def number(self, identity: ProducerIdentity | None, first_sequence: int, *, transactional: bool = False) -> None:
        """Set the producer id, epoch and sequence of the batch. Clear them if ``identity`` is None."""
        self.identity = identity
        flags = self.encoded.header.flags
        header = self.encoded.header._replace(
            flags=flags | Flag.TRANSACTIONAL if transactional else flags,
            producer_id=identity.producer_id if identity else -1,
            producer_epoch=identity.epoch if identity else -1,
            first_sequence=first_sequence,
        )
        self.encoded = EncodedBatch(header, self.encoded.body)

    def __repr__(self) -> str:
        header = self.encoded.header
        return f"<batch of {self.tp}: {header.record_count} records, {self.state.name}, seq {header.first_sequence}>"


class _Partition:
    """The batches of one partition, and the next sequence of its producer id."""

    __slots__ = ("identity", "next_ordinal", "next_sequence", "outstanding", "queued", "renumber")

    def __init__(self) -> None:
        self.outstanding: list[ProducerBatch] = []
        self.queued: deque[ProducerBatch] = deque()
        self.identity: ProducerIdentity | None = None
        self.next_sequence = 0
        self.next_ordinal = 0
        #: True if a failed batch left a gap in the sequence, so that the partition needs a new producer id.
        self.renumber = False

    def in_flight_span(self) -> int:
        """Return how many batches were sent since the oldest outstanding batch, including it.

        Completed batches count too, because the broker remembers its last five batches, whatever their outcome here.
        """
        return self.next_ordinal - self.outstanding[0].ordinal if self.outstanding else 0

    def sendable(self) -> bool:
        """Return whether there is a batch that is not in flight."""
        return bool(self.queued) or self.first_waiting() is not None

    def first_waiting(self) -> ProducerBatch | None:
        for batch in self.outstanding:
            if batch.state is BatchState.WAITING:
                return batch
        return None


class PartitionQueues:
    """The queues of one producer: for each partition the batches that are not acknowledged yet, in their order.

    Not thread-safe: use it only on the producer's event loop.
    """

    def __init__(
        self,
        *,
        idempotent: bool,
        transactional: bool = False,
        max_in_flight: int = MAX_IN_FLIGHT,
        backoff: Backoff = Backoff(),  # noqa: B008
    ) -> None:
        assert 1 <= max_in_flight <= MAX_IN_FLIGHT or not idempotent
        assert idempotent or not transactional
        self._idempotent = idempotent
        self._transactional = transactional
        self._max_in_flight = max_in_flight
        self._backoff = backoff
        self._partitions: dict[TopicPartition, _Partition] = {}
        #: Partitions with batches. Other objects only check whether ``busy`` or ``sendable`` is empty.
        self.busy: dict[TopicPartition, _Partition] = {}
        #: The busy partitions with a batch that is not in flight, in the order in which they are served. Frequent scans
        #: use this mapping and not ``busy``, in which thousands of partitions may only wait for responses.
        self.sendable: dict[TopicPartition, _Partition] = {}
        #: A lower bound of the deadlines of all batches that are not in flight.
        self._deadline_ms = math.inf
        #: A heap of the times at which retries become due. The batch of such a time may already be sent or dropped.
        self._retries_ms: list[float] = []
        #: Topics that had a sendable partition without a leader at the last scan.
        self.leaderless: set[str] = set()
        #: The number of partitions with batches, by topic.
        self._busy_topics: dict[str, int] = {}
        self._identity: ProducerIdentity | None = None
        self._identity_wanted = False
        #: The number of times that a broken sequence led to a new producer id.
        self.sequence_resets = 0

    # --- batches and producer ids from the sender ---

    def add(self, batch: ProducerBatch) -> None:
        """Queue a batch after all other batches of its partition."""
        self.sendable.setdefault(batch.tp, self._queue(batch))
        self._deadline_ms = min(self._deadline_ms, batch.deadline_ms)

    def _queue(self, batch: ProducerBatch) -> _Partition:
        partition = self._partitions.get(batch.tp)
        if partition is None:
            partition = self._partitions[batch.tp] = _Partition()
        partition.queued.append(batch)
        if batch.tp not in self.busy:
            self.busy[batch.tp] = partition
            self._busy_topics[batch.tp.topic] = self._busy_topics.get(batch.tp.topic, 0) + 1
        return partition

    def set_identity(self, identity: ProducerIdentity) -> None:
        """Store a new producer id and epoch, for the partitions that need one."""
        self._identity = identity
        self._identity_wanted = False

    def begin(self, identity: ProducerIdentity) -> None:
        """Begin a transaction: every partition starts at sequence 0 under the new producer id."""
        assert self.empty and self._transactional
        self._partitions.clear()
        self.set_identity(identity)

    @property
    def identity_wanted(self) -> bool:
        """Return whether a batch waits because its partition needs a first or a new producer id."""
        return self._identity_wanted

    # --- batches to send ---

    def drain(
        self,
        now_ms: float,
        leader_of: Callable[[TopicPartition], int | None],
        *,
        can_accept: Callable[[int], bool],
        max_request_bytes: int,
    ) -> dict[int, list[ProducerBatch]]:
        """Choose the batches that can be sent now. Return them by broker, and mark them as in flight.

        Each broker gets at most one request, with at most one batch per partition and ``IN_ONE_REQUEST`` batches in
        total. Batches of one partition never share a request: the response has one offset per partition, and after a
        retry these batches need not be adjacent in the log.
        """
        requests: dict[int, list[ProducerBatch]] = {}
        sizes: dict[int, int] = {}
        taking: dict[int, bool] = {}
        self.leaderless.clear()
        for tp, partition in self.sendable.items():
            broker_id = leader_of(tp)
            if broker_id is None:
                self.leaderless.add(tp.topic)
                continue
            if broker_id not in taking:
                taking[broker_id] = can_accept(broker_id)
            if not taking[broker_id] or len(requests.get(broker_id, ())) >= IN_ONE_REQUEST:
                continue
            batch = self._next(partition, now_ms, broker_id)
            if batch is None:
                continue
            size = sizes.get(broker_id, 0) + batch.size
            if broker_id in sizes and size > max_request_bytes:
                continue
            self._start(partition, batch, broker_id)
            sizes[broker_id] = size
            requests.setdefault(broker_id, []).append(batch)
        for batches in requests.values():
            self._move_to_the_end(batches)
        return requests

    def next_number(self, tp: TopicPartition) -> tuple[int, int, int] | None:
        """Return the producer id, epoch and sequence for the partition's next batch.

        Without idempotence, each of these numbers is -1. Return None if the batch cannot be sent at once, because the
        partition has other batches or needs a producer id.
        """
        if self.busy:
            return None
        if not self._idempotent:
            return -1, -1, -1
        partition = self._partitions.get(tp)
        if partition is None or partition.renumber or partition.identity is None:
            return None
        return partition.identity.producer_id, partition.identity.epoch, partition.next_sequence

    def start(self, batch: ProducerBatch, broker_id: int) -> None:
        """Mark a batch as in flight without queueing it first.

        The batch has the numbers that ``next_number`` returned.
        """
        assert not self.busy, "next_number said so"
        tp = batch.tp
        partition = self._partitions.get(tp)
        if partition is None:
            partition = self._partitions[tp] = _Partition()
        self.busy[tp] = partition
        self._busy_topics[tp.topic] = 1
        partition.outstanding.append(batch)
        batch.ordinal = partition.next_ordinal
        partition.next_ordinal += 1
        if self._idempotent:
            batch.identity = partition.identity
            count = batch.encoded.header.record_count
            partition.next_sequence = (partition.next_sequence + count) & _SEQUENCE_MASK
        batch.state = BatchState.IN_FLIGHT
        batch.broker_id = broker_id

    def _next(self, partition: _Partition, now_ms: float, broker_id: int) -> ProducerBatch | None:
        """Return the batch that may be sent to ``broker_id`` now, or None.

        The only state that this changes is ``identity_wanted``.
        """
        if any(batch.state is BatchState.IN_FLIGHT and batch.broker_id != broker_id for batch in partition.outstanding):
            return None
        waiting = partition.first_waiting()
        if waiting is not None:
            # The retry delay applies only to the broker that refused the batch, and not to a new leader.
            return waiting if waiting.retry_at_ms <= now_ms or waiting.broker_id != broker_id else None
        if not partition.queued or partition.in_flight_span() >= self._max_in_flight:
            return None
        first = partition.queued[0]
        if first.retry_at_ms > now_ms:
            return None
        if self._idempotent and (partition.identity is None or partition.renumber):
            if partition.outstanding:
                return None
            if self._identity is None or self._identity == partition.identity:
                self._identity_wanted = True
                return None
        return first

    def _start(self, partition: _Partition, batch: ProducerBatch, broker_id: int) -> None:
        if batch.state is BatchState.QUEUED:
            partition.queued.popleft()
            partition.outstanding.append(batch)
            batch.ordinal = partition.next_ordinal
            partition.next_ordinal += 1
            if self._idempotent:
                self._number(partition, batch)
        batch.state = BatchState.IN_FLIGHT
        batch.broker_id = broker_id

    def _number(self, partition: _Partition, batch: ProducerBatch) -> None:
        if partition.identity is None or partition.renumber:
            assert self._identity is not None
            partition.identity, partition.next_sequence, partition.renumber = self._identity, 0, False
        batch.number(partition.identity, partition.next_sequence, transactional=self._transactional)
        count = batch.encoded.header.record_count
        partition.next_sequence = (partition.next_sequence + count) & _SEQUENCE_MASK

    def _move_to_the_end(self, batches: list[ProducerBatch]) -> None:
        """Move the partitions of these batches to the end of the order.

        Otherwise full requests could starve the others.
        """
        for batch in batches:
            partition = self.sendable.pop(batch.tp)
            if partition.sendable():
                self.sendable[batch.tp] = partition

    # --- outcomes ---

    def failed(self, batch: ProducerBatch, code: ErrorCode, *, now_ms: float, roll: float, detail: str = "") -> bool:
        """Handle a failed attempt.

        Return True if the batch will be retried, False if it failed permanently and was removed.

        ``roll``, a random number in [0, 1), determines the jitter of the delay before the retry.
        """
        assert batch.state is BatchState.IN_FLIGHT, batch
        batch.last_error = f"{code.name}: {detail}" if detail else code.name
        if code is not ErrorCode.NETWORK_EXCEPTION:
            batch.last_refusal = batch.last_error
        partition = self._partitions[batch.tp]
        self.sendable.setdefault(batch.tp, partition)
        self._deadline_ms = min(self._deadline_ms, batch.deadline_ms)
        lost_sequence = batch.identity is not None and code in _SEQUENCE_ERRORS
        final = not lost_sequence and not TRAITS[code].retriable
        if self._transactional and lost_sequence:
            final = code != ErrorCode.OUT_OF_ORDER_SEQUENCE_NUMBER or partition.outstanding[0] is batch
        if final:
            self.drop(batch)
            return False
        if lost_sequence and partition.outstanding[0] is not batch:
            batch.state = BatchState.WAITING
            batch.retry_at_ms = now_ms  # without a delay: the earlier batch has one, and this batch follows it
            return True
        batch.retry_at_ms = now_ms + self._backoff.delay_ms(batch.attempts, roll)
        heapq.heappush(self._retries_ms, batch.retry_at_ms)
        batch.attempts += 1
        if lost_sequence:
            self._requeue(partition, batch)
        else:
            batch.state = BatchState.WAITING
        return True

    def _requeue(self, partition: _Partition, batch: ProducerBatch) -> None:
        """Return a batch to its queue, before batches that were never sent and after batches returned earlier."""
        partition.outstanding.remove(batch)
        batch.number(None, -1)
        batch.state = BatchState.QUEUED
        returned = sum(1 for other in partition.queued if other.broker_id >= 0)
        partition.queued.insert(returned, batch)
        if not partition.renumber:
            partition.renumber = True
            self.sequence_resets += 1

    def expire(self, now_ms: float) -> list[ProducerBatch]:
        """Remove and return the batches past their deadline. Batches in flight stay until their requests end."""
        if now_ms < self._deadline_ms:
            return []
        waiting = [
            batch
            for partition in self.sendable.values()
            for batch in (*partition.outstanding, *partition.queued)
            if batch.state is not BatchState.IN_FLIGHT
        ]
        expired = [batch for batch in waiting if batch.deadline_ms <= now_ms]
        self._deadline_ms = min(
            (batch.deadline_ms for batch in waiting if batch.deadline_ms > now_ms), default=math.inf
        )
        for batch in expired:
            self.drop(batch)
        return expired

    def succeeded(self, batch: ProducerBatch) -> None:
        """Remove a batch that the log now contains."""
        self.drop(batch)

    def drop(self, batch: ProducerBatch) -> None:
        """Remove a batch, which the caller fails. The batch is not retried."""
        partition = self._partitions[batch.tp]
        if batch.state is BatchState.QUEUED:
            partition.queued.remove(batch)
        else:
            partition.outstanding.remove(batch)
        batch.state = BatchState.DONE
        if partition.outstanding or partition.queued:
            if not partition.sendable():
                self.sendable.pop(batch.tp, None)
            return
        if self.sendable:
            self.sendable.pop(batch.tp, None)
        del self.busy[batch.tp]
        others = self._busy_topics.pop(batch.tp.topic) - 1
        if others:
            self._busy_topics[batch.tp.topic] = others

    # --- queries ---

    def busy_partitions(self) -> list[TopicPartition]:
        """Return the partitions that have queued or outstanding batches."""
        return list(self.busy)

    @property
    def empty(self) -> bool:
        return not self.busy

    def topic_busy(self, topic: str) -> bool:
        """Return whether a batch of this topic is queued or outstanding."""
        return topic in self._busy_topics

    def batches(self, topic: str | None = None) -> list[ProducerBatch]:
        """Return all queued and outstanding batches of one topic, or of all topics."""
        return [
            batch
            for tp, partition in self.busy.items()
            if topic is None or tp.topic == topic
            for batch in (*partition.outstanding, *partition.queued)
        ]

    def next_time_ms(self, now_ms: float) -> float | None:
        """Return the next time at which a batch can be retried or expires, or None if there is none."""
        while self._retries_ms and self._retries_ms[0] <= now_ms:
            heapq.heappop(self._retries_ms)
        if not self.sendable:
            return None
        earliest_ms = min(self._deadline_ms, self._retries_ms[0] if self._retries_ms else math.inf)
        return earliest_ms if earliest_ms < math.inf else None
