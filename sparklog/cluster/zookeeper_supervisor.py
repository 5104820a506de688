"""The supervisor of the embedded ZooKeeper: it restarts a dead server with the same port and data.

It is a thread of the driver. Without it, ZooKeeper would be missing after a crash until an operator restarts the
cluster. Brokers would continue to serve, but no leader could be elected, no ISR could change and no topic could be
created. Sessions survive a restart that is shorter than their time-out. The supervisor does not replace a server that
runs but does not respond. Brokers can serve without ZooKeeper for a while, and the cause, such as a slow disk, would
slow a new server as well.
"""

from __future__ import annotations

import logging
import threading
import time

from sparklog.cluster.embedded_zookeeper import EmbeddedZookeeper
from sparklog.errors import ClusterError

log = logging.getLogger(__name__)

_TICK_S = 0.1
#: The pauses between restarts. A server that ran for longer than the longest pause is restarted immediately.
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.2, 10.0


class ZookeeperSupervisor:
    """The supervisor of an embedded ZooKeeper server. It runs in its own thread.

    It is created with a running server. At the end, one thread calls ``stop`` or ``leave``.
    """

    def __init__(self, server: EmbeddedZookeeper) -> None:
        self._server = server
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._run, name="sparklog-zookeeper", daemon=True)
        self._thread.start()

    @property
    def server(self) -> EmbeddedZookeeper:
        """Return the running server. Between the end of a server and its restart, return the ended server."""
        return self._server

    def stop(self) -> None:
        """End the supervision and stop the server."""
        self._end()
        self._server.stop()

    def leave(self) -> None:
        """End the supervision and leave the server running."""
        self._end()
        self._server.leave()

    def _end(self) -> None:
        self._ending.set()
        self._thread.join()

    def _run(self) -> None:
        pause_s = 0.0
        began = time.monotonic()
        while not self._ending.wait(_TICK_S):
            if self._server.is_alive:
                continue
            if time.monotonic() - began > _LONGEST_PAUSE_S:
                pause_s = 0.0
            if self._ending.wait(pause_s):
                return
            pause_s = min(max(2 * pause_s, _FIRST_PAUSE_S), _LONGEST_PAUSE_S)
            began = time.monotonic()
            if not self._start_again():
                return

    def _start_again(self) -> bool:
        """Restart the server. Return False if it was stopped deliberately; supervision then ends."""
        ended = self._server
        try:
            follower = ended.start_again()
        except (ClusterError, OSError) as error:
            log.error("ZooKeeper (pid %d) stopped and could not be restarted: %s", ended.pid, error)
            return True
        if follower is None:
            log.info("ZooKeeper (pid %d) was stopped by another driver", ended.pid)
            return False
        self._server = follower
        log.warning("ZooKeeper (pid %d) stopped and was restarted as pid %d", ended.pid, follower.pid)
        return True
