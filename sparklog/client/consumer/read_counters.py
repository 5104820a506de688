"""The counters of a reader."""

from __future__ import annotations

from dataclasses import dataclass

from sparklog.client.consumer.fetched_batches import FetchedBatch, PartitionBytes
from sparklog.record.header import Flag


@dataclass(slots=True)
class ReadCounters:
    """Counters per response and partition. Bytes are those of batch bodies."""

    #: Responses to fetches.
    fetches: int = 0
    #: Bytes that were fetched.
    fetched_bytes: int = 0
    #: Batches that were fetched.
    fetched_batches: int = 0
    #: The size of the fetched batches in the log: more than was fetched if only some columns were sent.
    stored_bytes: int = 0
    #: Fetched batches of which only some columns were sent.
    projected_batches: int = 0
    #: Batches fetched from a follower that is nearer than the leader.
    follower_batches: int = 0
    #: Batches that were decoded.
    decoded_batches: int = 0
    #: Batches read from files of this host instead of fetches.
    local_batches: int = 0
    #: Bytes of those batches that were read.
    local_bytes: int = 0
    #: The number of times that a reader fell back from files to fetches.
    local_fallbacks: int = 0

    def count(self, answer: PartitionBytes) -> None:
        """Count the batches of a response."""
        self.fetches += 1
        self.fetched_batches += len(answer.headers)
        self.fetched_bytes += len(answer.bodies)
        self.stored_bytes += answer.answer.stored_bytes or len(answer.bodies)
        self.projected_batches += sum(1 for header in answer.headers if header.flags & Flag.PROJECTED)

    def count_local(self, answer: PartitionBytes) -> None:
        """Count batches from mapped files."""
        self.local_batches += len(answer.headers)

    def count_decoded(self, batch: FetchedBatch, *, mapped: bool) -> None:
        """Count a batch that was decoded. ``mapped``: from a mapped file."""
        self.decoded_batches += 1
        if mapped:
            self.local_bytes += batch.read_bytes
