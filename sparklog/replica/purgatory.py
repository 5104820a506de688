"""Produces that wait on a leader: between arrival and append, and for acks=all until the high watermark passes them.

Pure and per partition. Holds tickets, never records. Ordered by end offset, so that a moved high watermark touches
only what it releases.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

import msgspec

#: No deadline: later than any.
NEVER = 2**63 - 1


class Waiting(msgspec.Struct, frozen=True, gc=False):
    """An appended acks=all produce; done when the high watermark reaches ``end_offset``."""

    end_offset: int
    ticket: int
    base_offset: int
    deadline_ms: int


@dataclass(slots=True)
class Purgatory:
    """Mutable, owned by one ``Leader``; handed on when the same replica is elected again, for its log stays."""

    #: ticket to (acks, deadline) of produces whose append was ordered and has not been reported
    ordered: dict[int, tuple[int, int]] = field(default_factory=dict)
    _queue: deque[Waiting] = field(default_factory=deque)
    #: a lower bound of all deadlines: exact after ``expire``
    earliest_ms: int = NEVER

    def __len__(self) -> int:
        return len(self._queue)

    @property
    def first_end(self) -> int:
        """Smallest awaited end offset; NEVER when nothing waits."""
        return self._queue[0].end_offset if self._queue else NEVER

    def wait(self, entry: Waiting) -> None:
        """Ends come in rising order but for duplicates of an earlier batch, which look for their place from behind."""
        queue = self._queue
        if not queue or queue[-1].end_offset <= entry.end_offset:
            queue.append(entry)
        else:
            place = len(queue)
            while place and queue[place - 1].end_offset > entry.end_offset:
                place -= 1
            queue.insert(place, entry)
        if entry.deadline_ms < self.earliest_ms:  # noqa: PLR1730 - hot
            self.earliest_ms = entry.deadline_ms

    def complete(self, high_watermark: int) -> list[Waiting]:
        """Take out everything the high watermark has reached, in offset order."""
        queue = self._queue
        done: list[Waiting] = []
        while queue and queue[0].end_offset <= high_watermark:
            done.append(queue.popleft())
        if not queue:
            self.earliest_ms = NEVER
        return done

    def expire(self, now_ms: int) -> list[Waiting]:
        """Take out everything whose deadline has come. Looks at all entries, so only when ``earliest_ms`` says so."""
        if now_ms < self.earliest_ms:
            return []
        expired = [entry for entry in self._queue if entry.deadline_ms <= now_ms]
        if expired:
            self._queue = deque(entry for entry in self._queue if entry.deadline_ms > now_ms)
        self.earliest_ms = min((entry.deadline_ms for entry in self._queue), default=NEVER)
        return expired

    def drain(self) -> list[int]:
        """Take out all tickets: this replica leads no more."""
        tickets = [*self.ordered, *(entry.ticket for entry in self._queue)]
        self.ordered.clear()
        self._queue.clear()
        self.earliest_ms = NEVER
        return tickets
