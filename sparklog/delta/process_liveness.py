"""Which process archives a topic, as its commits say it, and whether that process may still do so.

Nothing rests on it but who of two archives goes on: the one that was there first. What is committed twice or by the
wrong one is prevented by Delta's transactions (``archive_table``).
"""

from __future__ import annotations

import os
import socket
from pathlib import Path

from sparklog.net.descriptors import boot_id

#: How long a run waits for a commit of the one before it: some of its intervals, at most; and of one without any.
_INTERVALS, _SLACK_S, _LONGEST_S = 1.5, 2.0, 120.0
_WITHOUT_INTERVAL_S = 10.0


def this_process() -> str:
    """``<host>/<its boot>/<process>/<when that began>``."""
    return f"{_host()}/{os.getpid()}/{_began(os.getpid())}"


def may_run(process: str) -> bool:
    """Whether another process may be running, as far as this host can tell. Not this one: what runs in it is known.
    ``process``: as ``this_process`` said; empty: not known."""
    host, _, number = process.rpartition("/")[0].rpartition("/")
    if process == this_process() or not process:
        return False
    if host != _host() or not number.isdecimal():
        return True
    return _began(int(number)) == process.rpartition("/")[2]


def patience_s(every_s: float) -> float:
    """How long an archive that looks so often (0: at once, until it is done) may take until its next commit, in s. One
    whose batches take longer than that is not waited for."""
    return min(_INTERVALS * every_s + _SLACK_S, _LONGEST_S) if every_s else _WITHOUT_INTERVAL_S


def _host() -> str:
    return f"{socket.gethostname()}/{boot_id()}"


def _began(process: int) -> str:
    """In ticks of the kernel's clock; empty: there is no such process, or it is dead. Source: proc(5)."""
    try:
        found = Path(f"/proc/{process}/stat").read_text("utf-8", "replace").rpartition(")")[2].split()
    except OSError:
        return ""
    return "" if found[0] in "ZX" else found[19]
