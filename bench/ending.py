"""How a bench ends that is told to: clusters are processes of their own, and would stay."""

from __future__ import annotations

import signal
from types import FrameType

_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


def end_in_order() -> None:
    """From now on the first signal to end unwinds the main thread, and with it all that was started is ended. Later
    ones do nothing: ``timeout`` sends two, and the second would cut the stop of a cluster short. What the caller of
    this process ignores stays ignored."""
    for number in _SIGNALS:
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, _end)


def _end(number: int, _: FrameType | None) -> None:
    for each in _SIGNALS:
        signal.signal(each, _go_on)
    raise SystemExit(128 + number)


def _go_on(_: int, __: FrameType | None) -> None:
    """A handler, and not SIG_IGN, which programs started later would have as well."""
