"""The limit of open segment files: tens of thousands of partitions share a few hundred descriptors.

The least recently used segments are closed first. Closing loses nothing, because all state of a segment is on disk.
"""

from __future__ import annotations

import resource
from collections import OrderedDict
from typing import Protocol

#: Descriptors reserved for sockets and everything else in the process.
_RESERVED = 512
#: The part of these that clients cannot use: listening sockets, ZooKeeper, followed leaders, checkpoints, logs, the
#: loop.
_OWN = 128
#: More descriptors than this are of no use to one broker.
_ENOUGH = 65_536
#: Data file, index file, and the duplicate for a memory map.
_PER_SEGMENT = 3


class Closable(Protocol):
    def close(self) -> None: ...


class OpenFiles:
    """The segments of one log directory with open files. Owned by the event loop."""

    def __init__(self, limit: int | None = None) -> None:
        self.limit = limit if limit is not None else _default_limit()
        self._open: OrderedDict[Closable, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._open)

    def opened(self, segment: Closable) -> None:
        """Record that ``segment`` opened its files. Close those of others if the limit is exceeded."""
        self._open[segment] = None
        while len(self._open) > self.limit:
            self._open.popitem(last=False)[0].close()

    def used(self, segment: Closable) -> None:
        self._open.move_to_end(segment)

    def closed(self, segment: Closable) -> None:
        self._open.pop(segment, None)


def raise_descriptor_limit() -> None:
    """Raise the limit of descriptors to the process's maximum. Shells and service managers start it with fewer."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _ENOUGH if hard == resource.RLIM_INFINITY else min(hard, _ENOUGH)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def descriptors_for_clients() -> int:
    """Return the number of connections that fit while the most segments are open.

    One more would use a log's descriptor.
    """
    soft, _hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    return max(16, soft - _PER_SEGMENT * _default_limit() - _OWN)


def _default_limit() -> int:
    soft, _hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    return max(16, min(4096, (soft - _RESERVED) // _PER_SEGMENT))
