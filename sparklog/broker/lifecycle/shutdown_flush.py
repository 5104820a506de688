"""Early flushes during the controlled shutdown, so that little is left to flush at the end of the stop.

There are two flushes. The first runs at once, because many records may not be durable yet. The second runs when all
leaderships have moved, after which few records can follow. Each flush ends with a checkpoint, so that the last
checkpoint is small.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress

from sparklog.broker.context import BrokerContext
from sparklog.broker.replication.partitions import Partitions
from sparklog.errors import StorageError


class ShutdownFlush:
    """The early flushes of one stop.

    Owner: the broker process's event loop, from the request to stop until ``end`` returns.
    """

    def __init__(self, context: BrokerContext, partitions: Partitions) -> None:
        self._context = context
        self._partitions = partitions
        self._directory = partitions.directory
        self._ended = False
        self._task = asyncio.get_running_loop().create_task(self._run(), name="durable ahead of the stop")

    async def end(self) -> None:
        """Start no further flush, and wait for the one in progress.

        The wait is needed because a disk reports an error only once.
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
        """Flush once.

        Errors are ignored here. They mean that the directory is offline or the disk is full, and the end of the stop
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
