"""How fast a broker copies partitions that are being moved to it, so that a move does not take the network from others.

``TokenBucket`` is the rate, pure. ``CopyThrottle`` holds partitions back while there are no tokens: they are left out
of the fetch sessions and brought back one by one, so that other partitions of the same sessions wait for nothing.
Limited are only replicas that a move adds and that are not in sync yet: a member of the ISR held back would hold
producers back. A replica that has reached the high watermark may be one, for its leader adds it and only the controller
tells it: it is not held any more either (``fetcher.py``).
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

from sparklog.broker.state import BrokerState
from sparklog.model import TopicPartition
from sparklog.protocol.messages import PartitionDecision

#: A limited partition asks for so much of a second's bytes at a time, but not for less than the second number.
_SHARE = 10
_LEAST_BYTES = 16 * 1024
#: Unused time that may be made up for: an event loop or a leader that was busy for a moment costs no bytes.
_BURST_S = 0.5
#: A pause is looked at again after so long at the latest: the limit may have been lifted meanwhile.
_LONGEST_PAUSE_S = 1.0


def limit_of(move: PartitionDecision, broker_id: int) -> int:
    """Bytes per second at which ``broker_id`` may copy the partition; 0: as fast as it can."""
    adding = broker_id in move.target and broker_id not in move.original and broker_id not in move.state.isr
    return move.throttle_bytes if adding else 0


class TokenBucket:
    """Bytes per second, on average from the first byte on. What comes is counted after it has come, so the balance may
    be in debt; nothing more is to be asked for before that is paid. Times are seconds of any clock that never goes
    back."""

    def __init__(self, rate: int, now_s: float, *, burst_s: float = _BURST_S) -> None:
        assert rate > 0
        self.rate = rate
        self._burst_s = burst_s
        self._balance = 0.0
        self._at_s = now_s

    def set_rate(self, rate: int, now_s: float) -> None:
        """A debt stays a debt, and is paid at the new rate."""
        assert rate > 0
        self._settle(now_s)
        self.rate = rate

    def take(self, count: int, now_s: float) -> None:
        self._settle(now_s)
        self._balance -= count

    def wait_s(self, now_s: float) -> float:
        """How long until there is no debt; 0: there is none."""
        self._settle(now_s)
        return max(0.0, -self._balance / self.rate)

    def spare(self, now_s: float) -> float:
        """Bytes that may be asked for at once."""
        self._settle(now_s)
        return max(0.0, self._balance)

    def _settle(self, now_s: float) -> None:
        earned = max(0.0, now_s - self._at_s) * self.rate
        self._balance = min(self._balance + earned, self.rate * self._burst_s)
        self._at_s = max(self._at_s, now_s)


class CopyThrottle:
    """One for all fetchers of a broker, as the limit is the broker's. Owner: its event loop; ``close`` ends it.

    Where moves have different limits the smallest counts for all that have one.
    """

    def __init__(self, broker: BrokerState) -> None:
        self._broker = broker
        self._bucket: TokenBucket | None = None
        self._limits: dict[TopicPartition, int] = {}
        self._moves_seen = -1
        self._held: deque[tuple[TopicPartition, Callable[[], None]]] = deque()
        #: Let go, and nothing has come of it yet.
        self._awaited = 0
        self._timer: asyncio.TimerHandle | None = None
        self._closed = False

    def close(self) -> None:
        self._closed = True
        self._held.clear()
        self._disarm()

    def limit(self, tp: TopicPartition) -> int:
        """Bytes per second for this partition together with all that are limited; 0: not limited."""
        self._look()
        if self._bucket is None or tp not in self._limits:
            return 0
        return self._bucket.rate

    def max_bytes(self, limit: int, otherwise: int) -> int:
        """What one request asks for in a partition of this limit; ``otherwise``: in one of none."""
        return min(max(limit // _SHARE, _LEAST_BYTES), otherwise) if limit else otherwise

    def received(self, count: int) -> None:
        """Bytes of a limited partition have come."""
        if self._bucket is not None:
            self._bucket.take(count, self._now_s())
        self._awaited = max(self._awaited - 1, 0)
        if self._held and not self._closed:
            # It is known now what the last one brought; it may be less than was allowed for.
            self._disarm()
            self._arm(0.0)

    @property
    def exhausted(self) -> bool:
        """A limited partition is to be held. Also while others are: who comes again stands behind them."""
        return bool(self._held) or (self._bucket is not None and self._bucket.wait_s(self._now_s()) > 0)

    def hold(self, tp: TopicPartition, resume: Callable[[], None]) -> None:
        """Call ``resume`` when it is this partition's turn, or when it is limited no more."""
        self._held.append((tp, resume))
        if self._timer is None:
            self._arm(0.0)

    def _arm(self, least_s: float) -> None:
        wait_s = max(self._bucket.wait_s(self._now_s()), least_s) if self._bucket is not None else 0.0
        self._timer = asyncio.get_running_loop().call_later(min(wait_s, _LONGEST_PAUSE_S), self._tick)

    def _disarm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _tick(self) -> None:
        self._timer = None
        self._release()
        bucket, least_s = self._bucket, 0.0
        if bucket is not None and self._held and bucket.wait_s(self._now_s()) <= 0:
            share = self.max_bytes(bucket.rate, bucket.rate)
            # More than one where time has been lost; less those whose bytes have not come yet.
            for _ in range(min(len(self._held), max(1, int(bucket.spare(self._now_s()) / share) - self._awaited))):
                self._awaited += 1
                self._held.popleft()[1]()
            # What they bring is not known before it has come: the next one waits for as long as that should last.
            least_s = share / bucket.rate
        if self._held:
            self._arm(least_s)

    def _release(self) -> None:
        """Let go of those that are limited no more: one that is in sync by now would hold producers back."""
        self._look()
        held, self._held = self._held, deque()
        for tp, resume in held:
            if tp in self._limits:
                self._held.append((tp, resume))
            else:
                resume()

    def metadata_changed(self) -> None:
        """The controller has spoken: somebody's limit may be another."""
        if self._held and not self._closed and self._moves_seen != self._broker.cache.moves_seen:
            self._release()
            self._disarm()
            if self._held:
                self._arm(0.0)

    def _look(self) -> None:
        """Take over limits that have changed."""
        cache = self._broker.cache
        if self._moves_seen == cache.moves_seen:
            return
        self._moves_seen = cache.moves_seen
        found = ((tp, limit_of(move, self._broker.broker_id)) for tp, move in cache.moving.items())
        self._limits = {tp: limit for tp, limit in found if limit}
        if not self._limits:
            self._bucket = None
            return
        rate = min(self._limits.values())
        if self._bucket is None:
            self._bucket = TokenBucket(rate, self._now_s())
        elif self._bucket.rate != rate:
            self._bucket.set_rate(rate, self._now_s())

    def _now_s(self) -> float:
        return self._broker.now_ms() / 1000
