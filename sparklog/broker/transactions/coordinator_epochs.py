"""The newest leader epochs of the transactions' topic that this broker has heard of: who may speak as a coordinator.

A coordinator that was deposed and does not know it yet remembers transactions that its successor has ended. What it
vouches for must not be believed by anyone who has heard of the successor, whichever way: from the controller, by a
marker, or by an answer. A broker becomes leader of a partition by the controller's word, which tells of all
coordinators elected before; who led it earlier got the successor's markers itself. So whoever leads a partition when
an ended transaction's late batch comes has heard of the coordinator that ended it, however many fenced producers it
has forgotten since.
"""

from __future__ import annotations

from sparklog.broker.internal_topics import TRANSACTIONS, partition_of
from sparklog.broker.metadata_cache import MetadataCache
from sparklog.broker.state import BrokerState
from sparklog.errors import BrokerError, ErrorCode
from sparklog.model import NO_EPOCH, TopicPartition


class CoordinatorEpochs:
    """Owner: the broker's event loop."""

    def __init__(self, cache: MetadataCache) -> None:
        self._cache = cache
        #: By partition of the topic, from what coordinators have said.
        self._heard: dict[int, int] = {}

    def heard(self, partition: int, epoch: int) -> None:
        """The leader of ``partition`` in ``epoch`` has said something."""
        if epoch > self._heard.get(partition, NO_EPOCH):
            self._heard[partition] = epoch

    def told(self, partition: int) -> int:
        """Return the epoch that the controller has told of, NO_EPOCH for none."""
        known = self._cache.partition(TopicPartition(TRANSACTIONS, partition))
        return known.state.leader_epoch if known is not None else NO_EPOCH

    def newest(self, partition: int) -> int:
        """NO_EPOCH: nothing is known of it."""
        return max(self.told(partition), self._heard.get(partition, NO_EPOCH))

    def check_told(self, partition: int, epoch: int) -> None:
        """Check what a connection without a proof says: it cannot bring an epoch that the controller has not told of.
        Its sender tries again, and by then the controller has.

        Raises:
            BrokerError: NOT_COORDINATOR.
        """
        told = self.told(partition)
        if epoch > told:
            raise BrokerError(
                ErrorCode.NOT_COORDINATOR,
                f"leader epoch {epoch} of {TRANSACTIONS}-{partition}: the controller has announced {told} so far",
            )


def believe(broker: BrokerState, key: str, epoch: int, *, proved: bool = True) -> None:
    """The coordinator of ``key`` has said something in ``epoch``. Raises BrokerError NOT_COORDINATOR when that is over;
    whoever is the coordinator now is to be asked. ``proved`` false: its connection has no proof."""
    tp = partition_of(broker, TRANSACTIONS, key)
    if tp is None:
        raise BrokerError(ErrorCode.NOT_COORDINATOR, f"{key}: this broker does not know {TRANSACTIONS}")
    if not proved:
        broker.coordinator_epochs.check_told(tp.partition, epoch)
    newest = broker.coordinator_epochs.newest(tp.partition)
    if epoch < newest:
        detail = f"{key}: {tp} has spoken in leader epoch {epoch}, {newest} is known"
        raise BrokerError(ErrorCode.NOT_COORDINATOR, detail)
    broker.coordinator_epochs.heard(tp.partition, epoch)
