"""The identity of a process that archives a topic, and a check whether this process may still be running.

Each commit of an archive records the identity. If two processes archive the same topic, this check only ensures that
the first one continues. Delta's transactions prevent duplicate and conflicting commits (``archive_table``).
"""

from __future__ import annotations

import os
import socket
from pathlib import Path

from sparklog.net.descriptors import boot_id

#: The time for which a run waits for a commit of the previous run: this number of that run's intervals plus some
#: seconds, but at most the third value; or the fourth value if that run has no interval.
_INTERVALS, _SLACK_S, _LONGEST_S = 1.5, 2.0, 120.0
_WITHOUT_INTERVAL_S = 10.0


def this_process() -> str:
    """Return a text that identifies this process: ``<host>/<boot id>/<process>/<start time>``."""
    return f"{_host()}/{os.getpid()}/{_began(os.getpid())}"


def may_run(process: str) -> bool:
    """Return whether ``process`` is another process that may still be running.

    ``process`` is a result of ``this_process``. The result is True for a process on another host, which this host
    cannot check. It is False for this process, and for an empty text, which means an unknown process.
    """
    host, _, number = process.rpartition("/")[0].rpartition("/")
    if process == this_process() or not process:
        return False
    if host != _host() or not number.isdecimal():
        return True
    return _began(int(number)) == process.rpartition("/")[2]


def longest_wait_s(every_s: float) -> float:
    """Return the maximum time in seconds for which a new run of an archive waits for a commit of the earlier run.

    Each start of the archive is a new run. ``every_s`` is the earlier run's interval between batches, or 0 if that run
    archives once and ends. If the earlier run does not commit within this time, the new run continues.
    """
    return min(_INTERVALS * every_s + _SLACK_S, _LONGEST_S) if every_s else _WITHOUT_INTERVAL_S


def _host() -> str:
    return f"{socket.gethostname()}/{boot_id()}"


def _began(process: int) -> str:
    """Return the start time of a process in clock ticks, or an empty text if it does not exist or is dead.

    Source: proc(5).
    """
    try:
        found = Path(f"/proc/{process}/stat").read_text("utf-8", "replace").rpartition(")")[2].split()
    except OSError:
        return ""
    return "" if found[0] in "ZX" else found[19]
