"""Elections that somebody asked for: which partitions still wait for theirs. Mutable, owned by one ``Controller``.

A request is a node in ZooKeeper, and a level like the others: it stands until the controller has deleted it, which
tells the requester that each of its partitions was looked at and that whatever followed is written. A partition that
is being written or read is looked at when the answer comes. A new controller begins a request anew: leaders that are
right are left alone then.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from sparklog.controller.cluster_state import Partition
from sparklog.controller.events import ElectionAsked


class ElectionRequests:
    """``wants`` is what an election of this partition may do; ``settled`` names the requests that are carried out."""

    def __init__(self) -> None:
        #: Kind, and partitions that are left, in the order they were found in: a term replays exactly.
        self._open: dict[str, tuple[str, dict[Partition, None]]] = {}
        self._by_partition: dict[Partition, set[str]] = {}
        #: Carried out; the node is being deleted.
        self._done: set[str] = set()

    @property
    def idle(self) -> bool:
        return not self._open

    def read(
        self,
        asked: Mapping[str, ElectionAsked],
        find: Callable[[ElectionAsked], Iterable[Partition]],
    ) -> list[Partition]:
        """All requests there are. Returns the partitions that new ones concern, as ``find`` finds them."""
        self._done.intersection_update(asked)
        for name in [name for name in self._open if name not in asked]:
            self._withdraw(name)
        fresh: list[Partition] = []
        for name, request in asked.items():
            if name in self._open or name in self._done:
                continue
            concerned = dict.fromkeys(find(request))
            self._open[name] = (request.kind, concerned)
            for partition in concerned:
                self._by_partition.setdefault(partition, set()).add(name)
            fresh += concerned
        return fresh

    def wants(self, partition: Partition, kind: str) -> bool:
        names = self._by_partition.get(partition)
        return names is not None and any(self._open[name][0] == kind for name in names)

    def satisfied(self, partition: Partition, *, only: str = "", but: str = "") -> None:
        """There is nothing left to do for it: for requests of any kind, ``only`` of one, or of all ``but`` one."""
        names = self._by_partition.get(partition)
        if names is None:
            return
        for name in list(names):
            kind, concerned = self._open[name]
            if kind != but and only in {"", kind}:
                names.discard(name)
                concerned.pop(partition, None)
        if not names:
            del self._by_partition[partition]

    def settled(self) -> list[str]:
        """Requests without open partitions; each is returned once."""
        names = [name for name, (_, concerned) in self._open.items() if not concerned]
        for name in names:
            del self._open[name]
            self._done.add(name)
        return names

    def _withdraw(self, name: str) -> None:
        _, concerned = self._open.pop(name)
        for partition in concerned:
            names = self._by_partition[partition]
            names.discard(name)
            if not names:
                del self._by_partition[partition]
