"""Controlled shutdown: a stopping broker waits until it leads no partition, and then until no ISR contains it.

Before the broker announces the stop, it waits until its in-sync followers have all records that it has acknowledged,
including those with acks=1. If a follower became leader without the last records, all replicas would truncate them.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from sparklog.broker.context import BrokerContext
from sparklog.broker.lifecycle.cached_any import CachedAny
from sparklog.broker.lifecycle.zk_registration import ZkRegistration
from sparklog.broker.replication.partitions import Partitions
from sparklog.errors import SparklogError

_log = logging.getLogger(__name__)

#: The time for which changes are gathered before the next check, because a check may visit all partitions.
_NEWS_S = 0.03
#: The pause between two checks whether followers have caught up: they fetch each record within milliseconds.
_LOOK_S = 0.005
#: The share of the stop's time in which followers may catch up, so that a follower that hangs does not use all of it.
_SHARE_TO_CATCH_UP = 0.5


async def hand_over(
    context: BrokerContext, partitions: Partitions, registry: ZkRegistration, *, may_continue: Callable[[], bool]
) -> None:
    """Wait until no partition needs this broker, the time is up, or ``may_continue`` returns false.

    Leaderships move first, then the ISRs shrink. If the broker ended while an ISR contained it, that partition's writes
    would have to wait for it.
    """
    movable = CachedAny(partitions.leading, partitions.movable)
    counted_on = CachedAny(lambda: partitions, partitions.counted_on)

    def needed() -> bool:
        # The controller removes this broker from ISRs once this broker leads no partition.
        if partitions.led:
            return movable.any()
        # A controller of an earlier release does not send ``relieved``. Its updates still contain every ISR.
        return not context.cache.relieved and counted_on.any()

    async def relieved() -> None:
        await followers_caught_up(context, partitions, timeout_s * _SHARE_TO_CATCH_UP, may_continue=may_continue)
        await registry.announce_stopping()
        while needed() and may_continue():
            news = {context.next_role_change(), context.next_metadata()}
            await asyncio.wait(news, return_when=asyncio.FIRST_COMPLETED)
            if not context.cache.relieved:
                await asyncio.sleep(_NEWS_S)

    timeout_s = context.config.controlled_stop_timeout_ms / 1000
    try:
        await asyncio.wait_for(relieved(), timeout_s)
    except (asyncio.TimeoutError, SparklogError) as error:
        detail = str(error) or f"still after {timeout_s:g} s"
        left = f"leading {partitions.led} partitions, in the ISR of {counted_on.count()} others"
        _log.warning("stopping while %s: %s", left, detail)


async def followers_caught_up(
    context: BrokerContext, partitions: Partitions, timeout_s: float, *, may_continue: Callable[[], bool]
) -> None:
    """Wait until in-sync followers have all records that this broker's leaders have now, for at most ``timeout_s``.

    Produce requests that arrive meanwhile get their response only after the followers have the records: see
    ``BrokerContext.moves_leaderships``.
    """
    ends = {partition: partition.log.log_end_offset for partition in partitions.leading()}
    behind = CachedAny(
        lambda: ends,
        lambda partition: partition.replica.replicated_end < ends[partition] and partitions.movable(partition),
    )
    ends_at_ms = context.now_ms() + int(timeout_s * 1000)
    while behind.any() and may_continue():
        if context.now_ms() >= ends_at_ms:
            _log.warning("followers of %d partitions did not catch up within %g s", behind.count(), timeout_s)
            return
        await asyncio.sleep(_LOOK_S)
