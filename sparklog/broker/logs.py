"""Where a broker's log lines go, and a bound on how many of one kind there are.

Lines go to the process' own file or to standard error, which its supervisor has pointed at a file: never to an
inherited executor pipe, which would block the broker once nobody reads it.
"""

from __future__ import annotations

import logging
import time
from logging.handlers import RotatingFileHandler

_FORMAT = "%(asctime)s.%(msecs)03d %(levelname)s [%(threadName)s] %(name)s: %(message)s"
_FILE_BYTES = 32 * 1024 * 1024
_FILES_KEPT = 4


#: Lines of one kind that are written in a period.
_BURST = 20
_PERIOD_S = 10.0


class Lines:
    """Lines of one kind that thousands of partitions have at once: as ``RateLimit``, for a small part of what the
    logging of a line costs that is held back."""

    def __init__(self, log: logging.Logger) -> None:
        self._log = log
        self._since = -_PERIOD_S
        self._count = 0

    def info(self, message: str, *arguments: object) -> None:
        now = time.monotonic()
        if now - self._since >= _PERIOD_S:
            if self._count > _BURST:
                message = f"{message} ({self._count - _BURST} more like this were held back)"
            self._since, self._count = now, 0
        self._count += 1
        if self._count <= _BURST:
            self._log.info(message, *arguments, stacklevel=2)


class RateLimit(logging.Filter):
    """Lets ``burst`` records of one call site through per ``period_s``, then says how many it held back.

    A partition that fails a thousand times a second must not fill the disk that the log lives on.
    """

    def __init__(self, burst: int = _BURST, period_s: float = _PERIOD_S) -> None:
        super().__init__()
        self._burst = burst
        self._period_s = period_s
        self._seen: dict[tuple[str, int], tuple[float, int]] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        site = (record.pathname, record.lineno)
        now = time.monotonic()
        since, count = self._seen.get(site, (now, 0))
        if now - since >= self._period_s:
            if count > self._burst:
                record.msg = f"{record.msg} ({count - self._burst} more like this were held back)"
            since, count = now, 0
        self._seen[site] = (since, count + 1)
        return count < self._burst


def bounded_file(log_file: str) -> logging.Handler:
    """A file that is followed by another when it is full; the last few are kept, and no process fills a disk in years.
    Raises OSError when it cannot be opened."""
    return RotatingFileHandler(log_file, maxBytes=_FILE_BYTES, backupCount=_FILES_KEPT)


def configure_logging(log_file: str, *, level: int = logging.INFO) -> None:
    """Set up the root logger of this process. Raises OSError when the file cannot be opened."""
    handler = bounded_file(log_file) if log_file else logging.StreamHandler()
    handler.setFormatter(logging.Formatter(_FORMAT, datefmt="%H:%M:%S"))
    handler.addFilter(RateLimit())
    root = logging.getLogger()
    root.setLevel(level)
    root.addHandler(handler)
    logging.getLogger("kazoo").setLevel(logging.WARNING)
