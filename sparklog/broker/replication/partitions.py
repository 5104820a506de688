"""The table of all replicas that this broker hosts, and the timer for their deadlines.

``replica_hosting`` creates and drops the replicas.

One timer serves all replicas with a heap of their deadlines, so an idle partition costs nothing. A heap entry may be
out of date. The timer checks an entry when it is due, which costs less than removing it at every produce.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
from collections.abc import Iterator

from sparklog.broker.context import BrokerContext
from sparklog.broker.replication.crc_cache import CrcCache
from sparklog.broker.replication.maintenance_index import MaintenanceIndex
from sparklog.broker.replication.partition import Partition
from sparklog.errors import BrokerError, ErrorCode
from sparklog.model import NO_EPOCH, TopicPartition
from sparklog.replica.events import FollowerConnectionLost, ReplicaTicked
from sparklog.replica.purgatory import NEVER
from sparklog.storage.log import Log
from sparklog.storage.log_directory import LogDirectory


class Partitions:
    """A table of the hosted replicas, by topic and partition.

    Not thread-safe: use it only on the broker's event loop.
    """

    def __init__(self, context: BrokerContext, directory: LogDirectory) -> None:
        self._context = context
        self.directory = directory
        self._hosted: dict[tuple[str, int], Partition] = {}
        #: The function that returns the hosted replica of a partition (a TopicPartition or an equal tuple), or None.
        self.get = self._hosted.get
        self.maintenance_index = MaintenanceIndex(directory, self.get)
        #: The partitions that this broker leads, as of the last role change of each replica.
        self._led: set[Partition] = set()
        #: The running CRCs of verified batches of all logs, which later projections use.
        self.crc_cache = CrcCache()
        self._timers: list[tuple[int, int, Partition]] = []
        self._timer_order = itertools.count()
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at_ms = 0

    def __iter__(self) -> Iterator[Partition]:
        return iter(list(self._hosted.values()))

    def __len__(self) -> int:
        return len(self._hosted)

    def require(self, tp: tuple[str, int], topic_id: str = "") -> Partition:
        """Return the hosted replica of ``tp``, and check its topic id unless ``topic_id`` is empty.

        Raises:
            BrokerError: UNKNOWN_TOPIC_OR_PARTITION; NOT_LEADER_OR_FOLLOWER if only other brokers host the partition, or
                the controller has sent no update yet; INCONSISTENT_TOPIC_ID; KAFKA_STORAGE_ERROR if the log directory
                is offline.
        """
        partition = self._hosted.get(tp)
        if partition is None:
            raise self._absent(TopicPartition(*tp))
        if topic_id and topic_id != partition.topic_id:
            detail = f"{partition.tp}: topic id {topic_id} requested, this broker has {partition.topic_id}"
            raise BrokerError(ErrorCode.INCONSISTENT_TOPIC_ID, detail)
        if partition.offline is not None:
            partition.check_usable()
        return partition

    def _absent(self, tp: TopicPartition) -> BrokerError:
        if self._context.cache.controller_epoch == NO_EPOCH:
            detail = f"{tp}: broker {self._context.broker_id} waits for its first update from the controller"
            return BrokerError(ErrorCode.NOT_LEADER_OR_FOLLOWER, detail)
        known = self._context.cache.partition(tp)
        if known is not None:
            return BrokerError(
                ErrorCode.NOT_LEADER_OR_FOLLOWER,
                f"{tp} is on brokers {list(known.replicas)}, not on broker {self._context.broker_id}",
            )
        topic = self._context.cache.topic(tp.topic)
        what = f"topic {tp.topic!r} has {len(topic.partitions)} partitions" if topic else f"no topic {tp.topic!r}"
        return BrokerError(
            ErrorCode.UNKNOWN_TOPIC_OR_PARTITION, f"{what}: broker {self._context.broker_id} does not know {tp}"
        )

    # --- changes, by ``ReplicaHosting`` alone ---

    def add(self, partition: Partition) -> None:
        self._hosted[partition.tp] = partition

    def remove(self, partition: Partition) -> None:
        del self._hosted[partition.tp]
        self._led.discard(partition)
        self.maintenance_index.drop(partition)

    def follower_lost(self, replica_id: int) -> None:
        """Notify the leaders on this broker that the last connection from a follower has closed."""
        for partition in self.leading():
            partition.step(FollowerConnectionLost(replica_id))

    def role_changed(self, partition: Partition) -> None:
        if not partition.stopped:
            self.maintenance_index.mark_changed(partition)
        if partition.replica.is_leader:
            self._led.add(partition)
        else:
            self._led.discard(partition)

    @property
    def led(self) -> int:
        """Return the number of partitions that this broker leads."""
        return len(self._led)

    def leading(self) -> list[Partition]:
        """Return the partitions that this broker leads."""
        return list(self._led)

    def movable(self, partition: Partition) -> bool:
        """Return whether this broker leads the partition, and another live member of the ISR could lead it."""
        replica = partition.replica
        if partition not in self._led:
            return False
        live, own = self._context.cache.incarnations, self._context.broker_id
        return any(member != own and member in live for member in replica.isr)

    def counted_on(self, partition: Partition) -> bool:
        """Return whether this broker is in the ISR of the partition, and the partition has a live leader.

        The result comes from the cached metadata. The ISR that the replica itself knows is not used: a replica with a
        broken disk applies no decisions, so its ISR may be out of date.
        """
        told = self._context.cache.partition(partition.tp)
        if told is None or told.state.leader not in self._context.cache.incarnations:
            return False
        return self._context.broker_id in told.state.isr

    @property
    def in_sync(self) -> int:
        """Return the number of hosted partitions whose ISR contains this broker, according to the replica itself."""
        own = self._context.broker_id
        return sum(own in partition.replica.isr for partition in self._hosted.values())

    @property
    def lagging(self) -> int:
        """Return the number of partitions led by this broker whose high watermark is below the log end offset."""
        return sum(
            partition.replica.is_leader and partition.replica.high_watermark < partition.log.log_end_offset
            for partition in self._hosted.values()
        )

    def unclaimed_logs(self) -> list[Log]:
        """Return the logs on disk that belong to no hosted replica."""
        return [log for log in self.directory.logs() if log.tp not in self._hosted]

    def unclaimed_log(self, tp: TopicPartition) -> Log | None:
        """Return the log of ``tp`` if it belongs to no hosted replica, otherwise None."""
        return None if tp in self._hosted else self.directory.get(tp)

    # --- time ---

    def deadline_moved(self, partition: Partition) -> None:
        """Set the timer for the partition's deadline.

        This may be called after every step, so it does almost nothing if the deadline is not earlier than before.
        """
        deadline_ms = partition.replica.deadline_ms()
        if deadline_ms >= partition.timer_ms:
            return
        partition.timer_ms = deadline_ms
        heapq.heappush(self._timers, (deadline_ms, next(self._timer_order), partition))
        if self._timer is None or deadline_ms < self._timer_at_ms:
            self._arm(deadline_ms)

    def _arm(self, at_ms: int) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer_at_ms = at_ms
        delay_s = max(at_ms - self._context.now_ms(), 0) / 1000
        self._timer = asyncio.get_running_loop().call_later(delay_s, self._tick)

    def _tick(self) -> None:
        self._timer = None
        now_ms = self._context.now_ms()
        due = []
        while self._timers and self._timers[0][0] <= now_ms:
            at_ms, _, partition = heapq.heappop(self._timers)
            if partition.timer_ms == at_ms:
                partition.timer_ms = NEVER
                due.append(partition)
        for partition in due:
            if partition.stopped:
                continue
            if partition.replica.deadline_ms() <= now_ms:
                partition.step(ReplicaTicked())
            else:
                self.deadline_moved(partition)
        self._arm_for_next(now_ms)

    def _arm_for_next(self, now_ms: int) -> None:
        """Set the timer for the first deadline in the heap.

        The call is needed because a step may have set the timer for a later deadline.
        """
        if self._timers and (self._timer is None or self._timers[0][0] < self._timer_at_ms):
            self._arm(max(self._timers[0][0], now_ms + 1))

    def stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._timers.clear()
