"""The limit of open segment files: tens of thousands of partitions share at most a few thousand file descriptors.

The files of the least recently used segments are closed first. A segment opens its files again at the next use.
"""

from __future__ import annotations

import resource
from collections import OrderedDict
from typing import Protocol

#: Descriptors reserved for sockets and everything else in the process.
_RESERVED = 512
#: The part of ``_RESERVED`` that clients cannot use. The broker needs these descriptors for listening sockets,
#: ZooKeeper, connections to leaders, checkpoints, the broker's own log files and the event loop.
_OWN = 128
#: A number of descriptors that is enough for any broker.
_ENOUGH = 65_536
#: The descriptors of an open segment: data file, index file, and the duplicate of a memory map.
_PER_SEGMENT = 3


class Closable(Protocol):
    """The part of a segment that ``OpenFiles`` uses."""

    def close(self) -> None: ...


class OpenFiles:
    """A limiter of the number of segments with open files: it closes the files of the least recently used segments.

    Not thread-safe: use it only on the broker's event loop.
    """

    def __init__(self, limit: int | None = None) -> None:
        self.limit = limit if limit is not None else _default_limit()
        self._open: OrderedDict[Closable, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._open)

    def opened(self, segment: Closable) -> None:
        """Record that ``segment`` has opened its files.

        If the limit is exceeded, close the files of the least recently used segments.
        """
        self._open[segment] = None
        while len(self._open) > self.limit:
            self._open.popitem(last=False)[0].close()

    def used(self, segment: Closable) -> None:
        self._open.move_to_end(segment)

    def closed(self, segment: Closable) -> None:
        self._open.pop(segment, None)


def raise_descriptor_limit() -> None:
    """Raise the process's soft limit of open files to the hard limit, but at most to 65,536."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _ENOUGH if hard == resource.RLIM_INFINITY else min(hard, _ENOUGH)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def descriptors_for_clients() -> int:
    """Return the number of client connections that are possible while the maximum number of segments is open.

    More connections would use descriptors that logs need.
    """
    soft, _hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    return max(16, soft - _PER_SEGMENT * _default_limit() - _OWN)


def _default_limit() -> int:
    soft, _hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    return max(16, min(4096, (soft - _RESERVED) // _PER_SEGMENT))
