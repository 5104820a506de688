"""All coordinators of one broker: each begins and ends with the leadership of a partition of an internal topic."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from functools import partial
from typing import Generic, TypeVar

from sparklog.broker.groups.group_host import GroupHost
from sparklog.broker.internal_topics import OFFSETS, TRANSACTIONS, partition_of
from sparklog.broker.replication.partition import Partition
from sparklog.broker.state import BrokerState
from sparklog.broker.transactions.coordinator_runtime import CoordinatorRuntime
from sparklog.broker.transactions.transaction_host import TransactionHost
from sparklog.errors import BrokerError, ErrorCode

_Host = TypeVar("_Host", bound=CoordinatorRuntime)


#: The pause before a failed coordinator is loaded again.
_AGAIN_S = 5.0


class HostedCoordinators(Generic[_Host]):
    """The coordinators of one internal topic. Owner: ``Coordinators``."""

    def __init__(self, broker: BrokerState, topic: str, kind: Callable[[BrokerState, Partition], _Host]) -> None:
        self._broker = broker
        self._topic = topic
        self._kind = kind
        self._hosts: dict[int, _Host] = {}

    def of(self, key: str) -> _Host:
        """Return the coordinator of ``key``, ready to serve.

        Raises:
            BrokerError: INVALID_REQUEST for an empty key; NOT_COORDINATOR if another broker coordinates it; errors of
                ``require_ready``.
        """
        if not key:
            raise BrokerError(ErrorCode.INVALID_REQUEST, "a name is empty")
        tp = partition_of(self._broker, self._topic, key)
        host = self._hosts.get(tp.partition) if tp is not None else None
        if host is None:
            detail = f"{key}: broker {self._broker.broker_id} does not lead {tp or self._topic}"
            raise BrokerError(ErrorCode.NOT_COORDINATOR, detail)
        host.require_ready()
        return host

    def all_ready(self) -> list[_Host]:
        """Return all coordinators. Raise BrokerError as ``require_ready`` does if one is not ready."""
        for host in self._hosts.values():
            host.require_ready()
        return list(self._hosts.values())

    def __iter__(self) -> Iterator[_Host]:
        return iter(list(self._hosts.values()))

    def role_changed(self, partition: Partition) -> None:
        number = partition.tp.partition
        known = self._hosts.get(number)
        leads = partition.replica.is_leader and not partition.stopped and partition.offline is None
        if known is not None:
            if leads and known.partition is partition and known.epoch == partition.replica.leader_epoch:
                return
            del self._hosts[number]
            known.end()
        if leads:
            self._begin(partition)

    def _begin(self, partition: Partition) -> None:
        host = self._hosts[partition.tp.partition] = self._kind(self._broker, partition)
        loop = asyncio.get_running_loop()
        host.on_failed = partial(self._failed, host)
        # The partition may be in the middle of a step; the coordinator reads the log after it.
        loop.call_soon(self._load, host)

    def _load(self, host: _Host) -> None:
        self._broker.spawn(host.load(), f"coordinator of {host.partition.tp}")

    def _failed(self, host: _Host) -> None:
        asyncio.get_running_loop().call_later(_AGAIN_S, self._begin_again, host)

    def _begin_again(self, host: _Host) -> None:
        """Load the coordinator again from its log, which has all its appends by now."""
        if self._hosts.get(host.partition.tp.partition) is host and not host.ended:
            host.end()
            self._begin(host.partition)

    def committed(self, partition: Partition) -> None:
        host = self._hosts.get(partition.tp.partition)
        if host is not None and host.partition is partition:
            host.committed()


class Coordinators:
    """The coordinators of all internal topics. Owner: the broker's event loop."""

    def __init__(self, broker: BrokerState) -> None:
        self.transactions = HostedCoordinators(broker, TRANSACTIONS, TransactionHost)
        self.groups = HostedCoordinators(broker, OFFSETS, GroupHost)
        self._by_topic: dict[str, HostedCoordinators[TransactionHost] | HostedCoordinators[GroupHost]] = {
            TRANSACTIONS: self.transactions,
            OFFSETS: self.groups,
        }

    def role_changed(self, partition: Partition) -> None:
        hosted = self._by_topic.get(partition.tp.topic)
        if hosted is not None:
            hosted.role_changed(partition)

    def committed(self, partition: Partition) -> None:
        """Note a new high watermark of the partition."""
        hosted = self._by_topic.get(partition.tp.topic)
        if hosted is not None:
            hosted.committed(partition)
