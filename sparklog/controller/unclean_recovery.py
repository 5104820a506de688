"""Recovery of partitions whose ISR members all lost their page cache: requests for log ends, and the decision.

After a power failure no member of the ISR is certain to have the tail of its log. If an arbitrary member were elected,
records that another member still has would be lost. The controller therefore requests the log ends of all members. The
replica with the greatest (leader epoch of the last batch, log end offset) is elected. If all members have lost the
whole log, the controller also requests the log ends of the other live replicas. It waits without limit for absent
members, because their logs may be complete. It waits up to ``unclean.recovery.timeout.ms`` for live replicas that do
not respond.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from sparklog.controller.cluster_state import ClusterPartition

_REQUEST_EVERY_MS = 500


@dataclass(slots=True)
class _Search:
    members: tuple[int, ...]
    deadline_ms: int
    ends: dict[int, tuple[int, int]] = field(default_factory=dict)


class UncleanRecovery:
    """A tracker of the searches for the longest log, one per partition that needs recovery."""

    def __init__(self, timeout_ms: int) -> None:
        self._timeout_ms = timeout_ms
        self._searches: dict[ClusterPartition, _Search] = {}
        self._request_at_ms: int | None = None

    @property
    def deadline_ms(self) -> int | None:
        return self._request_at_ms

    def search(self, partition: ClusterPartition, members: tuple[int, ...], now_ms: int) -> None:
        """Start or continue the search for the longest log of the partition among ``members``."""
        found = self._searches.get(partition)
        if found is None:
            self._searches[partition] = _Search(members, now_ms + self._timeout_ms)
            self._request_at_ms = now_ms
        elif found.members != members:
            found.members = members
            found.ends = {member: end for member, end in found.ends.items() if member in members}
            self._request_at_ms = now_ms

    def give_up(self, partition: ClusterPartition) -> None:
        """End the search for a partition, if there is one, because the partition needs no recovery."""
        if self._searches:
            self._searches.pop(partition, None)

    def forget(self, broker_id: int) -> None:
        """Remove the known log ends of a broker that has a new incarnation."""
        for search in self._searches.values():
            search.ends.pop(broker_id, None)

    def on_log_end(self, broker_id: int, partition: ClusterPartition, end: tuple[int, int]) -> None:
        search = self._searches.get(partition)
        if search is not None and broker_id in search.members:
            search.ends[broker_id] = end

    def decided(self, partition: ClusterPartition, now_ms: int) -> Mapping[int, tuple[int, int]] | None:
        """Return the log ends of all members or, after a timeout, the log ends received so far.

        Return None while the search waits for log ends.
        """
        search = self._searches.get(partition)
        if search is None or not search.ends:
            return None
        complete = len(search.ends) == len(search.members)
        return search.ends if complete or now_ms >= search.deadline_ms else None

    def overdue(self, now_ms: int) -> list[ClusterPartition]:
        return [partition for partition, search in self._searches.items() if now_ms >= search.deadline_ms]

    def due_requests(self, live: Collection[int], now_ms: int) -> dict[int, list[ClusterPartition]]:
        """Return the brokers that must now receive requests for log ends, each with the partitions to request."""
        if self._request_at_ms is None or now_ms < self._request_at_ms:
            return {}
        questions: dict[int, list[ClusterPartition]] = {}
        for partition, search in self._searches.items():
            for member in search.members:
                if member in live and member not in search.ends:
                    questions.setdefault(member, []).append(partition)
        self._request_at_ms = now_ms + _REQUEST_EVERY_MS if self._searches else None
        return questions
