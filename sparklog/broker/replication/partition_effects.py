"""The effects that a partition cannot perform itself: those of ZooKeeper, fetchers, log maintenance and timers."""

from __future__ import annotations

import logging

from sparklog.broker.replication.fetcher import Fetchers
from sparklog.broker.replication.log_maintenance import LogMaintenance
from sparklog.broker.replication.partition import Partition
from sparklog.broker.state import BrokerState
from sparklog.replica.effects import RefuseCut, WriteIsr
from sparklog.storage.truncation_job import TruncationJob

_log = logging.getLogger(__name__)


class PartitionEffects:
    """The ``PartitionHost`` of every partition in a broker process. Owner: the broker's event loop."""

    def __init__(self, broker: BrokerState, *, fetchers: Fetchers, log_maintenance: LogMaintenance) -> None:
        self._broker = broker
        self._fetchers = fetchers
        self._log_maintenance = log_maintenance
        self.now_ms = broker.now_ms

    def write_isr(self, partition: Partition, effect: WriteIsr) -> None:
        if self._broker.quiesced and not effect.added:
            # The cluster is stopping: followers stop one by one, and every ISR must stay as it is.
            _log.info("%s: ISR not shrunk to %s, the cluster is stopping", partition.tp, list(effect.isr))
            self._broker.put_off.append(lambda: self._broker.registry.write_isr(partition, effect))
            return
        self._broker.registry.write_isr(partition, effect)

    def isr_changed(self, partition: Partition, isr: tuple[int, ...]) -> None:
        self._broker.counters["isr.changes"] += 1
        self._broker.registry.isr_changed(partition)

    def start_fetching(self, partition: Partition, leader: int, leader_epoch: int) -> None:
        if self._broker.state == "stopping" and self._broker.broker_id not in partition.replica.isr:
            # This broker is leaving the replica's ISR: if it fetched on, the leader would add it to the ISR again.
            self._fetchers.unfollow(partition)
            return
        self._fetchers.follow(partition, leader, leader_epoch)

    def stop_fetching(self, partition: Partition) -> None:
        self._fetchers.unfollow(partition)

    def cut_refused(self, partition: Partition, effect: RefuseCut) -> None:
        self._broker.counters["cuts.refused"] += 1
        self._broker.registry.refuse_cut(partition, effect)

    def cut_accepted(self, partition: Partition) -> None:
        self._broker.registry.accept_cut(partition)

    def prepare_cut(self, partition: Partition, job: TruncationJob) -> None:
        self._log_maintenance.prepare_cut(partition, job)

    def role_changed(self, partition: Partition) -> None:
        self._broker.counters[f"roles.{partition.replica.role}"] += 1
        self._broker.partitions.role_changed(partition)
        self._broker.fetches.changed(partition)
        self._broker.markers.role_changed(partition)
        self._broker.coordinators.role_changed(partition)
        self._broker.roles_changed()

    def log_end_moved(self, partition: Partition) -> None:
        self._broker.fetches.log_end_moved(partition)

    def high_watermark_moved(self, partition: Partition) -> None:
        self._broker.fetches.high_watermark_moved(partition)
        self._log_maintenance.committed(partition)
        self._broker.markers.committed(partition)
        self._broker.coordinators.committed(partition)

    def bad_decision(self, partition: Partition, detail: str) -> None:
        self._broker.counters["control.contradictions"] += 1
        _log.error("%s: could not apply a decision of the controller: %s", partition.tp, detail)

    def log_failed(self, partition: Partition, error: Exception) -> None:
        self._broker.log_failed(partition, error)

    def deadline_moved(self, partition: Partition) -> None:
        self._broker.partitions.deadline_moved(partition)
