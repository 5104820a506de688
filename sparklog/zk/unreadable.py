"""ZooKeeper nodes that this release cannot read: they are skipped, counted and reported.

A ZooKeeper without ACLs accepts writes of any client, and a later release may write values that this release does not
know. One such node must not prevent the controller from reading all others.
"""

from __future__ import annotations

import logging

log = logging.getLogger(__name__)

#: The number of nodes whose last report is kept, so that a node is not reported again at each read.
_REMEMBERED = 1000
#: An upper bound of broker ids and partition numbers.
_END = 2**31


class Unreadable:
    """A tracker of the nodes that a store has skipped because this release cannot read them. It also logs them.

    ``count`` is the number of reads that skipped a node. Not thread-safe: use it only on the event loop of the store's
    session.
    """

    def __init__(self) -> None:
        self.count = 0
        self._reported: dict[str, str] = {}

    def skip(self, path: str, why: object) -> None:
        """Count the node at ``path`` as skipped. Log the reason, unless it was already logged for this node."""
        self.count += 1
        reason = str(why) if path in str(why) else f"ZooKeeper node {path}: {why}"
        if self._reported.pop(path, None) != reason:
            # Escape the path, so that a node's name cannot forge log lines.
            shown = "".join(c if c.isprintable() else ascii(c)[1:-1] for c in reason)
            log.error("%s; skipping the node until it is repaired or removed", shown)
        self._reported[path] = reason
        if len(self._reported) > _REMEMBERED:
            del self._reported[next(iter(self._reported))]

    def numbers(self, parent: str, names: tuple[str, ...]) -> list[int]:
        """Return the sorted numbers among ``names``, the names of the children of ``parent``.

        Count each other child as skipped.
        """
        found = []
        for name in names:
            if name.isascii() and name.isdigit() and len(name) <= 10 and str(int(name)) == name and int(name) < _END:
                found.append(int(name))
            else:
                self.skip(f"{parent}/{name}", "its name is no id")
        return sorted(found)
