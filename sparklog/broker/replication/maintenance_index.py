"""Which replicas background work has something to do with: noticed as logs change and as time passes.

Nobody goes through all replicas for that, however often retention, seals and hanging transactions are looked after: a
replica is looked at once after it has changed, and what is found is kept until it changes again. So a broker whose
partitions are idle does the same with ten thousand of them as with a hundred.
"""

from __future__ import annotations

from collections.abc import Callable

from sparklog.broker.replication.partition import Partition
from sparklog.model import TopicPartition
from sparklog.storage.log_directory import LogDirectory

#: Later than any time.
_NEVER_US = 2**63


class MaintenanceIndex:
    """Owner: ``Partitions``, on the broker's event loop."""

    def __init__(self, directory: LogDirectory, hosted: Callable[[TopicPartition], Partition | None]) -> None:
        self._directory = directory
        self._hosted = hosted
        #: To be looked at, beside those whose logs have changed.
        self._to_look: set[Partition] = set()
        self._behind: set[Partition] = set()
        self._in_transaction: set[Partition] = set()
        #: When retention may first find something, of those led here; us since the epoch. None of them is due before
        #: ``_first_due_us``.
        self._due_us: dict[Partition, int] = {}
        self._first_due_us = _NEVER_US
        #: When the cleaner may first find something, of those of compacted topics; us since the epoch.
        self._to_clean: dict[Partition, int] = {}

    def look_at(self, partition: Partition) -> None:
        """Its role or its settings are others than they were."""
        self._to_look.add(partition)

    def forget(self, partition: Partition) -> None:
        """It is not hosted any more."""
        self._to_look.discard(partition)
        self._behind.discard(partition)
        self._in_transaction.discard(partition)
        self._due_us.pop(partition, None)
        self._to_clean.pop(partition, None)

    def behind(self) -> list[Partition]:
        """Those with segments to seal or schemas to store, whatever has kept that from being done."""
        self._look()
        self._behind = {partition for partition in self._behind if partition.log.durability.is_behind}
        return list(self._behind)

    def in_transaction(self) -> list[Partition]:
        """Those with open transactions."""
        self._look()
        return list(self._in_transaction)

    def due(self, now_us: int) -> list[Partition]:
        """Those led here in which retention may find something to end or to delete, at ``now_us`` since the epoch."""
        self._look()
        if now_us < self._first_due_us:
            return []
        due = [partition for partition, due_us in self._due_us.items() if due_us <= now_us]
        self._first_due_us = min(self._due_us.values(), default=_NEVER_US)
        return due

    def to_clean(self, now_us: int) -> list[Partition]:
        """Those of compacted topics in which the cleaner may find something at ``now_us`` since the epoch: each until
        it was told ``clean_later``."""
        self._look()
        return [partition for partition, due_us in self._to_clean.items() if due_us <= now_us]

    def clean_later(self, partition: Partition, due_us: int | None) -> None:
        """Nothing is to be cleaned before ``due_us``, None: ever, while the log and its settings stay as they are."""
        if due_us is None:
            self._to_clean.pop(partition, None)
        elif partition in self._to_clean:
            self._to_clean[partition] = due_us

    def _look(self) -> None:
        changed = map(self._hosted, self._directory.take_changed())
        to_look, self._to_look = self._to_look.union(filter(None, changed)), set()
        for partition in to_look:
            self._look_at(partition)

    def _look_at(self, partition: Partition) -> None:
        log = partition.log
        if log.durability.is_behind:
            self._behind.add(partition)
        else:
            self._behind.discard(partition)
        if log.in_transaction:
            self._in_transaction.add(partition)
        else:
            self._in_transaction.discard(partition)
        if log.config.compacted:
            self._to_clean[partition] = 0
        else:
            self._to_clean.pop(partition, None)
        due_us = log.retention_due_us() if partition.replica.is_leader else None
        if due_us is None:
            self._due_us.pop(partition, None)
        else:
            self._due_us[partition] = due_us
            self._first_due_us = min(self._first_due_us, due_us)
