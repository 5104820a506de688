"""The producers whose transaction has been decided (committed or aborted), so that their late batches must be refused.

The markers may not be written yet. A broker remembers only the newest of these producers, up to a limit.

The producer id of a Kafka producer serves many transactions. After the coordinator has confirmed the next transaction,
the producer is no longer fenced. From then on, a repeated marker of an earlier transaction must not end the next
transaction. The leader recognizes such a marker by its decision number: the coordinator numbers the commits and aborts
of each transactional id.
"""

from __future__ import annotations

from collections import OrderedDict

from sparklog.model import TopicPartition

#: The maximum number of fenced producers that a broker remembers, and the most Kafka producers whose next transaction
#: has begun.
_FENCED_KEPT = 100_000

_Places = OrderedDict[tuple[TopicPartition, int], int]


class FencedProducers:
    """A set of the fenced producers of the partitions that this broker leads.

    Not thread-safe: use it only on the broker's event loop.
    """

    def __init__(self) -> None:
        #: The number of the decision that fences each producer. The oldest come first. This is not a plain dict,
        #: because a plain dict finds its first key more slowly after many removals.
        self._fenced: _Places = OrderedDict()
        #: The number of the last decision before the transaction that a Kafka producer has begun.
        self._begun: _Places = OrderedDict()

    def add(self, tp: TopicPartition, producer_id: int, decision: int = -1) -> bool:
        """Fence a producer, because its transaction was committed or aborted.

        ``decision`` is the coordinator's number of this commit or abort, or -1 if it has no number. Return False if
        the same decision has fenced the producer before.
        """
        before = self._fenced.get((tp, producer_id))
        _keep(self._fenced, tp, producer_id, decision)
        return before is None or decision < 0 or before != decision

    def has(self, tp: TopicPartition, producer_id: int) -> bool:
        """Return whether the producer's transaction is known to be decided (committed or aborted).

        Then no more batches of the transaction may be appended, even if the marker is not written yet.
        """
        return (tp, producer_id) in self._fenced

    def begin(self, tp: TopicPartition, producer_id: int, decision: int) -> None:
        """Record that the coordinator has confirmed a transaction of a Kafka producer.

        ``decision`` is the coordinator's number of the last commit or abort before this transaction.
        """
        self._fenced.pop((tp, producer_id), None)
        _keep(self._begun, tp, producer_id, decision)

    def is_over(self, tp: TopicPartition, producer_id: int, decision: int) -> bool:
        """Return whether a decision ended an earlier transaction than the producer's newest one.

        ``decision`` is the coordinator's number of a commit or an abort.
        """
        return 0 <= decision <= self._begun.get((tp, producer_id), -1)


def _keep(places: _Places, tp: TopicPartition, producer_id: int, decision: int) -> None:
    places[tp, producer_id] = decision
    if len(places) > _FENCED_KEPT:
        places.popitem(last=False)
