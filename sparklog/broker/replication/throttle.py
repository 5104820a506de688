"""A limit for the rate at which a broker copies partitions that a reassignment moves to it.

The limit leaves bandwidth for other work. ``TokenBucket`` is a pure object that measures the rate. ``CopyThrottle``
delays partitions while the bucket is empty. Delayed partitions are removed from the fetch sessions and return one by
one, so other partitions of the same sessions do not wait.

The limit applies only to replicas that a reassignment adds and that are not in sync yet, because producers wait for
members of the ISR. A replica that has reached the high watermark may already be in the ISR: its leader adds it, and
this broker learns of that later, from the controller. So ``fetcher.py`` does not delay such a replica either.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

from sparklog.broker.context import BrokerContext
from sparklog.model import TopicPartition
from sparklog.protocol.messages import PartitionDecision

#: One request for a limited partition asks for a tenth of the bytes of one second, but for at least ``_LEAST_BYTES``.
_SHARE = 10
_LEAST_BYTES = 16 * 1024
#: The capacity of the bucket, as a time in seconds at the full rate. The bytes that a short delay of the event loop or
#: of a leader leaves in the bucket may be requested later, so such a delay does not lower the average rate.
_BURST_S = 0.5
#: The maximum wait of a delayed partition until the next check, because the limit may be removed meanwhile.
_LONGEST_PAUSE_S = 1.0


def limit_of(move: PartitionDecision, broker_id: int) -> int:
    """Return the limit in bytes per second at which ``broker_id`` may copy the partition; 0 means no limit."""
    adding = broker_id in move.target and broker_id not in move.original and broker_id not in move.state.isr
    return move.throttle_bytes if adding else 0


class TokenBucket:
    """A token bucket for a rate in bytes per second.

    Bytes are counted after they have arrived, so the balance may be negative. The next request must wait until the
    balance is at least 0. All times are seconds of the same monotonic clock.
    """

    def __init__(self, rate: int, now_s: float, *, burst_s: float = _BURST_S) -> None:
        assert rate > 0
        self.rate = rate
        self._burst_s = burst_s
        self._balance = 0.0
        self._at_s = now_s

    def set_rate(self, rate: int, now_s: float) -> None:
        """Change the rate. A negative balance stays, and is paid off at the new rate."""
        assert rate > 0
        self._settle(now_s)
        self.rate = rate

    def consume(self, count: int, now_s: float) -> None:
        self._settle(now_s)
        self._balance -= count

    def wait_s(self, now_s: float) -> float:
        """Return the time in seconds until the balance is no longer negative."""
        self._settle(now_s)
        return max(0.0, -self._balance / self.rate)

    def spare(self, now_s: float) -> float:
        """Return the number of bytes that may be requested at once."""
        self._settle(now_s)
        return max(0.0, self._balance)

    def _settle(self, now_s: float) -> None:
        earned = max(0.0, now_s - self._at_s) * self.rate
        self._balance = min(self._balance + earned, self.rate * self._burst_s)
        self._at_s = max(self._at_s, now_s)


class CopyThrottle:
    """A throttle for copies, which all fetchers of a broker share, because the limit is per broker.

    If reassignments have different limits, the smallest one applies to all reassignments with a limit. Not thread-safe:
    use it on the broker's event loop, until ``close``.
    """

    def __init__(self, context: BrokerContext) -> None:
        self._context = context
        self._bucket: TokenBucket | None = None
        self._limits: dict[TopicPartition, int] = {}
        self._moves_seen = -1
        self._held: deque[tuple[TopicPartition, Callable[[], None]]] = deque()
        #: The number of partitions that were resumed and whose bytes have not arrived yet.
        self._awaited = 0
        self._timer: asyncio.TimerHandle | None = None
        self._closed = False

    def close(self) -> None:
        self._closed = True
        self._held.clear()
        self._disarm()

    def limit(self, tp: TopicPartition) -> int:
        """Return the limit in bytes per second that ``tp`` shares with all limited partitions; 0 means no limit."""
        self._refresh_limits()
        if self._bucket is None or tp not in self._limits:
            return 0
        return self._bucket.rate

    def max_bytes(self, limit: int, otherwise: int) -> int:
        """Return the maximum number of bytes that one request may ask for in a partition with this limit.

        If ``limit`` is 0, the result is ``otherwise``.
        """
        return min(max(limit // _SHARE, _LEAST_BYTES), otherwise) if limit else otherwise

    def received(self, count: int) -> None:
        """Count bytes that have arrived for a limited partition."""
        if self._bucket is not None:
            self._bucket.consume(count, self._now_s())
        self._awaited = max(self._awaited - 1, 0)
        if self._held and not self._closed:
            # The size of the last response is known now. It may be smaller than requested, so the next partition may
            # continue earlier.
            self._disarm()
            self._arm(0.0)

    @property
    def exhausted(self) -> bool:
        """Return whether a limited partition must wait, because the bucket is empty or others wait already."""
        return bool(self._held) or (self._bucket is not None and self._bucket.wait_s(self._now_s()) > 0)

    def hold(self, tp: TopicPartition, resume: Callable[[], None]) -> None:
        """Delay the partition: call ``resume`` later, when the partition's turn comes or it is no longer limited."""
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
            # Resume more than one partition if time was lost. Subtract those that were resumed and whose bytes have not
            # arrived.
            for _ in range(min(len(self._held), max(1, int(bucket.spare(self._now_s()) / share) - self._awaited))):
                self._awaited += 1
                self._held.popleft()[1]()
            # The size of their responses is not known yet, so the next partition waits for the time that their bytes
            # should take.
            least_s = share / bucket.rate
        if self._held:
            self._arm(least_s)

    def _release(self) -> None:
        """Resume waiting partitions that no longer have a limit. Producers may already wait for such a replica."""
        self._refresh_limits()
        held, self._held = self._held, deque()
        for tp, resume in held:
            if tp in self._limits:
                self._held.append((tp, resume))
            else:
                resume()

    def metadata_changed(self) -> None:
        """Read the limits again after an update of the controller, and resume partitions that are no longer limited."""
        if self._held and not self._closed and self._moves_seen != self._context.cache.moves_seen:
            self._release()
            self._disarm()
            if self._held:
                self._arm(0.0)

    def _refresh_limits(self) -> None:
        """Read the limits again if the reassignments in the metadata have changed."""
        cache = self._context.cache
        if self._moves_seen == cache.moves_seen:
            return
        self._moves_seen = cache.moves_seen
        found = ((tp, limit_of(move, self._context.broker_id)) for tp, move in cache.moving.items())
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
        return self._context.now_ms() / 1000
