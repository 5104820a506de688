"""Produces that wait on a leader: between arrival and append, and for acks=all until they are committed.

Pure, one for each partition. It holds tickets, never records. Entries are ordered by end offset, so that a higher high
watermark touches only the entries that it releases.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

import msgspec

#: No deadline: later than any.
NEVER = 2**63 - 1


class Waiting(msgspec.Struct, frozen=True, gc=False):
    """An appended acks=all produce. It is done when the high watermark reaches ``end_offset``."""

    end_offset: int
    ticket: int
    base_offset: int
    deadline_ms: int


@dataclass(slots=True)
class Purgatory:
    """The waiting produces of one ``LeaderRole``.

    Mutable. It passes to the next ``LeaderRole`` if the same replica is elected again.
    """

    #: Ticket to (acks, deadline) of produces whose append was ordered and has no result yet.
    ordered: dict[int, tuple[int, int]] = field(default_factory=dict)
    _queue: deque[Waiting] = field(default_factory=deque)
    #: A lower bound of all deadlines, exact after ``expire``.
    earliest_ms: int = NEVER

    def __len__(self) -> int:
        return len(self._queue)

    @property
    def first_end(self) -> int:
        """Return the smallest awaited end offset, or NEVER if there is no entry."""
        return self._queue[0].end_offset if self._queue else NEVER

    def wait(self, entry: Waiting) -> None:
        """Add an entry.

        Ends rise, except for duplicates of an earlier batch, which are inserted at their place from the end.
        """
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
        """Remove and return the entries that the high watermark has reached, in offset order."""
        queue = self._queue
        done: list[Waiting] = []
        while queue and queue[0].end_offset <= high_watermark:
            done.append(queue.popleft())
        if not queue:
            self.earliest_ms = NEVER
        return done

    def expire(self, now_ms: int) -> list[Waiting]:
        """Remove and return the entries whose deadline has passed.

        It reads all entries, so ``earliest_ms`` is checked first.
        """
        if now_ms < self.earliest_ms:
            return []
        expired = [entry for entry in self._queue if entry.deadline_ms <= now_ms]
        if expired:
            self._queue = deque(entry for entry in self._queue if entry.deadline_ms > now_ms)
        self.earliest_ms = min((entry.deadline_ms for entry in self._queue), default=NEVER)
        return expired

    def drain(self) -> list[int]:
        """Remove and return all tickets, because this replica is no longer the leader."""
        tickets = [*self.ordered, *(entry.ticket for entry in self._queue)]
        self.ordered.clear()
        self._queue.clear()
        self.earliest_ms = NEVER
        return tickets
