"""The sender of a producer as its thread and its parts see it."""

from __future__ import annotations

from typing import Protocol

from sparklog.client.producer.partitioning import ProducerTopic
from sparklog.net.async_client import AsyncConnection


class SendLoop(Protocol):
    """The sender. The thread that acts for the loop calls every method."""

    def run_once(self) -> None:
        """Start every action that is possible now. A component of the producer calls it after its state has changed."""

    def needs_loop(self) -> bool:
        """Return whether there is work that only a running loop can do."""

    def only_connection(self) -> AsyncConnection | None:
        """Return the connection of all requests in flight, if they are all sent to one broker completely."""

    def is_idle(self) -> bool:
        """Return whether no work is left."""

    def may_send(self, now_ms: float) -> bool:
        """Return whether a record may be sent ahead of all queues: there is no other work, and no metadata is due."""

    def is_current(self, topic: ProducerTopic) -> bool:
        """Return whether ``topic`` matches the newest metadata."""

    def discard(self, error: BaseException) -> None:
        """Fail every record that is not acknowledged. Batches in flight may still reach the log."""

    def begin_to_retire(self) -> None:
        """End the producer after all accepted work has ended."""

    def fail_all(self, error: BaseException) -> None:
        """Fail all open work, because the producer ends. Idempotent: an interrupt may stop it."""

    async def disconnect(self) -> None:
        """Close the connections, and wait until they are closed."""
