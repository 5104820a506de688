"""Counters of the batches and bytes that a consumer or reader has read."""

from __future__ import annotations

from dataclasses import dataclass

from sparklog.client.consumer.fetched_batches import FetchedBatch, PartitionBytes
from sparklog.record.header import Flag


@dataclass(slots=True)
class ReadCounters:
    """Counters of what one consumer or reader has read. Sizes are the sizes of batch bodies, without headers."""

    #: The number of partitions in the responses to fetches.
    fetches: int = 0
    #: The bytes that were fetched.
    fetched_bytes: int = 0
    #: The batches that were fetched.
    fetched_batches: int = 0
    #: The size of the fetched batches in the log. This size exceeds ``fetched_bytes`` if only some columns were sent.
    stored_bytes: int = 0
    #: The fetched batches of which only some columns were sent.
    projected_batches: int = 0
    #: The batches that were fetched from a follower.
    follower_batches: int = 0
    #: The batches that were decoded.
    decoded_batches: int = 0
    #: The batches that were read from files on this host and not fetched.
    local_batches: int = 0
    #: The bytes that were read from files on this host.
    local_bytes: int = 0
    #: The number of times that the reader could no longer read files on this host, and began to fetch.
    local_fallbacks: int = 0
    #: The number of times that a broker demanded a wait because a quota was exceeded, and the sum of the waits.
    quota_waits: int = 0
    quota_waited_ms: int = 0

    def count(self, answer: PartitionBytes) -> None:
        """Count the fetched batches of one partition of a response."""
        self.fetches += 1
        self.fetched_batches += len(answer.headers)
        self.fetched_bytes += len(answer.bodies)
        self.stored_bytes += answer.answer.stored_bytes or len(answer.bodies)
        self.projected_batches += sum(1 for header in answer.headers if header.flags & Flag.PROJECTED)

    def count_local(self, answer: PartitionBytes) -> None:
        """Count batches that were read from files on this host."""
        self.local_batches += len(answer.headers)

    def count_decoded(self, batch: FetchedBatch, *, mapped: bool) -> None:
        """Count a decoded batch. ``mapped``: the batch is from a memory-mapped file on this host."""
        self.decoded_batches += 1
        if mapped:
            self.local_bytes += batch.read_bytes
