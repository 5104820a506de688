"""The handling of Ctrl-C during a program's imports: the program exits with code 130, without a traceback.

Programs import this module first, and call ``started`` after their other imports. The imports take a second or more,
and KeyboardInterrupt in the middle of them would print a meaningless traceback.
"""

from __future__ import annotations

import os
import signal
import threading
from types import FrameType

EXIT_INTERRUPTED = 130


def started() -> None:
    """Make Ctrl-C raise KeyboardInterrupt again, as Python does by default."""
    if signal.getsignal(signal.SIGINT) is _leave and threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _leave(_number: int, _frame: FrameType | None) -> None:
    os._exit(EXIT_INTERRUPTED)  # no work that needs a cleanup has begun


# If the parent process ignores Ctrl-C, or there is another handler, keep that.
if signal.getsignal(signal.SIGINT) is signal.default_int_handler and (
    threading.current_thread() is threading.main_thread()
):
    signal.signal(signal.SIGINT, _leave)
