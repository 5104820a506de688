"""Keeps the embedded ZooKeeper there: one that dies is started again on its port and its data.

A thread of the driver's. Without it a ZooKeeper that was killed would be gone until somebody starts the cluster anew:
brokers serve on, but no leader is elected, no in-sync set changes and no topic is made. Restarted within a session
timeout, not even the sessions notice. A server that lives and does not answer is left alone: brokers need no answer to
serve, and what stalls it (a disk) would stall its successor.
"""

from __future__ import annotations

import logging
import threading
import time

from sparklog.cluster.embedded_zookeeper import EmbeddedZookeeper
from sparklog.errors import ClusterError

log = logging.getLogger(__name__)

_TICK_S = 0.1
#: Between attempts; a server that has lived for longer than the longest is started again at once.
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.2, 10.0


class ZookeeperSupervisor:
    """Owner: one thread. Life cycle: made with a running server, then ``stop`` or ``leave``."""

    def __init__(self, server: EmbeddedZookeeper) -> None:
        self._server = server
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._run, name="sparklog-zookeeper", daemon=True)
        self._thread.start()

    @property
    def server(self) -> EmbeddedZookeeper:
        """The one that runs now, or ran last."""
        return self._server

    def stop(self) -> None:
        """End the server."""
        self._end()
        self._server.stop()

    def leave(self) -> None:
        """Let the server run on, unattended."""
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
        """False when there is nothing to keep any more."""
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
