"""A chunk of single records, which are encoded together. Each record has its own outcome.

A chunk has a partition only if the caller has chosen it. Otherwise the I/O thread chooses the partitions when it
encodes the chunk: it hashes all keys of the chunk at once.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeAlias

import numpy as np
import pyarrow as pa

from sparklog.client.producer.completion import CompletionLatch, notify
from sparklog.client.producer.partitioning import ProducerTopic, Rows
from sparklog.client.producer.record_future import abandon_listener
from sparklog.client.producer.results import BatchOutcome, RecordMetadata
from sparklog.errors import BrokerError, ErrorCode
from sparklog.record.exact_values import ValueRefusedError
from sparklog.record.schema import DEFAULT_SCHEMA

#: The maximum number of characters of a refused record in its error message.
_RECORD_SHOWN = 200

_DEFAULT_TYPES = [DEFAULT_SCHEMA.field(name).type for name in ("key", "value", "headers", "timestamp")]

Header: TypeAlias = "dict[str, str | bytes | None]"
#: The index of a record in its chunk, and the callback that receives the record's outcome.
_Listener: TypeAlias = "tuple[int, Callable[[RecordMetadata | BaseException], None]]"
#: A record: its key, value, headers, and timestamp in microseconds.
Record: TypeAlias = "tuple[bytes | str | None, Any, list[Header] | None, int]"


class IoThread(Protocol):
    """The methods of the I/O thread that the buffer and the records use.

    Any thread may call all of them but ``end``.
    """

    def wake(self) -> None:
        """Make the I/O thread check for new work."""

    def on_chunk_opened(self) -> None:
        """Start to send a new chunk, which has its first record."""

    def wait_helping(self, finished: Callable[[], bool]) -> None:
        """Do the producer's I/O in the calling thread until ``finished()`` is true. This method may return earlier."""

    def recall_loop(self) -> None:
        """Give the event loop back to the I/O thread, before the caller waits without running the loop."""

    def on_io_thread(self) -> bool:
        """Return whether the calling thread runs the event loop, and so must not wait for it."""

    def end(self, reason: BaseException) -> None:
        """End the producer: all open work fails with ``reason``.

        Only the thread that runs the loop may call this method.
        """


class RecordChunk:
    """A group of single records of one topic that are encoded together, with the outcome of each record.

    A thread that appends a record holds the buffer's lock. No record is added once the buffer has declared the chunk
    full.
    """

    def __init__(
        self, topic: ProducerTopic, partition: int | None, created_ms: float, io_thread: IoThread | None = None
    ) -> None:
        self.io_thread = io_thread
        self.topic = topic
        self.partition = partition
        self.created_ms = created_ms
        self.size = 0
        self.lock = threading.Lock()
        self.finished = CompletionLatch()
        #: One tuple per record. The tuples become columns when the chunk is encoded, so that ``send`` does a single
        #: append.
        self.records: list[Record] = []
        self._batch_of: Rows | Sequence[int] | None = None
        self._place_of: Rows | Sequence[int] | None = None
        self._outcomes: list[BatchOutcome | None] = []
        self._failure: BaseException | None = None
        self._refused: dict[int, BaseException] = {}
        self._all_failed: BaseException | None = None
        self._open = 0
        self._listeners: list[_Listener] = []
        self._error_seen = False

    def __len__(self) -> int:
        return len(self.records)

    def to_batch(self, topic: ProducerTopic, rows: Rows) -> pa.RecordBatch:
        """Return the records with the indexes ``rows`` as one batch of the topic's schema.

        Raises:
            BrokerError: SCHEMA_MISMATCH if a record does not fit the schema.
        """
        records = self.records if len(rows) == len(self) else [self.records[row] for row in rows]
        return _default_batch(records) if topic.is_default else _typed_batch(topic, [record[1] for record in records])

    def refuse(self, row: int, error: BaseException) -> None:
        """Fail one record, which cannot be encoded. Call this before ``assign_batches`` and ``fail``."""
        self._refused[row] = error
        self._failure = self._failure or error

    # --- outcomes ---

    def assign_batches(self, rows_of_batches: Sequence[Rows | Sequence[int]]) -> None:
        """Store which rows each batch has, in the order of the batches. The rows of a batch are in ascending order.

        Call this once, before any ``batch_done``.
        """
        self._open = len(rows_of_batches)
        self._outcomes = [None] * self._open
        count = len(self.records)
        if len(rows_of_batches[0]) == count:
            self._place_of = range(count)
            self._batch_of = bytes(count)
            return
        batch_of = np.zeros(len(self), np.int64)
        place_of = np.zeros(len(self), np.int64)
        for index, rows in enumerate(rows_of_batches):
            batch_of[rows] = index
            place_of[rows] = np.arange(len(rows))
        self._place_of = place_of
        self._batch_of = batch_of

    def batch_done(self, index: int, outcome: BatchOutcome) -> None:
        self._outcomes[index] = outcome
        self._open -= 1
        if outcome.error is not None and self._failure is None:
            self._failure = outcome.error
        self._notify(ended=not self._open)

    def fail(self, error: BaseException) -> None:
        """Fail the records that have no outcome so far. The method is idempotent."""
        self._failure = self._failure or error
        self._all_failed = self._all_failed or error
        self._notify(ended=True)

    def abandon(self, error: BaseException) -> None:
        """End all waits for the records with ``error``, in a forked child; see ``Completion.abandon``."""
        self.lock = threading.Lock()
        self._all_failed = error
        for _, resolve in self._listeners:
            abandon_listener(resolve, error)

    @property
    def failed(self) -> bool:
        return self._failure is not None

    @property
    def error(self) -> BaseException | None:
        return self._failure

    def consume_failure(self) -> BaseException | None:
        if self._error_seen:
            return None
        self._error_seen = True
        return self._failure

    def outcome(self, index: int) -> RecordMetadata | BaseException | None:
        """Return the outcome of one record, or None if it has none yet."""
        if self._refused and index in self._refused:
            return self._refused[index]
        if self._batch_of is None or self._place_of is None:
            return self._all_failed
        batch = self._outcomes[int(self._batch_of[index])]
        if batch is None:
            return self._all_failed
        if batch.error is not None:
            return batch.error
        offset = batch.base_offset + int(self._place_of[index]) if batch.base_offset >= 0 else -1
        return RecordMetadata(self.topic.name, batch.partition, offset, self.records[index][3])

    def wait_helping(self, index: int) -> RecordMetadata | BaseException | None:
        outcome = self.outcome(index)
        if outcome is not None or self.io_thread is None:
            return outcome
        ending = self.finished
        self.io_thread.wait_helping(lambda: ending.done or self.outcome(index) is not None)
        return self.outcome(index)

    def recall_loop(self) -> None:
        if self.io_thread is not None:
            self.io_thread.recall_loop()

    def listen(self, index: int, resolve: Callable[[RecordMetadata | BaseException], None]) -> None:
        """Call ``resolve`` at least once with the outcome: now, or when the outcome is known."""
        with self.lock:
            outcome = self.outcome(index)
            if outcome is None:
                self._listeners.append((index, resolve))
        if outcome is not None:
            resolve(outcome)

    def error_seen(self) -> None:
        self._error_seen = True

    def _notify(self, *, ended: bool) -> None:
        with self.lock:
            waiting = tuple(self._listeners)
        if waiting:
            self._notify_listeners(waiting)
        if ended:
            self.finished.end()

    def _notify_listeners(self, waiting: Sequence[_Listener]) -> None:
        """Notify ``waiting``, which are the first listeners of the list.

        They are removed from the list only after all were notified. If an interrupt stops this function, ``fail``
        notifies them again.
        """
        left = []
        for index, resolve in waiting:
            outcome = self.outcome(index)
            if outcome is None:
                left.append((index, resolve))
            else:
                notify(resolve, outcome)
        with self.lock:
            self._listeners[: len(waiting)] = left


def _default_batch(records: Sequence[Record]) -> pa.RecordBatch:
    columns = [
        # Most records have no headers, and an array of nested nulls costs more than the rest of a small batch.
        pa.array(found, kind) if any(found) or not pa.types.is_nested(kind) else pa.nulls(len(found), kind)
        for found, kind in zip(zip(*records, strict=True), _DEFAULT_TYPES, strict=True)
    ]
    return pa.RecordBatch.from_arrays(columns, schema=DEFAULT_SCHEMA)


def _typed_batch(topic: ProducerTopic, rows: list[Any]) -> pa.RecordBatch:
    try:
        return topic.rows.batch(rows)
    except ValueRefusedError as error:
        detail = f"column {error.path!r}: {error}"
    except Exception as error:  # the methods of a caller's object may raise anything
        detail = repr(error)
    # The encoder splits the chunk until the record that does not fit is the only one in ``rows``.
    record = f"; the record is {repr(rows[0])[:_RECORD_SHOWN]}" if len(rows) == 1 else ""
    raise BrokerError(ErrorCode.SCHEMA_MISMATCH, f"a record of {topic.name!r}: {detail}{record}")
