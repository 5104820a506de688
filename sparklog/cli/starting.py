"""Ctrl-C while a program still imports what it needs: it ends with 130, without a traceback.

Programs import this module first, and call ``started`` after their other imports. Those take a second or more, and an
exception of a signal handler would come out of the middle of them, as a traceback that says nothing.
"""

from __future__ import annotations

import os
import signal
import threading
from types import FrameType

EXIT_INTERRUPTED = 130


def started() -> None:
    """Have Ctrl-C raise KeyboardInterrupt again, as Python does by itself."""
    if signal.getsignal(signal.SIGINT) is _leave and threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _leave(_number: int, _frame: FrameType | None) -> None:
    os._exit(EXIT_INTERRUPTED)  # nothing has begun that would have to end


# A caller that has Ctrl-C ignored, or handles it, keeps that.
if signal.getsignal(signal.SIGINT) is signal.default_int_handler and (
    threading.current_thread() is threading.main_thread()
):
    signal.signal(signal.SIGINT, _leave)
