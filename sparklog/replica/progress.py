"""The progress of one follower in one leader epoch, as its leader knows it.

A fetch from offset X proves that the follower's log has all records below X, but only for the incarnation that sent the
fetch. A new incarnation may have lost its page cache. So the progress of the old incarnation is dropped, and the new
incarnation has no progress until it fetches.
"""

from __future__ import annotations

from dataclasses import dataclass

#: ``Progress.log_end`` before the first fetch. It is below every offset, so the high watermark cannot rise.
UNKNOWN_END = -1


@dataclass(slots=True)
class Progress:
    """The progress of one follower in one leader epoch: its log end, and when it last had all records.

    A part of ``LeaderRole``; mutable. For each epoch the leader creates new objects, whose lag times start with the
    epoch.
    """

    #: The incarnation that fetches. It is -1 before the first fetch if the broker was not in the table of live brokers.
    incarnation: int
    #: The last time at which the follower had all records of the leader.
    caught_up_ms: int
    #: The follower's log end offset, from its last fetch. UNKNOWN_END before its first fetch in this epoch.
    log_end: int = UNKNOWN_END
    #: The leader's log end offset at the follower's last fetch, and the time of that fetch.
    leader_end_at_fetch: int = 0
    fetched_ms: int = 0
    #: The time at which the follower's connection was lost, or None.
    disconnected_ms: int | None = None
    #: The earliest time to add the follower to the ISR.
    retry_ms: int = 0

    def fetched(self, offset: int, leader_end: int, *, now_ms: int) -> None:
        """Record a fetch from ``offset``, at a time when the leader's log ends at ``leader_end``.

        A fetch may reach the offset at which the leader's log ended at the previous fetch. Then the follower was caught
        up at the time of the previous fetch. This rule is necessary because under steady load a follower never reaches
        the current end. Source: Kafka ``Replica.updateFetchStateOrThrow``.
        """
        if offset >= leader_end:
            self.caught_up_ms = now_ms
        elif offset >= self.leader_end_at_fetch and self.fetched_ms > self.caught_up_ms:
            self.caught_up_ms = self.fetched_ms
        self.log_end = offset
        self.leader_end_at_fetch = leader_end
        self.fetched_ms = now_ms
        self.disconnected_ms = None

    def reincarnated(self, incarnation: int) -> None:
        """Drop the progress, because a new incarnation of the broker has registered.

        The lag time continues.
        """
        self.incarnation = incarnation
        self.log_end = UNKNOWN_END
        self.leader_end_at_fetch = 0
        self.fetched_ms = 0
        self.retry_ms = 0
        self.disconnected_ms = None
