"""The progress of one follower, as its leader sees it within one leader epoch.

A fetch from offset X proves that the follower's log has everything below X, for the incarnation that sent the fetch. A
new incarnation may have lost its page cache. So the old progress does not count before the new incarnation has fetched.
"""

from __future__ import annotations

from dataclasses import dataclass

#: ``Progress.log_end`` before the first fetch. It is below every offset, so it holds the high watermark back.
UNKNOWN_END = -1


@dataclass(slots=True)
class Progress:
    """The progress of one follower.

    Mutable; one ``LeaderRole`` owns it. Each epoch makes a new one with a new lag clock.
    """

    #: The incarnation that fetches. -1 before the first fetch if the table of live brokers lacks the broker.
    incarnation: int
    #: The last time at which this follower had all records of the leader.
    caught_up_ms: int
    #: The next offset that it will fetch. UNKNOWN_END before the first fetch in this epoch.
    log_end: int = UNKNOWN_END
    #: The leader's log end offset at the last fetch, and the time of that fetch.
    leader_end_at_fetch: int = 0
    fetched_ms: int = 0
    #: The time at which its connection was lost. None: it is connected.
    disconnected_ms: int | None = None
    #: The earliest time to propose it for the ISR.
    retry_ms: int = 0

    def fetched(self, offset: int, leader_end: int, *, now_ms: int) -> None:
        """Record a fetch.

        A follower that reaches the log end of the fetch before was caught up at that fetch: under steady load it never
        sees the current end. Source: Kafka ``Replica.updateFetchStateOrThrow``.
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
        """Drop the progress of the old process, because another one has taken the broker id.

        The lag clock continues.
        """
        self.incarnation = incarnation
        self.log_end = UNKNOWN_END
        self.leader_end_at_fetch = 0
        self.fetched_ms = 0
        self.retry_ms = 0
        self.disconnected_ms = None
