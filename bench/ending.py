"""The end of a bench by a signal: its clusters are separate processes, which would otherwise continue to run."""

from __future__ import annotations

import signal

from sparklog.cluster.stop_request import exit_on_first


def end_in_order() -> None:
    """Make the first SIGTERM, SIGINT or SIGHUP unwind the main thread, which ends all processes that it has started."""
    exit_on_first(signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
