"""The search for the coordinator of a group or transaction, and the requests to the coordinator.

This module is pure.
"""

from __future__ import annotations

import math
from typing import TypeVar

from sparklog.client.cluster.routing_core import RoutingCore, RoutingSteps
from sparklog.errors import BrokerError
from sparklog.model import BrokerEndpoint
from sparklog.protocol.messages import FindCoordinator, FindCoordinatorReply, Reply, Request

R = TypeVar("R", bound=Reply)

GROUP, TRANSACTION = "group", "transaction"
#: A broker may wait 5 s for the election of a coordinator. So the client waits longer for a reply to FindCoordinator.
_FIND_S = 6.0


class CoordinatorSearch:
    """The search for the coordinator of one group or transactional id. The object remembers the last coordinator.

    Not thread-safe: use it only in the thread, or on the event loop, of its cluster client.
    """

    def __init__(self, core: RoutingCore, kind: str, key: str) -> None:
        self._core = core
        self._kind = kind
        self._key = key
        self._found: BrokerEndpoint | None = None

    def ask(self, request: Request, expected: type[R], *, timeout_s: float = math.inf) -> RoutingSteps[R]:
        """Find the coordinator unless it is known, and send the request once. Raises BrokerError.

        The coordinator need not be in the metadata. After an error that may mean that the coordinator has moved, such
        as NOT_COORDINATOR, the next call searches again.
        """
        try:
            broker = self._found
            if broker is None:
                find = FindCoordinator(0, self._kind, self._key)
                reply = yield from self._core.ask_any(find, FindCoordinatorReply, longest_s=_FIND_S)
                broker = self._found = reply.broker
            yield from self._core.reach(broker)
            return (yield from self._core.ask(broker.broker_id, request, expected, timeout_s=timeout_s))
        except BrokerError as error:
            if error.refresh_metadata:
                self._found = None
            raise

    def describe(self, request: Request) -> str:
        """Return the description of a request for error messages."""
        return f"{type(request).__name__}, coordinator of {self._kind} {self._key!r}"
