"""How a bench ends that is told to: clusters are processes of their own, and would stay."""

from __future__ import annotations

import signal

from sparklog.cluster.stop_request import exit_on_first


def end_in_order() -> None:
    """From now on the first signal to end unwinds the main thread, and with it all that was started is ended."""
    exit_on_first(signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
