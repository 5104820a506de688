"""The buffer of a producer, which collects single records into chunks and limits the memory of all unsent data.

``send`` appends to plain lists under one lock. The I/O thread builds the Arrow arrays once per chunk.

A record waits for more records only while earlier records of its topic are in flight. The wait is half of the current
round trip, and at most ``linger_ms``. So an idle producer sends at once, and a producer under load builds larger
batches without configuration.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable

from sparklog.client.errors import BufferFull, ProducerClosed, closed_for
from sparklog.client.producer.partitioning import ProducerTopic
from sparklog.client.producer.record_chunk import IoThread, Record, RecordChunk
from sparklog.client.producer.record_future import RecordFuture

#: The memory that a record uses besides its bytes: list slots, the future and Arrow's offsets.
RECORD_OVERHEAD_BYTES = 64


class RecordBuffer:
    """The buffer of one producer: it groups records into chunks, and limits the unacknowledged bytes. Thread-safe."""

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
        #: The number of threads that wait for room in the buffer.
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
        """Return whether the buffer has no chunk.

        If another thread adds a chunk at the same time, that thread wakes the I/O thread afterwards.
        """
        return not self._open and not self._full

    def append(self, topic: ProducerTopic, partition: int | None, *, record: Record, size: int) -> RecordFuture:
        """Accept one record, after a wait for room if necessary. Raises BufferFull or ProducerClosed."""
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
                # No call comes between the chunk's lookup and this one. An interrupt can arrive only after a call, so
                # it cannot leave an empty chunk.
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
            self._wake()  # no other thread would send a record that an interrupted thread has added
            raise
        return RecordFuture(chunk, index)

    def _new_chunk(self, topic: ProducerTopic, partition: int | None) -> RecordChunk:
        chunk = RecordChunk(topic, partition, time.monotonic() * 1000, self._io_thread)
        try:
            self._opened(chunk)
        except BaseException:
            chunk.finished.end()  # after an interrupt the chunk is not used, and no thread may wait for it
            raise
        return chunk

    def reserve(self, size: int) -> None:
        """Reserve room for a batch of a table, after a wait if necessary. Raises BufferFull or ProducerClosed."""
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

        The result has the full chunks, the chunks of topics without other batches in the producer, and the chunks that
        have waited for ``effective_linger_ms`` or ``linger_ms``, whichever is less. ``busy`` returns whether a topic
        has other batches.
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
        """Return the time at which the oldest open chunk has waited long enough, or None if no chunk is open."""
        if not self._open:
            return None
        with self._lock:
            oldest_ms = min((chunk.created_ms for chunk in self._open.values()), default=0.0)
        return oldest_ms + min(self._linger_ms, effective_linger_ms)

    def seal(self) -> None:
        """Make all open chunks ready to be sent, without further waiting."""
        with self._lock:
            self._seal_all()
        self._wake()

    def close(self, error: ProducerClosed | BaseException) -> list[RecordChunk]:
        """Refuse further records, and return the chunks that were not consumed.

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
        """Move an open chunk to the full chunks. The caller holds the lock.

        There is no call between the two steps, because an interrupt there would lose or duplicate the chunk.
        """
        chunk = self._open[slot]
        del self._open[slot]
        self._full.append(chunk)

    def _wait_for_room(self, size: int) -> None:
        """Wait until there is room for ``size`` bytes. The caller holds the lock.

        An empty buffer has room for a record of any size.
        """
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
