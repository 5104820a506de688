"""A cached check whether any partition still needs a stopping broker.

There may be ten thousand partitions, and one of them changes every few milliseconds. A check of all partitions at each
change took more processor time than the rest of the stop.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from sparklog.broker.replication.partition import Partition


class CachedAny:
    """The partitions that satisfied a condition when all were last checked. Owner: the broker's event loop."""

    def __init__(self, partitions: Callable[[], Iterable[Partition]], needs: Callable[[Partition], bool]) -> None:
        """``partitions`` returns the candidates; ``needs`` is the condition."""
        self._partitions = partitions
        self._needs = needs
        self._left: list[Partition] = []

    def any(self) -> bool:
        """Return whether a partition satisfies the condition.

        The other partitions are checked only when no cached partition satisfies it any more.
        """
        while self._left:
            if self._needs(self._left[-1]):
                return True
            self._left.pop()
        self._left = [partition for partition in self._partitions() if self._needs(partition)]
        return bool(self._left)

    def count(self) -> int:
        return sum(map(self._needs, self._partitions()))
