"""Identity of the process that archives a topic, as recorded in its commits, and whether it may still be running.

It only decides which of two archives continues: the first one. Delta's transactions prevent duplicate and conflicting
commits (``archive_table``).
"""

from __future__ import annotations

import os
import socket
from pathlib import Path

from sparklog.net.descriptors import boot_id

#: How long a run waits for a commit of the previous run: a number of its intervals, the maximum, and the value for a
#: run without interval.
_INTERVALS, _SLACK_S, _LONGEST_S = 1.5, 2.0, 120.0
_WITHOUT_INTERVAL_S = 10.0


def this_process() -> str:
    """Return ``<host>/<boot id>/<process>/<start time>``."""
    return f"{_host()}/{os.getpid()}/{_began(os.getpid())}"


def may_run(process: str) -> bool:
    """Return whether another process may be running, as far as this host can tell; False for this process. ``process``:
    a result of ``this_process``; an empty text is an unknown process and gives False."""
    host, _, number = process.rpartition("/")[0].rpartition("/")
    if process == this_process() or not process:
        return False
    if host != _host() or not number.isdecimal():
        return True
    return _began(int(number)) == process.rpartition("/")[2]


def patience_s(every_s: float) -> float:
    """Return the maximum time until the next commit of an archive with this interval (0: one pass), in s. A new run
    does not wait for an archive whose batches take longer."""
    return min(_INTERVALS * every_s + _SLACK_S, _LONGEST_S) if every_s else _WITHOUT_INTERVAL_S


def _host() -> str:
    return f"{socket.gethostname()}/{boot_id()}"


def _began(process: int) -> str:
    """Return a process's start time in clock ticks; empty if the process does not exist or is dead. Source: proc(5)."""
    try:
        found = Path(f"/proc/{process}/stat").read_text("utf-8", "replace").rpartition(")")[2].split()
    except OSError:
        return ""
    return "" if found[0] in "ZX" else found[19]
