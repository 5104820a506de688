"""Controlled shutdown: a stopping broker waits until it leads no partition, and then until no ISR contains it.

Before the broker announces the stop, it waits until its in-sync followers have all records that it has acknowledged,
including those with acks=1. If a follower became leader without the last records, all replicas would truncate them.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable
from contextlib import suppress

from sparklog.broker.context import BrokerContext
from sparklog.broker.lifecycle.zk_registration import ZkRegistration
from sparklog.broker.replication.partition import Partition
from sparklog.broker.replication.partitions import Partitions
from sparklog.errors import SparklogError, StorageError

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
    """Give up all leaderships and ISR memberships, and wait until no partition needs this broker.

    The wait also ends when the time is up or ``may_continue`` returns false. Leaderships move first, then the ISRs
    shrink. If the broker ended while a partition's ISR contained it, writes to this partition would have to wait for
    the broker.
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
    """Wait for at most ``timeout_s`` until in-sync followers have all records that this broker's leaders have now.

    Produce requests that arrive during the wait get their response only after the followers have the records: see
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


class CachedAny:
    """A cached check whether any partition satisfies a condition.

    The check remembers the partitions that satisfied the condition when it last checked all of them. There may be ten
    thousand partitions, and one of them changes every few milliseconds. A check of all partitions at each change took
    more processor time than the rest of the stop. Not thread-safe: use it only on the broker's event loop.
    """

    def __init__(self, partitions: Callable[[], Iterable[Partition]], needs: Callable[[Partition], bool]) -> None:
        """Create the check. ``partitions`` returns the partitions to check; ``needs`` is the condition."""
        self._partitions = partitions
        self._needs = needs
        self._left: list[Partition] = []

    def any(self) -> bool:
        """Return whether a partition satisfies the condition.

        Check the remembered partitions first. Check all partitions only when no remembered partition satisfies the
        condition any more.
        """
        while self._left:
            if self._needs(self._left[-1]):
                return True
            self._left.pop()
        self._left = [partition for partition in self._partitions() if self._needs(partition)]
        return bool(self._left)

    def count(self) -> int:
        return sum(map(self._needs, self._partitions()))


class ShutdownFlush:
    """A task that flushes logs early in one controlled shutdown, so that little is left for the final flush.

    There are two flushes. The first runs at once, because many records may not be durable yet. The second runs when all
    leaderships have moved, after which few records can follow. Each flush ends with a checkpoint, so that the last
    checkpoint is small.

    Not thread-safe: use it only on the broker's event loop. Create it at the request to stop; ``end`` ends it.
    """

    def __init__(self, context: BrokerContext, partitions: Partitions) -> None:
        self._context = context
        self._partitions = partitions
        self._directory = partitions.directory
        self._ended = False
        self._task = asyncio.get_running_loop().create_task(self._run(), name="durable ahead of the stop")

    async def end(self) -> None:
        """Start no more flushes, and wait for the one in progress.

        The wait is needed because a disk reports a lost write only once. If the flush in progress gets the error, the
        final flush of the same files succeeds, and without the wait the broker would not know of the loss.
        """
        self._ended = True
        self._context.roles_changed()  # the task may wait for this
        await self._task

    async def _run(self) -> None:
        await self._round()
        while self._partitions.led and not self._ended:
            await self._context.next_role_change()
        if not self._ended:
            await self._round()

    async def _round(self) -> None:
        """Flush the logs once, and write a checkpoint.

        Errors are ignored here. They mean that the directory is offline or the disk is full. The end of the stop
        reports that.
        """
        loop = asyncio.get_running_loop()
        ahead = self._directory.sync_ahead()
        if ahead is None:
            return
        await loop.run_in_executor(None, ahead.run)
        if self._directory.offline is None:
            ahead.finished()
            with suppress(StorageError, OSError):
                await loop.run_in_executor(None, self._directory.checkpoint_job())
