"""The newest known leader epochs of the partitions of ``__transaction_state``, to recognize former coordinators.

A former coordinator that does not know of its successor may still list transactions as open that the successor has
ended. A broker that knows of the successor must not trust the former coordinator. A broker learns of the successor from
the controller, from a marker, or from a response. So when a late batch of an ended transaction arrives, the leader of
the partition knows the coordinator that ended the transaction. Either this leader got the coordinator's marker itself,
or it became leader later, by an update of the controller that also names all coordinators elected before. The leader
knows the coordinator even if it no longer remembers the fenced producer.
"""

from __future__ import annotations

from sparklog.broker.internal_topics import TRANSACTIONS, partition_of
from sparklog.broker.metadata_cache import MetadataCache
from sparklog.errors import BrokerError, ErrorCode
from sparklog.model import NO_EPOCH, TopicPartition


class CoordinatorEpochs:
    """A record of the newest known leader epoch of each transaction coordinator.

    Not thread-safe: use it only on the broker's event loop.
    """

    def __init__(self, cache: MetadataCache) -> None:
        self._cache = cache
        #: The epochs from requests and responses of coordinators, by partition of ``__transaction_state``.
        self._recorded: dict[int, int] = {}

    def record(self, partition: int, epoch: int) -> None:
        """Store the leader epoch that a message from the leader of ``partition`` contains."""
        if epoch > self._recorded.get(partition, NO_EPOCH):
            self._recorded[partition] = epoch

    def announced(self, partition: int) -> int:
        """Return the partition's leader epoch from the controller's last update; NO_EPOCH if there is none."""
        known = self._cache.partition(TopicPartition(TRANSACTIONS, partition))
        return known.state.leader_epoch if known is not None else NO_EPOCH

    def newest(self, partition: int) -> int:
        """Return the partition's newest known leader epoch; NO_EPOCH if there is none."""
        return max(self.announced(partition), self._recorded.get(partition, NO_EPOCH))

    def check_announced(self, partition: int, epoch: int) -> None:
        """Check a leader epoch that came from a sender that has not proved its identity.

        The epoch must not be newer than the one in the controller's last update. An honest sender retries until this
        broker has received the update.

        Raises:
            BrokerError: NOT_COORDINATOR if the epoch is newer.
        """
        announced = self.announced(partition)
        if epoch > announced:
            raise BrokerError(
                ErrorCode.NOT_COORDINATOR,
                f"leader epoch {epoch} of {TRANSACTIONS}-{partition}: the controller has announced {announced} so far",
            )

    def accept(self, key: str, epoch: int, *, proved: bool = True) -> None:
        """Store the leader epoch that a message from the coordinator of ``key`` contains, unless a newer one is known.

        A key is a transactional id or the name of a sink. ``proved`` is whether the sender has proved that it is a
        broker.

        Raises:
            BrokerError: NOT_COORDINATOR if a newer epoch is known, or this broker must not trust the epoch yet. The
                caller must ask the present coordinator.
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
