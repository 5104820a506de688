"""Produces that wait on a leader until they are appended, and with acks=all until they are committed.

Each partition has one purgatory. The purgatory holds tickets, never records, and does no I/O. Entries are ordered by
end offset. So when the high watermark rises, only the entries that are now committed are visited.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

import msgspec

#: A time later than any deadline.
NEVER = 2**63 - 1


class Waiting(msgspec.Struct, frozen=True, gc=False):
    """A produce with acks=all whose batches were appended but are not committed yet.

    The batches are committed when the high watermark reaches ``end_offset``.
    """

    end_offset: int
    ticket: int
    base_offset: int
    deadline_ms: int


@dataclass(slots=True)
class Purgatory:
    """The queue of the produces that wait on one leader.

    Mutable. If the same replica is elected again, its new ``LeaderRole`` takes over the purgatory of the old one.
    """

    #: Produces whose append has been ordered and has no result yet: ticket to (acks, deadline).
    ordered: dict[int, tuple[int, int]] = field(default_factory=dict)
    _queue: deque[Waiting] = field(default_factory=deque)
    #: A lower bound of the entries' deadlines. It is exact after ``expire``.
    earliest_ms: int = NEVER

    def __len__(self) -> int:
        return len(self._queue)

    @property
    def first_end(self) -> int:
        """Return the smallest end offset of the entries, or NEVER if there are no entries."""
        return self._queue[0].end_offset if self._queue else NEVER

    def wait(self, entry: Waiting) -> None:
        """Add an entry, and keep the queue ordered by end offset.

        End offsets usually rise, so the entry usually goes to the end. The entry of a duplicate batch may have a lower
        end offset. Therefore the search for an entry's place starts at the end of the queue.
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
        """Remove and return the entries that are committed at this high watermark, in offset order."""
        queue = self._queue
        done: list[Waiting] = []
        while queue and queue[0].end_offset <= high_watermark:
            done.append(queue.popleft())
        if not queue:
            self.earliest_ms = NEVER
        return done

    def expire(self, now_ms: int) -> list[Waiting]:
        """Remove and return the entries whose deadline has passed.

        This visits all entries, so check ``earliest_ms`` first.
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
