"""``python -m sparklog.spark.worker_daemon``: pyspark's daemon, which forks Spark's Python workers, without a traceback
for each worker that the JVM has done with.

Spark closes the socket of a worker that nobody has used for a minute, and of one whose rows nobody wants any more, as
behind a LIMIT. The worker then ends as it should; but its last words cannot be sent, and pyspark 4.2 shows that as if
something had failed. ``conf/spark-defaults.conf`` names this module. Workers are forks of it, so it loads nothing that
starts threads.
"""

from __future__ import annotations

import socket

from pyspark import daemon

_worker = daemon.worker


def worker(sock: socket.socket, authenticated: bool) -> int:
    """As pyspark's, which tells the JVM of what tasks raise and returns: what comes here is that nobody listened."""
    try:
        return _worker(sock, authenticated)
    except ConnectionError:
        return 1


if __name__ == "__main__":
    daemon.worker = worker
    daemon.manager()
