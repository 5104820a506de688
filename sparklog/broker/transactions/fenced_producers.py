"""The producers whose transaction's end is decided, so that no batch of them may come any more.

Their markers may not be written yet. A broker remembers a bounded number of them, the newest.
"""

from __future__ import annotations

from collections import OrderedDict

from sparklog.model import TopicPartition

#: The most fenced producers that a broker remembers.
_FENCED_KEPT = 100_000


class FencedProducers:
    """The fenced producers of the partitions that this broker leads. Owner: the broker's event loop."""

    def __init__(self) -> None:
        #: The oldest first. A dict takes longer to find its first key the more keys were removed before it.
        self._fenced: OrderedDict[tuple[TopicPartition, int], None] = OrderedDict()

    def add(self, tp: TopicPartition, producer_id: int) -> None:
        self._fenced[tp, producer_id] = None
        if len(self._fenced) > _FENCED_KEPT:
            self._fenced.popitem(last=False)

    def has(self, tp: TopicPartition, producer_id: int) -> bool:
        """Return whether the end of the producer's transaction is known to be decided.

        Its marker may not be written yet, but no batch may come before it any more.
        """
        return (tp, producer_id) in self._fenced
