"""While a broker that stops hands over, the disk writes what the stop would have to wait for at its end.

Twice: at once, for the load has left much, and when all leaderships have gone, for then others are told and what is
still to come are the records of some moments. The checkpoint follows, so that the last one finds little to take.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress

from sparklog.broker.state import BrokerState
from sparklog.errors import StorageError
from sparklog.storage.log_directory import LogDirectory


class ShutdownFlush:
    """Owner: the broker process' event loop, from the wish to stop until ``end`` returns."""

    def __init__(self, broker: BrokerState, directory: LogDirectory) -> None:
        self._broker = broker
        self._directory = directory
        self._ended = False
        self._task = asyncio.get_running_loop().create_task(self._run(), name="durable ahead of the stop")

    async def end(self) -> None:
        """No further round. Waits for what is under way: what a disk says to it is not said again."""
        self._ended = True
        self._broker.roles_changed()  # which may be waited for
        await self._task

    async def _run(self) -> None:
        await self._round()
        while self._broker.partitions.led and not self._ended:
            await self._broker.next_role_change()
        if not self._ended:
            await self._round()

    async def _round(self) -> None:
        """Neither error ends the stop: the directory is offline then, or the disk full, and the stop says so itself."""
        loop = asyncio.get_running_loop()
        ahead = self._directory.sync_ahead()
        if ahead is None:
            return
        await loop.run_in_executor(None, ahead.run)
        if self._directory.offline is None:
            ahead.finished()
            with suppress(StorageError, OSError):
                await loop.run_in_executor(None, self._directory.checkpoint_job())
