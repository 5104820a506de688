"""The fsyncs of a clean stop, and a first round of them while the broker still serves.

Few logs are fsynced file by file, some in parallel, because one flush of the disk's cache serves all waiting fsyncs.
For thousands of logs that would be tens of thousands of flushes. If possible, the whole file system is synced instead.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sized
from concurrent.futures import ThreadPoolExecutor

from sparklog.storage.disk import Disk
from sparklog.storage.log import Log

#: The number of parallel fsyncs on a clean stop. Measured: 8 take a twentieth of the time of one, and 32 are hardly
#: faster.
_SYNC_THREADS = 8
#: From this number of logs on, the whole file system is synced.
_MANY_LOGS = 64


class SyncAhead:
    """One round of fsyncs before the stop.

    Logs that it makes durable and that do not change later need no work in the stop.

    Made on the event loop; then ``run`` in a thread, then ``finished`` on the loop.
    """

    def __init__(self, logs: Collection[Log], *, disk: Disk, handle: int, failed: Callable[[str], None]) -> None:
        """Select the logs.

        ``handle`` is for ``sync_file_system``. ``failed`` takes the directory offline, because a disk reports a lost
        write only once.
        """
        self._disk = disk
        self._handle = handle
        self._failed = failed
        self._unchanged = [log for log in logs if log.durability.await_sync()]
        self._done = False

    def run(self) -> None:
        """Sync the file system. Block."""
        try:
            self._disk.sync_file_system(self._handle)
        except OSError as failure:
            self._failed(f"syncing the file system: {failure}")
        else:
            self._done = True

    def finished(self) -> None:
        if self._done:
            for log in self._unchanged:
                log.durability.synced()


def at_once(logs: Sized, disk: Disk, handle: int) -> bool:
    """Return whether the logs are made durable by a sync of the whole file system of ``handle``."""
    return len(logs) >= _MANY_LOGS and disk.can_sync_file_system(handle)


def make_durable(logs: Collection[Log], disk: Disk, handle: int, *, in_threads: bool) -> None:
    """Make all logs durable.

    Block. ``handle`` was opened before anything was written, so that the sync reports every failed write since then.

    Raises:
        OSError, StorageError: the disk failed.
    """
    if at_once(logs, disk, handle):
        for log in logs:
            log.durability.leave_state()
        disk.sync_file_system(handle)
        for log in logs:
            log.durability.made_durable()
        return
    if not in_threads:
        for log in logs:
            log.durability.prepare_clean_stop()
        return
    with ThreadPoolExecutor(_SYNC_THREADS, thread_name_prefix="log-sync") as threads:
        for done in [threads.submit(log.durability.prepare_clean_stop) for log in logs]:
            done.result()
