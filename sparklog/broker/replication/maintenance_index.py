"""An index of the replicas that have background work.

Retention, sealing, the cleaner and the search for hanging transactions run often, and must not visit all replicas. The
index checks a replica once after a change of its log, role or settings, and keeps the result until the next change. So
ten thousand idle partitions cause no more work than a hundred.
"""

from __future__ import annotations

from collections.abc import Callable

from sparklog.broker.replication.partition import Partition
from sparklog.model import TopicPartition
from sparklog.storage.log_directory import LogDirectory

#: A time later than all others.
_NEVER_US = 2**63


class MaintenanceIndex:
    """An index of the replicas that have work for retention, seals, the cleaner or the search for hanging transactions.

    A part of ``Partitions``. Not thread-safe: use it only on the broker's event loop.
    """

    def __init__(self, directory: LogDirectory, hosted: Callable[[TopicPartition], Partition | None]) -> None:
        self._directory = directory
        self._hosted = hosted
        #: The replicas to check in addition to those whose logs have changed.
        self._changed: set[Partition] = set()
        self._with_backlog: set[Partition] = set()
        self._in_transaction: set[Partition] = set()
        #: For each partition that this broker leads, the earliest time at which retention may find work, in
        #: microseconds since the Unix epoch. No partition is due before ``_first_due_us``.
        self._due_us: dict[Partition, int] = {}
        self._first_due_us = _NEVER_US
        #: For each partition of a compacted topic, the earliest time at which the cleaner may find work, in
        #: microseconds since the Unix epoch.
        self._to_clean: dict[Partition, int] = {}

    def mark_changed(self, partition: Partition) -> None:
        """Record that the partition must be checked again, because its role or settings have changed."""
        self._changed.add(partition)

    def drop(self, partition: Partition) -> None:
        """Remove a partition from the index, because this broker no longer hosts it."""
        self._changed.discard(partition)
        self._with_backlog.discard(partition)
        self._in_transaction.discard(partition)
        self._due_us.pop(partition, None)
        self._to_clean.pop(partition, None)

    def with_backlog(self) -> list[Partition]:
        """Return the partitions that may have segments to seal or schemas to store."""
        self._check_changed()
        self._with_backlog = {partition for partition in self._with_backlog if partition.log.durability.is_behind}
        return list(self._with_backlog)

    def in_transaction(self) -> list[Partition]:
        """Return the partitions with open transactions."""
        self._check_changed()
        return list(self._in_transaction)

    def due(self, now_us: int) -> list[Partition]:
        """Return the partitions led by this broker in which retention may find segments to roll or delete.

        ``now_us`` is the current time in microseconds since the Unix epoch.
        """
        self._check_changed()
        if now_us < self._first_due_us:
            return []
        due = [partition for partition, due_us in self._due_us.items() if due_us <= now_us]
        self._first_due_us = min(self._due_us.values(), default=_NEVER_US)
        return due

    def to_clean(self, now_us: int) -> list[Partition]:
        """Return the partitions of compacted topics in which the cleaner may find something to compact.

        ``now_us`` is the current time in microseconds since the Unix epoch. A partition is returned until
        ``clean_later`` is called for it.
        """
        self._check_changed()
        return [partition for partition, due_us in self._to_clean.items() if due_us <= now_us]

    def clean_later(self, partition: Partition, due_us: int | None) -> None:
        """Make ``to_clean`` skip the partition until ``due_us``, or until its log or settings change.

        If ``due_us`` is None, ``to_clean`` skips the partition until its log or settings change.
        """
        if due_us is None:
            self._to_clean.pop(partition, None)
        elif partition in self._to_clean:
            self._to_clean[partition] = due_us

    def _check_changed(self) -> None:
        changed_logs = map(self._hosted, self._directory.consume_changed())
        changed, self._changed = self._changed.union(filter(None, changed_logs)), set()
        for partition in changed:
            self._check(partition)

    def _check(self, partition: Partition) -> None:
        log = partition.log
        if log.durability.is_behind:
            self._with_backlog.add(partition)
        else:
            self._with_backlog.discard(partition)
        if log.transactions.any_open:
            self._in_transaction.add(partition)
        else:
            self._in_transaction.discard(partition)
        if log.config.compacted:
            self._to_clean[partition] = 0
        else:
            self._to_clean.pop(partition, None)
        due_us = log.retention.due_us() if partition.replica.is_leader else None
        if due_us is None:
            self._due_us.pop(partition, None)
        else:
            self._due_us[partition] = due_us
            self._first_due_us = min(self._first_due_us, due_us)
