"""The coordinators of one internal topic on this broker: one for each partition that this broker leads.

``coordinator_registry`` starts and ends the coordinators.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Generic, TypeVar

from sparklog.broker.context import BrokerContext
from sparklog.broker.internal_topics import partition_of
from sparklog.broker.transactions.coordinator_runtime import CoordinatorRuntime
from sparklog.errors import BrokerError, ErrorCode

_Host = TypeVar("_Host", bound=CoordinatorRuntime)


class HostedCoordinators(Generic[_Host]):
    """A table of the coordinators of one internal topic on this broker.

    Not thread-safe: use it only on the broker's event loop.
    """

    def __init__(self, context: BrokerContext, topic: str) -> None:
        self._context = context
        self.topic = topic
        #: The coordinators by partition of the topic. Only ``CoordinatorHosting`` changes them.
        self.by_partition: dict[int, _Host] = {}

    def of(self, key: str) -> _Host:
        """Return the coordinator of ``key``, if it is ready to serve.

        A key is a group id, a transactional id or the name of a sink.

        Raises:
            BrokerError: INVALID_REQUEST for an empty key; NOT_COORDINATOR if another broker coordinates the key; the
                same errors as ``CoordinatorRuntime.require_ready``.
        """
        if not key:
            raise BrokerError(ErrorCode.INVALID_REQUEST, "a name is empty")
        tp = partition_of(self._context.cache, self.topic, key)
        host = self.by_partition.get(tp.partition) if tp is not None else None
        if host is None:
            detail = f"{key}: broker {self._context.broker_id} does not lead {tp or self.topic}"
            raise BrokerError(ErrorCode.NOT_COORDINATOR, detail)
        host.require_ready()
        return host

    def all_ready(self) -> list[_Host]:
        """Return all coordinators.

        Raises:
            BrokerError: a coordinator is not ready: the error of its ``require_ready``.
        """
        for host in self.by_partition.values():
            host.require_ready()
        return list(self.by_partition.values())

    def __iter__(self) -> Iterator[_Host]:
        return iter(list(self.by_partition.values()))
