"""The effects of a partition that other parts of the broker perform: ZooKeeper, fetchers, maintenance and timers."""

from __future__ import annotations

import logging
from collections.abc import Callable

from sparklog.broker.context import BrokerContext
from sparklog.broker.lifecycle.zk_registration import ZkRegistration
from sparklog.broker.replication.fetcher import Fetchers
from sparklog.broker.replication.log_maintenance import LogMaintenance
from sparklog.broker.replication.partition import OnLogFailed, Partition
from sparklog.broker.replication.partitions import Partitions
from sparklog.broker.requests.fetch import Fetches
from sparklog.broker.transactions.coordinator_registry import Coordinators
from sparklog.replica.effects import RefuseTruncation, WriteIsr
from sparklog.storage.truncation_job import TruncationJob

_log = logging.getLogger(__name__)


class PartitionEffects:
    """The implementation of ``PartitionHost``, which all partitions of a broker process share.

    It passes the effects of the replicas to the other parts of the broker. Not thread-safe: use it only on the broker's
    event loop.
    """

    def __init__(
        self,
        context: BrokerContext,
        partitions: Partitions,
        *,
        registry: ZkRegistration,
        fetchers: Fetchers,
        fetches: Fetches,
        log_maintenance: LogMaintenance,
        coordinators: Coordinators,
        log_failed: OnLogFailed,
    ) -> None:
        self._context = context
        self._partitions = partitions
        self._registry = registry
        self._fetchers = fetchers
        self._fetches = fetches
        self._log_maintenance = log_maintenance
        self._coordinators = coordinators
        self._log_failed = log_failed
        #: The ISR writes that were postponed because the cluster was stopping. They are performed if this broker
        #: continues to serve.
        self._postponed: list[Callable[[], None]] = []
        #: Called with each partition whose role or leader epoch has changed.
        self.role_listeners: list[Callable[[Partition], None]] = []
        self.now_ms = context.now_ms
        self.log_end_moved = fetches.log_end_moved

    def perform_postponed(self) -> None:
        """Perform the ISR writes that were postponed while the cluster was stopping.

        Call this when the broker continues to serve.
        """
        postponed, self._postponed = self._postponed, []
        for work in postponed:
            work()

    def write_isr(self, partition: Partition, effect: WriteIsr) -> None:
        if self._context.quiesced and not effect.added:
            # The cluster is stopping: followers stop one by one, but no ISR may shrink because of that.
            _log.info("%s: ISR not shrunk to %s, the cluster is stopping", partition.tp, list(effect.isr))
            self._postponed.append(lambda: self._registry.write_isr(partition, effect))
            return
        self._registry.write_isr(partition, effect)

    def isr_changed(self, partition: Partition, isr: tuple[int, ...]) -> None:
        self._context.counters["isr.changes"] += 1
        self._registry.isr_changed(partition)

    def start_fetching(self, partition: Partition, leader: int, leader_epoch: int) -> None:
        if self._context.state == "stopping" and self._context.broker_id not in partition.replica.isr:
            # This broker has left the partition's ISR in order to stop. If it continued to fetch, the leader would add
            # it again.
            self._fetchers.unfollow(partition)
            return
        self._fetchers.follow(partition, leader, leader_epoch)

    def stop_fetching(self, partition: Partition) -> None:
        self._fetchers.unfollow(partition)

    def truncation_refused(self, partition: Partition, effect: RefuseTruncation) -> None:
        self._context.counters["cuts.refused"] += 1
        self._registry.refuse_truncation(partition, effect)

    def truncation_accepted(self, partition: Partition) -> None:
        self._registry.accept_truncation(partition)

    def prepare_truncation(self, partition: Partition, job: TruncationJob) -> None:
        self._log_maintenance.prepare_truncation(partition, job)

    def role_changed(self, partition: Partition) -> None:
        self._context.counters[f"roles.{partition.replica.role}"] += 1
        self._partitions.role_changed(partition)
        self._fetches.changed(partition)
        self._coordinators.role_changed(partition)
        for listener in self.role_listeners:
            listener(partition)
        self._context.roles_changed()

    def high_watermark_moved(self, partition: Partition) -> None:
        self._fetches.high_watermark_moved(partition)
        self._log_maintenance.committed(partition)
        self._coordinators.committed(partition)

    def bad_decision(self, partition: Partition, detail: str) -> None:
        self._context.counters["control.contradictions"] += 1
        _log.error("%s: could not apply a decision of the controller: %s", partition.tp, detail)

    def log_failed(self, partition: Partition, error: Exception) -> None:
        self._log_failed(partition, error)

    def deadline_moved(self, partition: Partition) -> None:
        self._partitions.deadline_moved(partition)
