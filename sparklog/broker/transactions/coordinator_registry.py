"""The start and end of coordinators when this broker gains or loses leaderships of internal topics' partitions."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from typing import Generic, TypeVar

from sparklog.broker.context import BrokerContext
from sparklog.broker.groups.group_host import GroupHost
from sparklog.broker.replication.partition import Partition
from sparklog.broker.transactions.coordinator_runtime import CoordinatorRuntime
from sparklog.broker.transactions.hosted_coordinators import HostedCoordinators
from sparklog.broker.transactions.transaction_host import TransactionHost

_Host = TypeVar("_Host", bound=CoordinatorRuntime)


#: The pause before a failed coordinator is replaced by a new one.
_AGAIN_S = 5.0


class CoordinatorHosting(Generic[_Host]):
    """The component that starts and ends the coordinators of one internal topic.

    A part of ``Coordinators``. ``kind`` is called with a partition and creates its coordinator.
    """

    def __init__(
        self, context: BrokerContext, hosted: HostedCoordinators[_Host], kind: Callable[[Partition], _Host]
    ) -> None:
        self._context = context
        self.topic = hosted.topic
        self._by_partition = hosted.by_partition
        self._kind = kind

    def role_changed(self, partition: Partition) -> None:
        number = partition.tp.partition
        known = self._by_partition.get(number)
        leads = partition.replica.is_leader and not partition.stopped and partition.offline is None
        if known is not None:
            if leads and known.partition is partition and known.epoch == partition.replica.leader_epoch:
                return
            del self._by_partition[number]
            known.end()
        if leads:
            self._begin(partition)

    def _begin(self, partition: Partition) -> None:
        host = self._by_partition[partition.tp.partition] = self._kind(partition)
        loop = asyncio.get_running_loop()
        host.on_failed = partial(self._failed, host)
        # The partition may be in the middle of a step, so the coordinator reads the log afterwards.
        loop.call_soon(self._load, host)

    def _load(self, host: _Host) -> None:
        self._context.spawn(host.load(), f"coordinator of {host.partition.tp}")

    def _failed(self, host: _Host) -> None:
        asyncio.get_running_loop().call_later(_AGAIN_S, self._begin_again, host)

    def _begin_again(self, host: _Host) -> None:
        """Replace a failed coordinator by a new one, which loads the log with all appends of the failed one."""
        if self._by_partition.get(host.partition.tp.partition) is host and not host.ended:
            host.end()
            self._begin(host.partition)

    def committed(self, partition: Partition) -> None:
        host = self._by_partition.get(partition.tp.partition)
        if host is not None and host.partition is partition:
            host.committed()


class Coordinators:
    """A dispatcher that passes changes of partitions to the coordinators of all internal topics.

    Not thread-safe: use it only on the broker's event loop.
    """

    def __init__(
        self, transactions: CoordinatorHosting[TransactionHost], groups: CoordinatorHosting[GroupHost]
    ) -> None:
        self._by_topic: dict[str, CoordinatorHosting[TransactionHost] | CoordinatorHosting[GroupHost]] = {
            transactions.topic: transactions,
            groups.topic: groups,
        }

    def role_changed(self, partition: Partition) -> None:
        hosted = self._by_topic.get(partition.tp.topic)
        if hosted is not None:
            hosted.role_changed(partition)

    def committed(self, partition: Partition) -> None:
        """Notify the partition's coordinator, if there is one, that the high watermark has risen."""
        hosted = self._by_topic.get(partition.tp.topic)
        if hosted is not None:
            hosted.committed(partition)
