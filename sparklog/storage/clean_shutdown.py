"""The fsyncs of a clean shutdown, and a first round of fsyncs while the broker still serves requests.

If the logs are few, their files are fsynced one by one in several threads: one flush of the disk's cache completes all
fsyncs that wait at that time. Thousands of logs would need tens of thousands of flushes. If there are that many logs,
the whole file system is synced instead, provided that the file system supports this.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sized
from concurrent.futures import ThreadPoolExecutor

from sparklog.storage.disk import Disk
from sparklog.storage.log import Log

#: The number of threads that fsync on a clean shutdown. Measured: 8 threads need a twentieth of the time of one thread,
#: and 32 are hardly faster.
_SYNC_THREADS = 8
#: From this number of logs on, the whole file system is synced.
_MANY_LOGS = 64


class SyncAhead:
    """A sync of the whole file system before a clean shutdown, while the broker still serves requests.

    The shutdown need not fsync a log that has not changed since this sync.

    The event loop creates the object. A thread calls ``run``. Then the event loop calls ``finished``.
    """

    def __init__(self, logs: Collection[Log], *, disk: Disk, handle: int, failed: Callable[[str], None]) -> None:
        """Select the logs that the sync makes durable.

        ``handle`` is passed to ``sync_file_system``. ``failed`` is called if the sync fails. It takes the directory
        offline, because a disk reports a lost write only once.
        """
        self._disk = disk
        self._handle = handle
        self._failed = failed
        self._unchanged = [log for log in logs if log.durability.await_sync()]
        self._done = False

    def run(self) -> None:
        """Sync the file system, and block until that is done."""
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
    """Return whether ``make_durable`` syncs the whole file system of ``handle`` instead of single files."""
    return len(logs) >= _MANY_LOGS and disk.can_sync_file_system(handle)


def make_durable(logs: Collection[Log], disk: Disk, handle: int, *, in_threads: bool) -> None:
    """Fsync all logs, and block until they are durable. Also write the state files that make the next start faster.

    ``handle`` must have been opened before the logs were written. Then the sync of the file system reports every failed
    write. With ``in_threads`` several threads fsync the logs at the same time, unless the whole file system is synced.

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
