"""Where a broker's log lines go, what a line looks like, and a bound on how many of one kind there are.

Lines go to the process' own file or to standard error, which its supervisor has pointed at a file: never to an
inherited executor pipe, which would block the broker once nobody reads it.
"""

from __future__ import annotations

import logging
import time
from io import TextIOWrapper
from logging.handlers import RotatingFileHandler
from typing import Any

from sparklog.escaping import escaped
from sparklog.storage.disk import private_opener

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


class LineFormatter(logging.Formatter):
    """One line for each message, whatever clients and peers put into it: the names of groups and members, error texts.

    What does not print is escaped, line ends included. Tracebacks keep their lines, each behind a bar: no line of a
    message or of a traceback can pass for another one of the log.
    """

    def format(self, record: logging.LogRecord) -> str:
        kept = record.exc_text
        if record.exc_info:
            record.exc_text = None  # the text of another formatter, which escapes nothing
        try:
            return super().format(record)
        finally:
            record.exc_text = kept

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802  logging's name
        return escaped(super().formatMessage(record))

    def formatException(self, ei: Any) -> str:  # noqa: N802  logging's name
        return _behind_bars(super().formatException(ei))

    def formatStack(self, stack_info: str) -> str:  # noqa: N802  logging's name
        return _behind_bars(super().formatStack(stack_info))


def _behind_bars(text: str) -> str:
    return "\n".join(f"| {escaped(line)}" for line in text.split("\n"))


def bounded_file(log_file: str) -> logging.Handler:
    """A file that is followed by another when it is full; the last few are kept, and no process fills a disk in years.
    Other users than its owner cannot read it: it names topics, groups and clients. Raises OSError when it cannot be
    opened."""
    return _PrivateFile(log_file, maxBytes=_FILE_BYTES, backupCount=_FILES_KEPT)


class _PrivateFile(RotatingFileHandler):
    def _open(self) -> TextIOWrapper:
        stream = open(self.baseFilename, self.mode, encoding=self.encoding, opener=private_opener)  # noqa: SIM115
        assert isinstance(stream, TextIOWrapper)
        return stream


def configure_logging(log_file: str, *, level: int = logging.INFO) -> None:
    """Set up the root logger of this process. Raises OSError when the file cannot be opened."""
    handler = bounded_file(log_file) if log_file else logging.StreamHandler()
    handler.setFormatter(LineFormatter(_FORMAT, datefmt="%H:%M:%S"))
    handler.addFilter(RateLimit())
    root = logging.getLogger()
    root.setLevel(level)
    root.addHandler(handler)
    logging.getLogger("kazoo").setLevel(logging.WARNING)
