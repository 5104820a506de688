"""The audit log of a broker: logins, denied requests and administrative changes, as lines of JSON in ``audit.log``.

The broker sends the lines to the logger ``sparklog.audit``. A thread writes them to the file, so a slow disk does not
block the event loop. If the thread cannot keep up, lines are dropped. A later line has the number of dropped lines.
"""

from __future__ import annotations

import asyncio
import json
import logging
import queue
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Protocol

from sparklog.broker.lifecycle.logging_setup import bounded_file
from sparklog.protocol.messages import Reply, Request
from sparklog.security.audit import AuditEvent, AuditKind, AuditLimits, audit_line
from sparklog.security.changes import change_of
from sparklog.security.principals import Principal

_audit = logging.getLogger("sparklog.audit")
_log = logging.getLogger(__name__)

#: The name of the file, in the directory of the broker's log.
AUDIT_FILE = "audit.log"
#: The maximum number of lines that wait for the disk.
_MOST_WAITING = 10_000
#: The maximum time that the process waits at its end for lines that are not written yet.
_CLOSE_S = 2.0


class AuditedConnection(Protocol):
    """The part of a connection that the audit log uses: the principal, host and listener that each line has."""

    @property
    def principal(self) -> Principal: ...

    @property
    def peer_host(self) -> str: ...

    @property
    def listener(self) -> str: ...


class Audit:
    """The writer of the audit log of one broker, which limits the number of lines.

    Not thread-safe: use it only on the broker's event loop.
    """

    def __init__(self, counters: Counter[str]) -> None:
        self._counters = counters
        self._limits = AuditLimits()
        self._timer: asyncio.TimerHandle | None = None

    def login(
        self, principal: Principal | str, host: str, mechanism: str, ok: bool, reason: str = "", *, listener: str = ""
    ) -> None:
        """Record a successful login, or a failed one with its reason.

        ``principal`` is the authenticated principal, or the one that the client claimed in a failed login.
        """
        if ok:
            self._counters["logins"] += 1
        else:
            self._counters["logins.failed"] += 1
        self._record(
            AuditEvent(
                event=AuditKind.LOGIN,
                principal=str(principal),
                address=host,
                allowed=ok,
                listener=listener,
                request=mechanism,
                rule=reason,
            )
        )

    def denied(
        self, connection: AuditedConnection, request: Request | str, operation: str, resource: str, rule: str
    ) -> None:
        """Record that ``rule`` has denied a request.

        ``resource`` is the type and the name of a resource, such as ``Topic:orders``.
        """
        self._counters["requests.denied"] += 1
        self._record(
            AuditEvent(
                event=AuditKind.DENIAL,
                principal=str(connection.principal),
                address=connection.peer_host,
                allowed=False,
                listener=connection.listener,
                request=_name_of(request),
                operation=operation,
                resource=resource,
                rule=rule,
            )
        )

    def changed(self, connection: AuditedConnection, request: Request | str, what: str, *, resource: str = "") -> None:
        """Record an administrative request that has succeeded. ``what`` describes the change."""
        self._record(
            AuditEvent(
                event=AuditKind.CHANGE,
                principal=str(connection.principal),
                address=connection.peer_host,
                allowed=True,
                listener=connection.listener,
                request=_name_of(request),
                resource=resource,
                what=what,
            )
        )

    def replied(self, connection: AuditedConnection, request: Request, reply: Reply) -> None:
        """Record the request if it is administrative and the reply shows that it has changed something."""
        change = change_of(request, reply)
        if change is not None:
            self.changed(connection, request, change.what, resource=change.resource)

    def close(self) -> None:
        """Write the numbers of suppressed lines that were not reported yet."""
        if self._timer is not None:
            self._timer.cancel()
        for event in self._limits.end_all():
            _write(event)

    def _record(self, event: AuditEvent) -> None:
        admitted = self._limits.admit(event, time.monotonic())
        for one in admitted:
            _write(one)
        if not admitted or admitted[-1] is not event:
            self._counters["audit.suppressed"] += 1
            if self._timer is None:  # the number of suppressed lines is written even if no line follows
                self._timer = asyncio.get_running_loop().call_later(self._limits.period_s, self._end_periods)

    def _end_periods(self) -> None:
        self._timer = None
        for event in self._limits.end_periods(time.monotonic()):
            _write(event)
        if self._limits.suppresses:
            self._timer = asyncio.get_running_loop().call_later(self._limits.period_s, self._end_periods)


def _name_of(request: Request | str) -> str:
    return request if isinstance(request, str) else type(request).__name__


def _write(event: AuditEvent) -> None:
    _audit.info("%s", audit_line(event, wall_ms=time.time_ns() // 1_000_000))


class AuditFile(logging.Handler):
    """A logging handler that passes lines to a thread, which writes them to a file that only its owner can read.

    The file and the thread are created with the first line.
    """

    def __init__(self, path: Path) -> None:
        super().__init__()
        self._path = path
        self._lines: queue.Queue[logging.LogRecord | None] = queue.Queue(_MOST_WAITING)
        self._thread: threading.Thread | None = None
        self._file: logging.Handler | None = None
        #: The number of lines that were dropped because too many lines waited, and the number that
        #: the file last reported.
        self.dropped = 0
        self.lines_noted = 0

    def emit(self, record: logging.LogRecord) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._write, name="audit log", daemon=True)
            self._thread.start()
        try:
            self._lines.put_nowait(record)
        except queue.Full:
            self.dropped += 1

    def close(self) -> None:
        """Wait until the lines are written, for at most ``_CLOSE_S``.

        The wait has a limit because the disk may be broken.
        """
        if self._thread is not None:
            try:
                self._lines.put(None, timeout=_CLOSE_S)
                self._thread.join(_CLOSE_S)
            except queue.Full:
                _log.warning("lines of the audit log could not be written to %s", self._path)
            self._thread = None
        super().close()

    def _write(self) -> None:
        while (record := self._lines.get()) is not None:
            self._write_line(record)
            if self.dropped > self.lines_noted:
                self.lines_noted = self.dropped
                dropped = json.dumps({"event": "dropped", "lines": self.lines_noted})
                self._write_line(logging.makeLogRecord({"msg": dropped}))
        if self._file is not None:
            self._file.close()

    def _write_line(self, record: logging.LogRecord) -> None:
        try:
            if self._file is None:
                self._file = bounded_file(str(self._path))
                self._file.handleError = self._failed  # type: ignore[method-assign]
            self._file.emit(record)
        except OSError as error:
            _log.error("could not write a line of the audit log to %s: %s", self._path, error)

    def _failed(self, record: logging.LogRecord) -> None:
        """Log that a line could not be written. The line itself stays out of the broker's log."""
        _log.error("could not write a line of the audit log to %s", self._path, exc_info=True)


def open_audit_log(path: Path) -> None:
    """Write the lines of this process's audit log to the file ``path``, and not to the broker's own log."""
    _audit.addHandler(AuditFile(path))
    _audit.setLevel(logging.INFO)
    _audit.propagate = False
