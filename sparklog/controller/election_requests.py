"""Open requests for elections, each with the partitions that the controller still has to evaluate.

The objects of this module are not thread-safe: they are parts of ``Controller``. An election request is a node in
ZooKeeper, and each read returns all election requests. A request exists until the controller deletes it. The deletion
notifies the requester that the controller has evaluated each partition of the request and that all resulting writes are
durable. A partition with a write or read in flight is evaluated when the result arrives. A new controller evaluates all
partitions of an open request again, but changes no partition that already has the requested leader.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from sparklog.controller.cluster_state import ClusterPartition
from sparklog.controller.events import ElectionRequested


class OpenElectionRequests:
    """A tracker of election requests. It knows which partitions are not evaluated yet, and which requests are done."""

    def __init__(self) -> None:
        #: For each request its kind and remaining partitions. The partitions have a fixed order, so that a term can be
        #: replayed exactly.
        self._open: dict[str, tuple[str, dict[ClusterPartition, None]]] = {}
        self._by_partition: dict[ClusterPartition, set[str]] = {}
        #: Finished requests, whose nodes are being deleted.
        self._done: set[str] = set()

    @property
    def idle(self) -> bool:
        return not self._open

    def read(
        self,
        asked: Mapping[str, ElectionRequested],
        find: Callable[[ElectionRequested], Iterable[ClusterPartition]],
    ) -> list[ClusterPartition]:
        """Replace the known election requests by ``asked``, which has all current ones.

        Return the partitions of the new requests. ``find`` returns the partitions of one request.
        """
        self._done.intersection_update(asked)
        for name in [name for name in self._open if name not in asked]:
            self._withdraw(name)
        fresh: list[ClusterPartition] = []
        for name, request in asked.items():
            if name in self._open or name in self._done:
                continue
            concerned = dict.fromkeys(find(request))
            self._open[name] = (request.kind, concerned)
            for partition in concerned:
                self._by_partition.setdefault(partition, set()).add(name)
            fresh += concerned
        return fresh

    def wants(self, partition: ClusterPartition, kind: str) -> bool:
        names = self._by_partition.get(partition)
        return names is not None and any(self._open[name][0] == kind for name in names)

    def satisfied(self, partition: ClusterPartition, *, only: str = "", but: str = "") -> None:
        """Remove the partition from its requests.

        If ``only`` is given, remove it only from requests of this kind. If ``but`` is given, keep it in requests of
        that kind.
        """
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
        """Return the names of the requests with no remaining partitions. Each request is returned only once."""
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
