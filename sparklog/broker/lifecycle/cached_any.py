"""Which of a stopping broker's partitions still need it: looked at often, while they become fewer.

There may be ten thousand, and news come every few milliseconds: counting them all each time took more of the processor
than all else a stop asks of the broker that goes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from sparklog.broker.replication.partition import Partition


class CachedAny:
    """Owner: the broker's event loop."""

    def __init__(self, partitions: Callable[[], Iterable[Partition]], needs: Callable[[Partition], bool]) -> None:
        """``partitions`` gives those that may; ``needs`` says of one whether it still does."""
        self._partitions = partitions
        self._needs = needs
        self._left: list[Partition] = []

    def any(self) -> bool:
        """Whether there is one. As long as those seen last are some, no others are looked at."""
        while self._left:
            if self._needs(self._left[-1]):
                return True
            self._left.pop()
        self._left = [partition for partition in self._partitions() if self._needs(partition)]
        return bool(self._left)

    def count(self) -> int:
        return sum(map(self._needs, self._partitions()))
