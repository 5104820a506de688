"""A broker that is going to stop waits until nobody counts on it: first for successors, then to be left out.

Before it says so, whoever may succeed it has all it was ever acknowledged for, with acks=1 too: a follower that leads
next without the leader's last records would have them cut everywhere."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from sparklog.broker.lifecycle.cached_any import CachedAny
from sparklog.broker.state import BrokerState
from sparklog.errors import SparklogError

_log = logging.getLogger(__name__)

#: News that come within this time are looked at together: a look goes over all partitions, and each may have its own.
_NEWS_S = 0.03
#: Followers fetch without being asked, within milliseconds of each record.
_LOOK_S = 0.005
#: So much of the time for a stop may pass until followers have the leaders' logs; one that hangs is not waited for.
_SHARE_TO_CATCH_UP = 0.5


async def hand_over(broker: BrokerState, *, goes_on: Callable[[], bool]) -> None:
    """Wait until no partition needs this broker, as far as others can take over, or time is up, or the stop does not
    go on in this way. Leaders first; then the in-sync sets: whoever ends while leaders count on it stops their
    writes."""
    partitions = broker.partitions
    movable = CachedAny(partitions.leading, partitions.movable)
    counted_on = CachedAny(lambda: partitions, partitions.counted_on)

    def needed() -> bool:
        # Until it leads nothing the controller does not tell leaders that it goes.
        if partitions.led:
            return movable.any()
        # A controller of an earlier release does not say that, but tells of each in-sync set.
        return not broker.cache.relieved and counted_on.any()

    async def relieved() -> None:
        await followers_caught_up(broker, timeout_s * _SHARE_TO_CATCH_UP, goes_on=goes_on)
        await broker.registry.announce_stopping()
        while needed() and goes_on():
            news = {broker.next_role_change(), broker.next_metadata()}
            await asyncio.wait(news, return_when=asyncio.FIRST_COMPLETED)
            if not broker.cache.relieved:
                await asyncio.sleep(_NEWS_S)

    timeout_s = broker.config.controlled_stop_timeout_ms / 1000
    try:
        await asyncio.wait_for(relieved(), timeout_s)
    except (asyncio.TimeoutError, SparklogError) as error:
        detail = str(error) or f"still after {timeout_s:g} s"
        left = f"leading {partitions.led} partitions, counted on in {counted_on.count()}"
        _log.warning("stopping while %s: %s", left, detail)


async def followers_caught_up(broker: BrokerState, timeout_s: float, *, goes_on: Callable[[], bool]) -> None:
    """Wait until all in-sync replicas have what leaders here have now, for as long as ``timeout_s`` at most. What comes
    meanwhile is their business who answer for it: see ``BrokerState.hands_over``."""
    partitions = broker.partitions
    ends = {partition: partition.log.log_end_offset for partition in partitions.leading()}
    behind = CachedAny(
        lambda: ends,
        lambda partition: partition.replica.replicated_end < ends[partition] and partitions.movable(partition),
    )
    ends_at_ms = broker.now_ms() + int(timeout_s * 1000)
    while behind.any() and goes_on():
        if broker.now_ms() >= ends_at_ms:
            _log.warning("followers of %d partitions did not catch up within %g s", behind.count(), timeout_s)
            return
        await asyncio.sleep(_LOOK_S)
