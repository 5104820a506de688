"""A broker's log output: its file, its format, and a limit for repeated lines.

Lines go to the process's own file or to standard error, which its supervisor has redirected to a file. They never go to
a pipe inherited from an executor: once no process reads the pipe, writes to it would block the broker.
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


#: The maximum number of lines of one kind in ``_PERIOD_S``.
_BURST = 20
_PERIOD_S = 10.0


class Lines:
    """A logger that drops lines above a limit, for a message that thousands of partitions may log at once.

    The limit is that of ``RateLimit``, but a dropped line costs far less processor time.
    """

    def __init__(self, log: logging.Logger) -> None:
        self._log = log
        self._since = -_PERIOD_S
        self._count = 0

    def info(self, message: str, *arguments: object) -> None:
        now = time.monotonic()
        if now - self._since >= _PERIOD_S:
            if self._count > _BURST:
                message = f"{message} ({self._count - _BURST} more like this were dropped)"
            self._since, self._count = now, 0
        self._count += 1
        if self._count <= _BURST:
            self._log.info(message, *arguments, stacklevel=2)


class RateLimit(logging.Filter):
    """A filter of log records: it passes at most ``burst`` records of one call site in each ``period_s``.

    The first record of a later period says how many records were dropped. A partition that fails a thousand times a
    second must not fill the disk with log lines.
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
                record.msg = f"{record.msg} ({count - self._burst} more like this were dropped)"
            since, count = now, 0
        self._seen[site] = (since, count + 1)
        return count < self._burst


class LineFormatter(logging.Formatter):
    """A formatter that writes one line for each message, even if a text from a client contains line ends.

    It escapes unprintable characters, including line ends. Each line of a traceback begins with a bar. So no part of a
    message or traceback can look like a separate log line.
    """

    def format(self, record: logging.LogRecord) -> str:
        kept = record.exc_text
        if record.exc_info:
            record.exc_text = None  # another formatter may have cached an unescaped text
        try:
            return super().format(record)
        finally:
            record.exc_text = kept

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802  logging's name
        return escaped(super().formatMessage(record))

    def formatException(self, ei: Any) -> str:  # noqa: N802  logging's name
        return _prefixed(super().formatException(ei))

    def formatStack(self, stack_info: str) -> str:  # noqa: N802  logging's name
        return _prefixed(super().formatStack(stack_info))


def _prefixed(text: str) -> str:
    return "\n".join(f"| {escaped(line)}" for line in text.split("\n"))


def bounded_file(log_file: str) -> logging.Handler:
    """Return a handler that writes a log to files of limited size and keeps only the last few files.

    So the log never fills a disk. Only the owner can read the files, because they contain names of topics, groups and
    clients. Raises OSError if the file cannot be opened.
    """
    return _PrivateFile(log_file, maxBytes=_FILE_BYTES, backupCount=_FILES_KEPT)


class _PrivateFile(RotatingFileHandler):
    def _open(self) -> TextIOWrapper:
        stream = open(self.baseFilename, self.mode, encoding=self.encoding, opener=private_opener)  # noqa: SIM115
        assert isinstance(stream, TextIOWrapper)
        return stream


def configure_logging(log_file: str, *, level: int = logging.INFO) -> None:
    """Set up the root logger of this process. An empty ``log_file`` means standard error.

    Raises OSError if the file cannot be opened.
    """
    handler = bounded_file(log_file) if log_file else logging.StreamHandler()
    handler.setFormatter(LineFormatter(_FORMAT, datefmt="%H:%M:%S"))
    handler.addFilter(RateLimit())
    root = logging.getLogger()
    root.setLevel(level)
    root.addHandler(handler)
    logging.getLogger("kazoo").setLevel(logging.WARNING)
