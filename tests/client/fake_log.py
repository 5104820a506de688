"""Topics of a fake cluster, and one log for each partition, in lists."""

from __future__ import annotations

import time

import pyarrow as pa

from sparklog.model import TopicSchema
from sparklog.record.header import BatchHeader
from sparklog.record.marker import Marker
from sparklog.record.schema import DEFAULT_SCHEMA, schema_message
from sparklog.storage.producers import ProducerTable, check_sequence


class FakeLog:
    """One partition: its batches as (header, body)."""

    def __init__(self) -> None:
        self.leader = 0
        self.epoch = 0
        self.batches: list[tuple[BatchHeader, bytes]] = []
        self.producers = ProducerTable()
        self.start = 0

    @property
    def end(self) -> int:
        return self.batches[-1][0].next_offset if self.batches else self.start

    def append(self, header: BatchHeader, body: bytes) -> int:
        if header.producer_id >= 0:
            earlier = check_sequence(self.producers.get(header.producer_id), header)
            if earlier is not None:
                return earlier.start
        stored = header._replace(
            base_offset=self.end, leader_epoch=self.epoch, append_time=time.time_ns() // 1000, running_max=0
        )
        self.batches.append((stored, body))
        self.producers.record(stored)
        return stored.base_offset

    def mark(self, header: BatchHeader, body: bytes, marker: Marker) -> None:
        """Append the end of transactions. A producer without an open one is ignored."""
        if any(found in self.producers.transactions for found, _ in (*marker.committed, *marker.aborted)):
            # Bodies are padded to their stored size.
            stored = header._replace(base_offset=self.end, leader_epoch=self.epoch)
            self.batches.append((stored, body.ljust(stored.stored_bytes, b"\0")))
            self.producers.record(stored, marker)

    def readable_end(self, isolation: int) -> int:
        return self.producers.transactions.last_stable_offset(self.end) if isolation else self.end


class FakeTopic:
    def __init__(self, name: str, topic_id: str, partitions: int, schema: pa.Schema, key: tuple[str, ...]) -> None:
        self.name = name
        self.topic_id = topic_id
        self.logs = [FakeLog() for _ in range(partitions)]
        self.schemas = [TopicSchema(0, schema_message(schema))]
        self.key = key
        self.event_time = "timestamp" if schema.equals(DEFAULT_SCHEMA) else None
        self.config: dict[str, str] = {}
