"""A cache of the newest batches of Kafka producers, for Kafka consumers at the end of a partition.

It has each batch as the producer has sent it. A consumer gets these bytes, still compressed, with the base offset and
leader epoch of the log. So the broker need not decode and encode the records.

The cache finds a batch by its place in the log and by the checksum of its stored bytes. So a batch that a truncation or
the cleaner has replaced does not match. The cache has no batches of topics with timestamp type LogAppendTime.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import NamedTuple

from sparklog.broker.replication.partition import Partition
from sparklog.kafka.records.batch_view import BatchView
from sparklog.record.header import BatchHeader

_ZSTD = 4
#: The approximate overhead of a batch, in bytes.
_OVERHEAD = 400
#: The cache keeps a batch in the memory of its request if at most 1/8 of the batch's size would be unused memory.
#: Otherwise it copies the batch.
_MOST_UNUSED = 8

#: A topic id and a partition.
_Place = tuple[str, int]


class _SentBatch(NamedTuple):
    body_crc: int
    data: memoryview
    codec: int
    #: The bytes that the batch keeps in memory, which may be more than those of ``data``.
    size_bytes: int


class SentBatches:
    """A cache of the newest batches of Kafka producers, with a limit of bytes for all partitions of a broker.

    Not thread-safe: use it only on the broker's event loop.
    """

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self.size_bytes = 0
        #: The batches by place and base offset, the oldest first.
        self._batches: OrderedDict[tuple[_Place, int], _SentBatch] = OrderedDict()
        self._offsets: dict[_Place, set[int]] = {}

    def add(self, partition: Partition, body_crc: int, base_offset: int, view: BatchView) -> None:
        """Add a batch that was appended at ``base_offset``. ``body_crc`` is the checksum of its stored bytes.

        Remove the oldest batches while the limit is exceeded. A batch that alone exceeds the limit is not added.

        The batch must be new in the log: do not add a retry. The content of a retry may differ from the batch in the
        log although the checksums are equal.
        """
        key = ((partition.topic_id, partition.tp.partition), base_offset)
        if key in self._batches:
            self._remove(key)
        data = view.data
        # The view keeps the memory of the whole request, which may be much larger than the batch.
        size = memoryview(data.obj).nbytes
        if size > len(data) + len(data) // _MOST_UNUSED:
            data, size = memoryview(bytes(data)), len(data)
        if size + _OVERHEAD > self.limit_bytes:
            return
        self._batches[key] = _SentBatch(body_crc, data, view.codec, size + _OVERHEAD)
        self._offsets.setdefault(key[0], set()).add(base_offset)
        self.size_bytes += size + _OVERHEAD
        while self.size_bytes > self.limit_bytes:
            self._remove(next(iter(self._batches)))

    def get(self, partition: Partition, header: BatchHeader, *, zstd: bool) -> memoryview | None:
        """Return the batch as its producer has sent it, or None if the consumer cannot get these bytes.

        ``header`` is the batch's header in the log. If ``zstd`` is false, the consumer cannot decompress zstd.
        """
        found = self._batches.get(((partition.topic_id, partition.tp.partition), header.base_offset))
        if found is None or found.body_crc != header.body_crc or (found.codec == _ZSTD and not zstd):
            return None
        return found.data if not partition.rules.stamped_by_log else None

    def drop(self, partition: Partition) -> None:
        """Remove the batches of a partition whose role has changed, because its log may have been truncated."""
        place = (partition.topic_id, partition.tp.partition)
        for offset in tuple(self._offsets.get(place, ())):
            self._remove((place, offset))

    def _remove(self, key: tuple[_Place, int]) -> None:
        self.size_bytes -= self._batches.pop(key).size_bytes
        place, offset = key
        offsets = self._offsets[place]
        offsets.remove(offset)
        if not offsets:
            del self._offsets[place]
