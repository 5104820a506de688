"""A cached answer to the question whether any of a stopping broker's partitions still needs it.

There may be ten thousand partitions, and changes come every few milliseconds. A count of all partitions at each change
took more processor time than the rest of a stop.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from sparklog.broker.replication.partition import Partition


class CachedAny:
    """Partitions that satisfied a condition at the last check. Owner: the broker's event loop."""

    def __init__(self, partitions: Callable[[], Iterable[Partition]], needs: Callable[[Partition], bool]) -> None:
        """``partitions`` returns the candidates; ``needs`` is the condition."""
        self._partitions = partitions
        self._needs = needs
        self._left: list[Partition] = []

    def any(self) -> bool:
        """Return whether a partition satisfies the condition.

        Other partitions are checked only once the cached ones do not.
        """
        while self._left:
            if self._needs(self._left[-1]):
                return True
            self._left.pop()
        self._left = [partition for partition in self._partitions() if self._needs(partition)]
        return bool(self._left)

    def count(self) -> int:
        return sum(map(self._needs, self._partitions()))
