"""The lines of the audit log: logins, denied requests and administrative changes.

This module is pure.

A line is one JSON object with printable characters only, so no name from a client can forge a line. Long texts are cut.

Clients cause these events, so ``AuditLimits`` limits the number of lines. Without a limit, a client that repeats a
denied request could fill the disk, or push the lines about others out of the file. The first line of a kind is always
written. A later line has the number of suppressed lines.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from datetime import datetime, timedelta, timezone
from enum import Enum

import msgspec
from msgspec.structs import replace

from sparklog.escaping import escaped_json

#: The maximum length of a field's text, in characters. A client may send a topic name of a megabyte.
MAX_TEXT = 300
_CUT = "..."
#: The length of the period for which the limits below apply.
PERIOD_S = 60.0
#: The maximum number of lines in ``PERIOD_S`` about one kind of denial (a principal, a request and a resource).
DENIALS = 1
#: The maximum number of lines in ``PERIOD_S`` about failed logins from one address (``FAILED_LOGINS``), and about
#: successful logins of one principal from one address (``LOGINS``).
FAILED_LOGINS = 10
LOGINS = 10
#: The maximum number of lines of all kinds in ``PERIOD_S`` about one principal at one address.
OF_PRINCIPAL = 100
#: The number of kinds of lines that are counted separately. Lines of further kinds are counted as one kind.
KINDS = 2000
#: The names of the text fields of an event.
_TEXTS = ("principal", "address", "listener", "request", "operation", "resource", "rule", "what")
_EPOCH = datetime(1970, 1, 1, tzinfo=timezone.utc)


class AuditKind(Enum):
    """A kind of audited event. The lines of the audit log contain these values."""

    LOGIN = "login"
    DENIAL = "denial"
    CHANGE = "change"


class AuditEvent(msgspec.Struct, frozen=True, kw_only=True):
    """An audited event: a login, a denied request or an administrative change.

    The line about the event omits empty texts.
    """

    event: AuditKind
    #: The principal that caused the event. After a failed login it is the principal that the client claimed.
    principal: str
    address: str
    allowed: bool
    listener: str = ""
    #: The name of the request, or the mechanism of a login.
    request: str = ""
    operation: str = ""
    resource: str = ""
    #: The rule that decided, such as an ACL or the reason of a failed login.
    rule: str = ""
    #: The details of a change.
    what: str = ""
    #: The number of equal events since the previous line about them.
    suppressed: int = 0


def audit_line(event: AuditEvent, *, wall_ms: int) -> str:
    """Return the line about an event, which happened at ``wall_ms`` milliseconds since the Unix epoch."""
    time = _EPOCH + timedelta(milliseconds=wall_ms)
    fields: dict[str, str | int] = {
        "time": time.isoformat(timespec="milliseconds").replace("+00:00", "Z"),
        "event": event.event.value,
        "principal": _cut(event.principal),
        "address": _cut(event.address),
        "decision": "allowed" if event.allowed else "denied",
    }
    for name in ("listener", "request", "operation", "resource", "rule", "what"):
        text = getattr(event, name)
        if text:
            fields[name] = _cut(text)
    if event.suppressed:
        fields["suppressed"] = event.suppressed
    return escaped_json(json.dumps(fields, ensure_ascii=False))


def _cut(text: str) -> str:
    return text if len(text) <= MAX_TEXT else text[: MAX_TEXT - len(_CUT)] + _CUT


class _Count:
    """A count of the events of one kind since ``since_s``, with the last event that got no line."""

    __slots__ = ("last", "since_s", "suppressed", "written")

    def __init__(self, since_s: float) -> None:
        self.since_s = since_s
        self.written = 0
        self.suppressed = 0
        self.last: AuditEvent | None = None


class _KindLimit:
    """A limit on the number of lines of each kind. The number of kinds is bounded."""

    def __init__(self, kinds: int, period_s: float) -> None:
        self._kinds = kinds
        self._period_s = period_s
        #: The counts by kind, the oldest first.
        self._counts: dict[tuple[str, ...], _Count] = {}

    def __len__(self) -> int:
        return len(self._counts)

    def count(self, kind: tuple[str, ...], now_s: float) -> _Count:
        count = self._counts.get(kind)
        if count is None:
            if len(self._counts) >= self._kinds:
                kind = ()
                count = self._counts.get(kind)
            if count is None:
                count = self._counts[kind] = _Count(now_s)
        return count

    @property
    def suppresses(self) -> bool:
        return any(count.last is not None for count in self._counts.values())

    def end_periods(self, now_s: float) -> Iterator[AuditEvent]:
        """Drop the counts whose period has ended, and yield one event for each of them that suppressed events.

        It is the last suppressed event of that count, with the number of suppressed events.
        """
        while self._counts:
            kind, count = next(iter(self._counts.items()))
            if now_s - count.since_s < self._period_s:
                return
            del self._counts[kind]
            if count.last is not None:
                yield replace(count.last, suppressed=count.suppressed)


class AuditLimits:
    """A limiter for the number of lines in one broker's audit log.

    In a period of ``period_s`` seconds it admits a maximum number of lines of each kind. A kind consists of similar
    events, such as failed logins from one address. Further events of the kind are suppressed. Administrative changes
    have no limit, because each needs a permission and takes long. Only tests set ``period_s`` and ``kinds``.
    """

    def __init__(self, *, period_s: float = PERIOD_S, kinds: int = KINDS) -> None:
        self.period_s = period_s
        self._of_kind = _KindLimit(kinds, period_s)
        self._of_principal = _KindLimit(kinds, period_s)

    def __len__(self) -> int:
        """Return the number of kinds with a current count."""
        return len(self._of_kind) + len(self._of_principal)

    def admit(self, event: AuditEvent, now_s: float) -> tuple[AuditEvent, ...]:
        """Count an event at the monotonic time ``now_s``. Return the events to write now.

        The result has reports about events that were suppressed in earlier periods. It also has ``event``, unless
        ``event`` is suppressed now.
        """
        ended = self.end_periods(now_s)
        if event.event is AuditKind.CHANGE:
            return (*ended, event)
        kind, limit = _kind_of(event)
        count = self._of_kind.count(kind, now_s)
        if count.written >= limit:
            return (*ended, *_suppress(count, event))
        # A failed login names any principal, so all of an address count together.
        claimed = "" if event.event is AuditKind.LOGIN and not event.allowed else _cut(event.principal)
        of_principal = self._of_principal.count((claimed, event.address), now_s)
        if of_principal.written >= OF_PRINCIPAL:
            return (*ended, *_suppress(of_principal, event))
        count.written += 1
        of_principal.written += 1
        return (*ended, event)

    def end_periods(self, now_s: float) -> tuple[AuditEvent, ...]:
        """End the periods that are over. For each kind with suppressed events, return one event with their number."""
        return (*self._of_kind.end_periods(now_s), *self._of_principal.end_periods(now_s))

    @property
    def suppresses(self) -> bool:
        """Return whether there are suppressed events that ``end_periods`` has not reported yet."""
        return self._of_kind.suppresses or self._of_principal.suppresses

    def end_all(self) -> tuple[AuditEvent, ...]:
        """End all periods now. For each kind with suppressed events, return one event with their number."""
        return self.end_periods(float("inf"))


def _suppress(count: _Count, event: AuditEvent) -> tuple[()]:
    count.suppressed += 1
    # The event stays in memory until the end of the period, so only what its line has is kept.
    count.last = replace(event, **{name: _cut(getattr(event, name)) for name in _TEXTS})
    return ()


def _kind_of(event: AuditEvent) -> tuple[tuple[str, ...], int]:
    if event.event is AuditKind.DENIAL:
        return ("denial", _cut(event.principal), event.request, _cut(event.resource)), DENIALS
    if event.allowed:
        return ("login", _cut(event.principal), event.address), LOGINS
    return ("failed login", event.address), FAILED_LOGINS
