"""The handling of produce results: a batch is acknowledged, retried or failed, and its caller gets the outcome.

All code runs on the producer's I/O thread, or on a caller's thread that runs the event loop in its place (see
``LoopHandoff``).
"""

from __future__ import annotations

import random
import time
from collections import deque
from collections.abc import Iterator, Sequence, Sized
from typing import NamedTuple

from sparklog.client.cluster.loop_cluster import LoopCluster
from sparklog.client.errors import ClientTimeout, transaction_error
from sparklog.client.producer.completion import Completion
from sparklog.client.producer.partition_queues import PartitionQueues, ProducerBatch
from sparklog.client.producer.record_buffer import RecordBuffer
from sparklog.client.producer.record_chunk import RecordChunk
from sparklog.client.producer.results import BatchOutcome
from sparklog.client.producer.sender_settings import SenderSettings
from sparklog.errors import TRAITS, BrokerError, ErrorCode
from sparklog.protocol.messages import ProduceResult


class DeliveryHandle(NamedTuple):
    """The link from a batch to the write to which it belongs.

    When the batch ends, ``completion`` gets the outcome of its batch ``number``, and ``reserved`` bytes of the
    producer's buffer become free.
    """

    completion: Completion
    number: int
    reserved: int


def delivery_handles(chunk: RecordChunk, batches: Sequence[Sized]) -> Iterator[DeliveryHandle]:
    """Yield a handle for each of ``batches``, into which the records of ``chunk`` were encoded.

    Each batch frees a part of the chunk's bytes in the buffer, in proportion to its rows. The last batch frees the
    rest.
    """
    left, total = chunk.size, sum(map(len, batches))
    for number, rows in enumerate(batches):
        share = left if number == len(batches) - 1 else chunk.size * len(rows) // total
        left -= share
        yield DeliveryHandle(chunk, number, share)


class DeliveryReports:
    """A part of the ``Sender`` that handles the result of each batch: the batch is acknowledged, retried or failed."""

    def __init__(
        self,
        cluster: LoopCluster,
        queues: PartitionQueues,
        buffer: RecordBuffer,
        settings: SenderSettings,
    ) -> None:
        """Create the handling for one producer. It frees the bytes of ended batches in ``buffer``."""
        self._cluster = cluster
        self._queues = queues
        self._buffer = buffer
        #: The name of the transaction for error messages; empty without a transaction.
        self._transaction = f"transaction {settings.transaction!r}" if settings.transaction else ""
        self._delivery_timeout_s = settings.delivery_timeout_s
        #: The batches that failed since the sender last ran, and will be retried.
        self.retried: deque[ProducerBatch] = deque()
        #: Outcomes of acknowledged batches that the callers have not received yet. ``DirectSender`` adds outcomes too.
        self.acknowledged: deque[tuple[Completion, int, BatchOutcome]] = deque()

    def on_result(self, batch: ProducerBatch, result: ProduceResult) -> None:
        """Handle the result of a batch in flight: acknowledge, retry or fail the batch."""
        if result.code == ErrorCode.NONE:
            self._succeeded(batch, result.base_offset)
        elif result.code == ErrorCode.DUPLICATE_SEQUENCE_NUMBER:
            self._succeeded(batch, -1)  # in the log, but so old that the broker does not remember the offset
        else:
            leader_known = self._cluster.merge_leader(batch.tp, result.leader, result.leader_epoch)
            self._refused(batch, ErrorCode(result.code), result.detail, leader_known=leader_known)

    def deliver_acknowledged(self) -> None:
        """Deliver the outcomes of acknowledged batches to their callers.

        The sender calls this method last, because a caller that wakes up earlier would only wait for the interpreter
        lock.
        """
        while self.acknowledged:
            completion, number, outcome = self.acknowledged.popleft()
            completion.batch_done(number, outcome)

    def expired(self, batch: ProducerBatch) -> None:
        """Fail a batch with ClientTimeout, because its delivery timeout has passed."""
        last = batch.last_error or self._cluster.last_problem or "the batch was never sent, because no leader is known"
        if batch.last_refusal not in {"", batch.last_error}:
            last += f"; before that: {batch.last_refusal}"
        self.fail(
            batch,
            ClientTimeout(
                f"writing {batch.encoded.header.record_count} records to {batch.tp}: not acknowledged within"
                f" {self._delivery_timeout_s:g} s, last: {last}"
            ),
        )

    def fail(self, batch: ProducerBatch, error: BaseException) -> None:
        handle, outcome = self._concluded(batch, -1, error)
        handle.completion.batch_done(handle.number, outcome)

    def _succeeded(self, batch: ProducerBatch, base_offset: int) -> None:
        self._queues.succeeded(batch)
        self._cluster.on_progress()
        handle, outcome = self._concluded(batch, base_offset, None)
        self.acknowledged.append((handle.completion, handle.number, outcome))

    def _refused(self, batch: ProducerBatch, code: ErrorCode, detail: str, *, leader_known: bool) -> None:
        if TRAITS[code].refresh_metadata and not leader_known:
            self._cluster.request_metadata([batch.tp.topic])
        now_ms = time.monotonic() * 1000
        if self._queues.failed(batch, code, now_ms=now_ms, roll=random.random(), detail=detail):
            self.retried.append(batch)
            return
        error = BrokerError(code, detail or f"partition {batch.tp}")
        self.fail(batch, transaction_error(error, self._transaction) if self._transaction else error)

    def _concluded(
        self, batch: ProducerBatch, base_offset: int, error: BaseException | None
    ) -> tuple[DeliveryHandle, BatchOutcome]:
        handle = batch.handle
        assert isinstance(handle, DeliveryHandle)
        if handle.reserved:
            self._buffer.release(handle.reserved)
        return handle, BatchOutcome(batch.tp.partition, base_offset, batch.encoded.header.record_count, error)
