"""The limit for the bytes of large frames that a server is receiving on all its connections.

A frame begins with its length, and its content arrives gradually, so a dozen half-received frames could hold gigabytes.
So the server receives a large frame only if the limit has room for the whole frame. Until then, the server does not
read the frame's connection. While other connections wait for room, the server closes a connection that sends its frame
too slowly.
"""

from __future__ import annotations

from typing import Protocol

#: The minimum rate in bytes per second at which a peer must send a large frame while others wait for room.
SLOWEST = 64 * 1024


class Receiver(Protocol):
    """The part of a connection that ``Receiving`` uses while a large frame arrives or waits for room."""

    def resume(self) -> None: ...

    def received_since_last_check(self) -> int:
        """Return the number of bytes of the frame that have arrived since the last call.

        The number is negative while the server does not read the connection.
        """

    def give_up(self, reason: str) -> None:
        """Close the connection, and log ``reason``."""


class Receiving:
    """A limiter of the bytes of large frames that one server is receiving, with a queue of waiting connections.

    Not thread-safe: use it only on the server's event loop.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self.used = 0
        #: The size of each admitted frame, by connection.
        self._admitted: dict[Receiver, int] = {}
        #: The waiting connections in the order of their arrival.
        self._waiting: dict[Receiver, int] = {}

    def begin(self, connection: Receiver, size: int) -> None:
        """Admit a frame of ``size`` bytes if there is room and the queue is empty. Otherwise queue its connection.

        ``may_receive`` then returns whether the frame was admitted.
        """
        if not self._waiting and self._fits(size):
            self._admit(connection, size)
        else:
            self._waiting[connection] = size

    def may_receive(self, connection: Receiver) -> bool:
        return connection not in self._waiting

    def end(self, connection: Receiver) -> None:
        """Release the frame's room after the frame has arrived or its connection is lost. Idempotent.

        Admit waiting frames that now have room.
        """
        if self._waiting.pop(connection, None) is None:
            self.used -= self._admitted.pop(connection, 0)
        while self._waiting:
            first, size = next(iter(self._waiting.items()))
            if not self._fits(size):
                break
            del self._waiting[first]
            self._admit(first, size)
            first.resume()

    def close_slow(self, passed_s: float) -> None:
        """Close connections that have sent too few bytes in the last ``passed_s`` seconds.

        Do nothing while no other connection waits for room.
        """
        slow = [one for one in self._admitted if 0 <= one.received_since_last_check() < SLOWEST * passed_s]
        if self._waiting:
            for connection in slow:
                connection.give_up(f"less than {SLOWEST} bytes/s of a frame received, and others wait for its room")

    def _fits(self, size: int) -> bool:
        """Return whether there is room for the frame. There always is room if no other frame is being received."""
        return not self._admitted or self.used + size <= self._limit

    def _admit(self, connection: Receiver, size: int) -> None:
        self._admitted[connection] = size
        self.used += size
