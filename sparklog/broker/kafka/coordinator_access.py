"""Access to the coordinators on this broker, for the handlers of Kafka's requests."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TypeVar

from sparklog.broker.transactions.coordinator_runtime import CoordinatorRuntime
from sparklog.broker.transactions.hosted_coordinators import HostedCoordinators
from sparklog.coordinator.effects import Outcome, Refused
from sparklog.errors import BrokerError, ErrorCode

_Host = TypeVar("_Host", bound=CoordinatorRuntime)


def coordinator_of(coordinators: HostedCoordinators[_Host], key: str) -> _Host:
    """Return the coordinator of ``key``.

    Raises BrokerError if this broker is not the coordinator or is not ready. While the broker stops, the error is
    NOT_COORDINATOR, so that the client searches for the next coordinator.
    """
    try:
        return coordinators.of(key)
    except BrokerError as error:
        if error.code is ErrorCode.BROKER_STOPPING:
            raise BrokerError(ErrorCode.NOT_COORDINATOR, error.detail) from None
        raise


async def outcome_of(
    coordinator: CoordinatorRuntime, event_of: Callable[[int], object], *, timeout_s: float | None = None
) -> Outcome:
    """Pass a request to the coordinator, and return the outcome.

    Raises:
        BrokerError: the coordinator refuses the request.
        asyncio.TimeoutError: the request has no outcome within ``timeout_s``. The coordinator may complete
            it later.
    """
    done: asyncio.Future[Outcome] = asyncio.get_running_loop().create_future()

    def on_result(result: Outcome) -> None:
        if not done.done():  # The client's connection may have ended meanwhile.
            done.set_result(result)

    coordinator.ask(event_of, on_result)
    outcome = await (done if timeout_s is None else asyncio.wait_for(done, timeout_s))
    if isinstance(outcome, Refused):
        raise BrokerError(outcome.code, outcome.detail)
    return outcome
