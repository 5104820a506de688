"""The newest known leader epochs of the transactions' topic, by which this broker recognizes former coordinators.

A former coordinator that does not know of its successor still has transactions that the successor has ended. A broker
that knows of the successor must not trust it. A broker learns of the successor from the controller, from a marker, or
from a response. A broker becomes leader of a partition by an update of the controller, which also names all
coordinators elected before; and an earlier leader of the partition got the successor's markers itself. So the leader of
a partition that gets a late batch of an ended transaction knows the coordinator that ended it, even after it has
dropped many fenced producers.
"""

from __future__ import annotations

from sparklog.broker.internal_topics import TRANSACTIONS, partition_of
from sparklog.broker.metadata_cache import MetadataCache
from sparklog.errors import BrokerError, ErrorCode
from sparklog.model import NO_EPOCH, TopicPartition


class CoordinatorEpochs:
    """The newest leader epoch of each coordinator. Owner: the broker's event loop."""

    def __init__(self, cache: MetadataCache) -> None:
        self._cache = cache
        #: By partition of the topic, from requests and responses of coordinators.
        self._recorded: dict[int, int] = {}

    def record(self, partition: int, epoch: int) -> None:
        """Record the epoch of a message from the leader of ``partition``."""
        if epoch > self._recorded.get(partition, NO_EPOCH):
            self._recorded[partition] = epoch

    def announced(self, partition: int) -> int:
        """Return the epoch of the controller's last update, NO_EPOCH for none."""
        known = self._cache.partition(TopicPartition(TRANSACTIONS, partition))
        return known.state.leader_epoch if known is not None else NO_EPOCH

    def newest(self, partition: int) -> int:
        """Return the newest known epoch, NO_EPOCH for none."""
        return max(self.announced(partition), self._recorded.get(partition, NO_EPOCH))

    def check_announced(self, partition: int, epoch: int) -> None:
        """Check the epoch of a connection without a proof: the controller's last update must have it or a newer one.

        A sender with a newer epoch retries, and the controller has sent its update by then.

        Raises:
            BrokerError: NOT_COORDINATOR.
        """
        announced = self.announced(partition)
        if epoch > announced:
            raise BrokerError(
                ErrorCode.NOT_COORDINATOR,
                f"leader epoch {epoch} of {TRANSACTIONS}-{partition}: the controller has announced {announced} so far",
            )

    def accept(self, key: str, epoch: int, *, proved: bool = True) -> None:
        """Record the epoch of a message from the coordinator of ``key``; raise if a newer epoch is known.

        ``proved`` false: the connection has no proof.

        Raises:
            BrokerError: NOT_COORDINATOR; the caller must ask the present coordinator.
        """
        tp = partition_of(self._cache, TRANSACTIONS, key)
        if tp is None:
            raise BrokerError(ErrorCode.NOT_COORDINATOR, f"{key}: this broker does not know {TRANSACTIONS}")
        if not proved:
            self.check_announced(tp.partition, epoch)
        newest = self.newest(tp.partition)
        if epoch < newest:
            detail = f"{key}: {tp} has leader epoch {epoch}, {newest} is known"
            raise BrokerError(ErrorCode.NOT_COORDINATOR, detail)
        self.record(tp.partition, epoch)
