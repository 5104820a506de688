"""How far one follower is, as its leader sees it within one leader epoch.

A fetch from offset X says that everything below X is on the follower's log, for the incarnation that made the fetch.
A new incarnation may have lost its page cache: what the old one held counts no more until the new one has fetched.
"""

from __future__ import annotations

from dataclasses import dataclass

#: ``Progress.log_end`` while nothing is known: below every offset, so that it holds the high watermark.
UNKNOWN_END = -1


@dataclass(slots=True)
class Progress:
    """Mutable, owned by one ``Leader``; made anew for each epoch, with a fresh lag clock."""

    #: of the process that fetches; -1 before the first fetch unless the table of live brokers told
    incarnation: int
    #: when this follower was last known to hold all the leader held
    caught_up_ms: int
    #: next offset it will fetch, UNKNOWN_END before the first fetch in this epoch
    log_end: int = UNKNOWN_END
    #: the leader's log end when the last fetch came, and when that was
    leader_end_at_fetch: int = 0
    fetched_ms: int = 0
    #: when its connection was lost, None while it is there
    disconnected_ms: int | None = None
    #: not to be proposed for the ISR before this time
    retry_ms: int = 0

    def fetched(self, offset: int, leader_end: int, *, now_ms: int) -> None:
        """Note a fetch. Who reaches what the leader held at the fetch before was caught up then: a follower under
        steady load never sees the very end. Source: Kafka ``Replica.updateFetchStateOrThrow``."""
        if offset >= leader_end:
            self.caught_up_ms = now_ms
        elif offset >= self.leader_end_at_fetch and self.fetched_ms > self.caught_up_ms:
            self.caught_up_ms = self.fetched_ms
        self.log_end = offset
        self.leader_end_at_fetch = leader_end
        self.fetched_ms = now_ms
        self.disconnected_ms = None

    def reincarnated(self, incarnation: int) -> None:
        """Another process took over the broker id: forget what the old one held. The lag clock runs on."""
        self.incarnation = incarnation
        self.log_end = UNKNOWN_END
        self.leader_end_at_fetch = 0
        self.fetched_ms = 0
        self.retry_ms = 0
        self.disconnected_ms = None
