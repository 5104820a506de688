"""The producers whose transaction has been decided (committed or aborted), so that their late batches must be refused.

The markers may not be written yet. A broker remembers only the newest of these producers, up to a limit.
"""

from __future__ import annotations

from collections import OrderedDict

from sparklog.model import TopicPartition

#: The most fenced producers that a broker remembers.
_FENCED_KEPT = 100_000


class FencedProducers:
    """A set of the fenced producers of the partitions that this broker leads.

    Not thread-safe: use it only on the broker's event loop.
    """

    def __init__(self) -> None:
        #: The oldest come first. This is not a plain dict, because a plain dict finds its first key more slowly after
        #: many removals.
        self._fenced: OrderedDict[tuple[TopicPartition, int], None] = OrderedDict()

    def add(self, tp: TopicPartition, producer_id: int) -> None:
        self._fenced[tp, producer_id] = None
        if len(self._fenced) > _FENCED_KEPT:
            self._fenced.popitem(last=False)

    def has(self, tp: TopicPartition, producer_id: int) -> bool:
        """Return whether the producer's transaction is known to be decided (committed or aborted).

        Then no more batches of the transaction may be appended, even if the marker is not written yet.
        """
        return (tp, producer_id) in self._fenced
