"""The interface of a producer's sender, for the other parts of the producer."""

from __future__ import annotations

from typing import Protocol

from sparklog.client.producer.partitioning import ProducerTopic
from sparklog.net.async_client import AsyncConnection


class SendLoop(Protocol):
    """The part of the ``Sender`` that the other parts of the producer use.

    Only the thread that runs the event loop's callbacks calls the methods.
    """

    def run_once(self) -> None:
        """Start every action that is possible now. A component of the producer calls it after its state has changed."""

    def needs_loop(self) -> bool:
        """Return whether there is work that only a running loop can do."""

    def only_connection(self) -> AsyncConnection | None:
        """Return the one connection that all requests in flight use, or None if a caller cannot read from it."""

    def is_idle(self) -> bool:
        """Return whether no work is left."""

    def may_send(self, now_ms: float) -> bool:
        """Return whether a record may bypass the queues: there is no other work, and no metadata refresh is due."""

    def is_current(self, topic: ProducerTopic) -> bool:
        """Return whether ``topic`` matches the newest metadata."""

    def discard(self, error: BaseException) -> None:
        """Fail every record that is not acknowledged. A batch in flight may still reach the log."""

    def begin_to_retire(self) -> None:
        """End the producer after all accepted work has ended."""

    def fail_all(self, error: BaseException) -> None:
        """Fail all open work, because the producer ends.

        The method is idempotent, because an interrupt may stop a call.
        """

    async def disconnect(self) -> None:
        """Close the connections, and wait until they are closed."""
