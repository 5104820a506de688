"""The buffer of single records, which collects them into batches and limits their memory.

``send`` appends to plain lists under one lock. The I/O thread builds the Arrow arrays once per chunk. A chunk has a
partition only if its records name one: otherwise the I/O thread hashes all keys of the chunk at once when it encodes
the chunk.

A record waits for more records only while earlier records of its topic are in flight. It waits for half of the current
round trip, and at most ``linger_ms``. So an idle producer sends at once, and a producer under load builds larger
batches without configuration.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, TypeAlias

import numpy as np
import pyarrow as pa

from sparklog.client.errors import BufferFull, ProducerClosed, closed_for
from sparklog.client.producer.futures import (
    BatchOutcome,
    CompletionLatch,
    RecordFuture,
    RecordMetadata,
    abandon_listener,
    notify,
)
from sparklog.client.producer.partitioning import ProducerTopic, Rows
from sparklog.errors import BrokerError, ErrorCode
from sparklog.record.rows import ValueRefusedError
from sparklog.record.schema import DEFAULT_SCHEMA

#: The memory that a record uses besides its bytes: list slots, the future and Arrow's offsets.
RECORD_OVERHEAD_BYTES = 64
#: The number of characters of a refused record that its error shows.
_RECORD_SHOWN = 200

_DEFAULT_TYPES = [DEFAULT_SCHEMA.field(name).type for name in ("key", "value", "headers", "timestamp")]

Header: TypeAlias = "dict[str, str | bytes | None]"
#: The number of a record, and the callback that receives its outcome.
_Listener: TypeAlias = "tuple[int, Callable[[RecordMetadata | BaseException], None]]"
#: Key, value, headers, timestamp in microseconds.
Record: TypeAlias = "tuple[bytes | str | None, Any, list[Header] | None, int]"


class IoThread(Protocol):
    """The sender as its chunks see it: it sends chunks and reports their outcomes. Any thread may call it."""

    def wake(self) -> None:
        """Make the I/O thread check for new work."""

    def on_chunk_opened(self) -> None:
        """Handle a new chunk that has a record."""

    def wait_helping(self, finished: Callable[[], bool]) -> None:
        """Drive the loop in the calling thread, which waits until ``finished`` and does nothing else."""

    def recall_loop(self) -> None:
        """Return a lent loop to the I/O thread, because a caller waits in a way that does not drive it."""

    def on_io_thread(self) -> bool:
        """Return whether the calling thread is the one that frees room by sending chunks."""


class RecordChunk:
    """Records of one topic that are encoded together. Appends need the buffer's lock. A sealed chunk is only read."""

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
        #: One tuple per record. They become columns when the chunk is encoded, so that ``send`` does a single append.
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
        """Return the records with these numbers as one batch of the topic's schema.

        Raises:
            BrokerError: SCHEMA_MISMATCH if a record does not fit the schema.
        """
        records = self.records if len(rows) == len(self) else [self.records[row] for row in rows]
        return _default_batch(records) if topic.is_default else _typed_batch(topic, [record[1] for record in records])

    def refuse(self, row: int, error: BaseException) -> None:
        """Refuse one record, which is not sent. Call it before ``assign_batches`` and ``fail``."""
        self._refused[row] = error
        self._failure = self._failure or error

    # --- outcomes ---

    def assign_batches(self, rows_of_batches: Sequence[Rows | Sequence[int]]) -> None:
        """Record which rows went into which batch, in the order of the batches. Rows of a batch ascend.

        Call it once, before any ``batch_done``.
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
        """Fail the records that have no outcome so far. Idempotent."""
        self._failure = self._failure or error
        self._all_failed = self._all_failed or error
        self._notify(ended=True)

    def abandon(self, error: BaseException) -> None:
        """End all waits in a forked child, as ``Completion.abandon``."""
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
        """Return the outcome of one record, or None while it is open."""
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
        """Notify these listeners, the first ones of the list.

        They leave the list after all have been notified. If an interrupt stops this function, ``fail`` finds and
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
    except Exception as error:  # from a value whose own methods fail
        detail = repr(error)
    # The caller splits a chunk of several records until the record that does not fit is alone.
    record = f"; the record is {repr(rows[0])[:_RECORD_SHOWN]}" if len(rows) == 1 else ""
    raise BrokerError(ErrorCode.SCHEMA_MISMATCH, f"a record of {topic.name!r}: {detail}{record}")


class RecordBuffer:
    """Open chunks and the used bytes of one producer. Any thread may call every method."""

    def __init__(
        self,
        *,
        batch_bytes: int,
        linger_ms: float,
        buffer_bytes: int,
        max_block_s: float,
        io_thread: IoThread,
        opened: Callable[[RecordChunk], None],
    ) -> None:
        """Create the buffer. It calls ``opened`` with every new chunk."""
        self._batch_bytes = batch_bytes
        self._linger_ms = linger_ms
        self._buffer_bytes = buffer_bytes
        self._max_block_s = max_block_s
        self._io_thread = io_thread
        self._wake = io_thread.wake
        self._opened = opened
        self._lock = threading.Lock()
        self._room = threading.Condition(self._lock)
        #: The number of threads that wait for room.
        self._blocked = 0
        self._used = 0
        self._closed: BaseException | None = None
        self._open: dict[tuple[str, int | None], RecordChunk] = {}
        self._full: deque[RecordChunk] = deque()

    @property
    def used_bytes(self) -> int:
        return self._used

    @property
    def empty(self) -> bool:
        """Return whether there is no chunk. A thread that is adding one calls ``wake`` or ``on_chunk_opened`` next."""
        return not self._open and not self._full

    def append(self, topic: ProducerTopic, partition: int | None, *, record: Record, size: int) -> RecordFuture:
        """Accept one record. Raises BufferFull or ProducerClosed."""
        size += RECORD_OVERHEAD_BYTES
        slot = (topic.name, partition)
        opened = full = False
        try:
            with self._lock:
                if self._closed is not None or self._used + size > self._buffer_bytes:
                    self._wait_for_room(size)
                chunk = self._open.get(slot)
                if chunk is None:
                    chunk = self._open[slot] = self._new_chunk(topic, partition)
                    opened = True
                chunk.size += size
                self._used += size
                records = chunk.records
                # the first call since the chunk's lookup: an interrupt arrives after a call, and would leave the chunk
                # empty
                records.append(record)
                index = len(records) - 1
                if chunk.size >= self._batch_bytes:
                    self._seal(slot)
                    full = True
            if full:
                self._wake()
            elif opened:
                self._io_thread.on_chunk_opened()
        except BaseException:
            self._wake()  # an interrupted thread may have left a record that no other thread would send
            raise
        return RecordFuture(chunk, index)

    def _new_chunk(self, topic: ProducerTopic, partition: int | None) -> RecordChunk:
        chunk = RecordChunk(topic, partition, time.monotonic() * 1000, self._io_thread)
        try:
            self._opened(chunk)
        except BaseException:
            chunk.finished.end()  # an interrupt: the chunk is not used, and no thread may wait for it
            raise
        return chunk

    def reserve(self, size: int) -> None:
        """Reserve room for a batch of a table. Raises BufferFull or ProducerClosed."""
        with self._lock:
            if self._closed is not None or self._used + size > self._buffer_bytes:
                self._wait_for_room(size)
            self._used += size

    def release(self, size: int) -> None:
        with self._lock:
            self._used -= size
            if self._blocked:
                self._room.notify_all()

    def consume_due(self, now_ms: float, busy: Callable[[str], bool], effective_linger_ms: float) -> list[RecordChunk]:
        """Remove and return the chunks to send now.

        These are the full ones, those whose topic has nothing in flight, and those older than the lesser of
        ``effective_linger_ms`` and the linger.
        """
        if not self._open and not self._full:
            return []
        wait_ms = min(self._linger_ms, effective_linger_ms)
        with self._lock:
            due = list(self._full)
            self._full.clear()
            opened_before = now_ms - wait_ms
            ready = [
                slot for slot, chunk in self._open.items() if chunk.created_ms <= opened_before or not busy(slot[0])
            ]
            due += [self._open.pop(slot) for slot in ready]
        return due

    def next_due_ms(self, effective_linger_ms: float) -> float | None:
        """Return when the oldest open chunk has waited long enough, or None."""
        if not self._open:
            return None
        with self._lock:
            oldest_ms = min((chunk.created_ms for chunk in self._open.values()), default=0.0)
        return oldest_ms + min(self._linger_ms, effective_linger_ms)

    def seal(self) -> None:
        """Make all open chunks due, without further linger."""
        with self._lock:
            self._seal_all()
        self._wake()

    def close(self, error: ProducerClosed | BaseException) -> list[RecordChunk]:
        """Refuse further records, and return the chunks that were not sent.

        Threads that wait for room raise ``error``.
        """
        with self._room:
            self._closed = self._closed or error
            left = [*self._full, *self._open.values()]
            self._full.clear()
            self._open.clear()
            self._room.notify_all()
        return left

    def _seal_all(self) -> None:
        for slot in tuple(self._open):
            self._seal(slot)

    def _seal(self, slot: tuple[str, int | None]) -> None:
        """Move a chunk to the full ones. The caller holds the lock.

        There is no call between the two steps: an interrupt there would lose or duplicate the chunk.
        """
        chunk = self._open[slot]
        del self._open[slot]
        self._full.append(chunk)

    def _wait_for_room(self, size: int) -> None:
        """Wait until there is room. The caller holds the lock. An empty buffer has room for a record of any size."""
        deadline = time.monotonic() + self._max_block_s
        while True:
            if self._closed is not None:
                raise closed_for(self._closed)
            if not self._used or self._used + size <= self._buffer_bytes or self._io_thread.on_io_thread():
                return  # the I/O thread must not wait for itself when a future's callback writes
            left = deadline - time.monotonic()
            if left <= 0:
                raise BufferFull(
                    f"producer's buffer: {self._used} of {self._buffer_bytes} bytes in use for {self._max_block_s:g} s,"
                    f" no room for {size}"
                )
            self._seal_all()
            self._wake()
            self._blocked += 1
            try:
                self._room.wait(left)
            finally:
                self._blocked -= 1


def header_list(headers: Mapping[str, str | bytes | None] | Sequence[tuple[str, str | bytes | None]]) -> list[Header]:
    """Return headers in the form that Arrow accepts.

    Raises:
        TypeError: a name that is not text, or a value that is not bytes, text or None.
        ValueError: text that is not valid Unicode.
    """
    pairs = headers.items() if isinstance(headers, Mapping) else headers
    found: list[Header] = []
    for name, value in pairs:
        if not isinstance(name, str) or not (value is None or isinstance(value, (str, bytes))):
            raise TypeError(f"header {name!r}: {value!r}; expected text, and bytes, text or None")
        utf8("header", name)
        found.append({"key": name, "value": utf8(f"header {name!r}", value) if isinstance(value, str) else value})
    return found


def utf8(what: str, text: str) -> bytes:
    """Return text as UTF-8. Raise ValueError for a lone surrogate, which UTF-8 cannot encode."""
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"{what}: no Unicode text, {error.reason} at {error.start}") from None
