"""Leaderships that leave brokers which stop, some at a time. Mutable, owned by one ``Controller``.

A partition that is moved cannot be written to from when its old leader hears of it until the new one has. Thousands
that are moved at once keep the brokers' loops from hearing of it, and wait for one another. So no more are under way
than brokers take in quickly; the next ones begin when half of these have been told, so that meanwhile ZooKeeper has
something to write. Nothing waits for a broker that does not answer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import islice

from sparklog.controller.cluster_state import Partition

_AT_ONCE = 500
_PATIENCE_MS = 500


class PendingMoves:
    def __init__(self) -> None:
        #: Decided, and not known to be told.
        self._begun: dict[Partition, None] = {}
        self._held: dict[Partition, None] = {}
        self._begun_at_ms = 0

    @property
    def idle(self) -> bool:
        return not self._held

    @property
    def deadline_ms(self) -> int | None:
        return self._begun_at_ms + _PATIENCE_MS if self._held else None

    def hold(self, partitions: Iterable[Partition]) -> None:
        """They are to be moved: among those that ``next_ones`` gives."""
        self._held.update(dict.fromkeys(partitions))

    def begin(self, partition: Partition, now_ms: int) -> bool:
        """Whether it may be moved now; else it is among those that ``next_ones`` gives later."""
        if len(self._begun) >= _AT_ONCE:
            self._held[partition] = None
            return False
        self._held.pop(partition, None)
        self._begun[partition] = None
        self._begun_at_ms = now_ms
        return True

    def forget(self, partition: Partition) -> None:
        self._begun.pop(partition, None)
        self._held.pop(partition, None)

    def next_ones(self, now_ms: int, told: Callable[[Partition], bool]) -> list[Partition]:
        """Those to look at again, as many as may begin: once most of those before are written and ``told``, or have had
        their time."""
        if not self._held or now_ms >= self._begun_at_ms + _PATIENCE_MS:
            self._begun.clear()
        else:
            self._forget_told(told)
        if len(self._begun) > _AT_ONCE // 2:
            return []
        chosen = list(islice(self._held, _AT_ONCE - len(self._begun)))
        for partition in chosen:
            del self._held[partition]
        return chosen

    def _forget_told(self, told: Callable[[Partition], bool]) -> None:
        """From the one that was begun first on, up to one that is not told: they are told in that order."""
        done = []
        for partition in self._begun:
            if partition.pending is not None or not told(partition):
                break
            done.append(partition)
        for partition in done:
            del self._begun[partition]
