"""The budget of bytes for large frames that a server is receiving, over all its connections.

A frame says how long it is before it comes, and its memory is filled as it comes: a dozen frames of which half has come
would hold gigabytes. So a large frame is received when there is room for all of it; until then its connection is not
read. While others wait for room, a connection that does not send gives its room up, with the frame and itself.
"""

from __future__ import annotations

from typing import Protocol

#: Bytes per second that a peer has to send of a large frame while others wait for its room.
SLOWEST = 64 * 1024


class Receiver(Protocol):
    """A connection on which a large frame is received, or waits for room."""

    def go_on(self) -> None: ...

    def received_since_last_look(self) -> int:
        """Bytes of the frame that have come since this was asked last; below 0: the connection was not read."""

    def give_up(self, reason: str) -> None:
        """Close the connection."""


class Receiving:
    """Owner: the server, on its event loop."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self.used = 0
        #: Bytes of the frame, by connection.
        self._admitted: dict[Receiver, int] = {}
        #: In the order in which they came.
        self._waiting: dict[Receiver, int] = {}

    def begin(self, connection: Receiver, size: int) -> None:
        """A frame of so many bytes begins. ``may_receive`` says whether it has room."""
        if not self._waiting and self._fits(size):
            self._admit(connection, size)
        else:
            self._waiting[connection] = size

    def may_receive(self, connection: Receiver) -> bool:
        return connection not in self._waiting

    def end(self, connection: Receiver) -> None:
        """The frame has come, or the connection is lost. Idempotent."""
        if self._waiting.pop(connection, None) is None:
            self.used -= self._admitted.pop(connection, 0)
        while self._waiting:
            first, size = next(iter(self._waiting.items()))
            if not self._fits(size):
                break
            del self._waiting[first]
            self._admit(first, size)
            first.go_on()

    def look(self, passed_s: float) -> None:
        """Close connections that have sent too little in this time, if others wait for their room."""
        slow = [one for one in self._admitted if 0 <= one.received_since_last_look() < SLOWEST * passed_s]
        if self._waiting:
            for connection in slow:
                connection.give_up(f"less than {SLOWEST} bytes/s of a frame received, and others wait for its room")

    def _fits(self, size: int) -> bool:
        """One frame has room in any case."""
        return not self._admitted or self.used + size <= self._limit

    def _admit(self, connection: Receiver, size: int) -> None:
        self._admitted[connection] = size
        self.used += size
