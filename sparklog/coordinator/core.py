"""The common part of all coordinators: a table of entries by key, stored only in the log of one partition.

The module is pure. A *draft* is a change of an entry that is not committed yet. The coordinator first appends the
draft's records to the log. After the append is committed, it applies the draft to the entry, sends the resulting
effects and responds to the requests. At most one draft is in flight per entry. Expired entries are removed
periodically. To bound the log, the coordinator rewrites all live entries, a few in each append. It rewrites an entry
only while no draft of the entry is in flight. Each kind of coordinator defines its own drafts.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import Any, Generic, Protocol, TypeVar

from sparklog.coordinator.effects import Append, Effect, Rewritten
from sparklog.coordinator.events import Appended, AppendRefused, CoordinatorTicked, RewriteRequested
from sparklog.coordinator.log_records import Record

#: The interval of ``CoordinatorTicked`` while an entry has work in progress.
TICK_MS = 500
#: The interval of the checks for expired entries.
EXPIRY_CHECK_MS = 60_000
#: The maximum numbers of entries and of records in one append of a rewrite.
REWRITE_AT_ONCE, RECORDS_AT_ONCE = 200, 10_000

Draft = TypeVar("Draft")


class Entry(Protocol[Draft]):
    """The state of one key in a coordinator's table, as ``CoordinatorCore`` uses it.

    ``draft`` is the change in flight. Until it is committed or refused, the coordinator makes no other change of the
    entry.
    """

    key: str
    draft: Draft | None

    def record_keys(self) -> list[Any]:
        """Return the keys of the entry's current records in the log, which a rewrite appends again."""

    def records_of(self, keys: Iterable[Any]) -> list[Record]:
        """Return the entry's current records with these keys. Records that have been removed are omitted."""

    @property
    def record_count(self) -> int:
        """Return the number of the entry's current records in the log."""


_Entry = TypeVar("_Entry", bound=Entry[Any])


class CoordinatorCore(ABC, Generic[_Entry, Draft]):
    """The base class of the coordinators of one partition of an internal topic, in one leader epoch.

    Not thread-safe: use it only on the broker's event loop. Call ``load`` with all records, then ``start``.
    """

    def __init__(self) -> None:
        self._entries: dict[str, _Entry] = {}
        self._effects: list[Effect] = []
        self._append = 0
        self._appends: dict[int, list[_Entry]] = {}
        #: ``_rewrite`` has the entries that a rewrite has yet to write, each with the keys of its remaining records or
        #: None for all records. It is None while no rewrite is in progress. ``_rewriting`` has the rewrite's appends in
        #: flight.
        self._rewrite: dict[str, list[Any] | None] | None = None
        self._rewriting: set[int] = set()
        self._next_expiry_ms = 0
        self._next_tick_ms = 0

    # --- the entry point -------------------------------------------------------------------------------------------

    @abstractmethod
    def load(self, records: Iterable[Record]) -> None:
        """Apply the records of the partition's log, in order. Raises ClusterError for an unreadable record."""

    def start(self, now_ms: int) -> list[Effect]:
        """Continue the work that was in progress according to the log. Return the resulting effects.

        Call it once, after ``load``.
        """
        self._effects = []
        self._next_expiry_ms = now_ms + EXPIRY_CHECK_MS
        self._next_tick_ms = now_ms + TICK_MS
        self._started(now_ms)
        return self._effects

    def step(self, event: Any, now_ms: int) -> list[Effect]:
        """Handle one event; return the resulting effects, in order."""
        self._effects = []
        match event:
            case Appended():
                self._append_committed(event.append, now_ms)
            case AppendRefused():
                self._append_refused(event, now_ms)
            case RewriteRequested():
                if self._rewrite is None:
                    self._rewrite = dict.fromkeys(self._entries)
                self._rewrite_more()
            case CoordinatorTicked():
                self._time_passed(now_ms)
            case _:
                self._handle(event, now_ms)
        return self._effects

    @property
    def deadline_ms(self) -> int | None:
        """Return the latest time for the next ``CoordinatorTicked``, or None if the coordinator waits for no time."""
        times = [self._next_tick_ms] if self._watches() or self._rewrite is not None else []
        if self._entries:
            times.append(self._next_expiry_ms)
        return min(times, default=None)

    @property
    def live_records(self) -> int:
        """Return the number of records that a rewrite of all entries would append (see ``RewriteRequested``)."""
        return sum(entry.record_count for entry in self._entries.values())

    def __len__(self) -> int:
        return len(self._entries)

    # --- for each kind of coordinator ------------------------------------------------------------------------------

    @abstractmethod
    def _handle(self, event: Any, now_ms: int) -> None:
        """Handle an event other than Appended, AppendRefused, RewriteRequested and CoordinatorTicked."""

    @abstractmethod
    def _unchanged(self, entry: _Entry) -> Draft:
        """Return an empty change, for a rewrite of the entry."""

    @abstractmethod
    def _committed(self, entry: _Entry, draft: Draft, now_ms: int) -> None:
        """Handle the change ``draft`` after its commit: apply it, respond, and continue with waiting requests."""

    @abstractmethod
    def _refused(self, entry: _Entry, draft: Draft, detail: str, now_ms: int) -> None:
        """Handle a change, ``draft``, that will never be in the log: refuse its requests, then continue."""

    @abstractmethod
    def _expire(self, entry: _Entry, now_ms: int) -> None:
        """Start to remove the entry if it has expired. The caller has checked that no change of it is in flight."""

    def _started(self, now_ms: int) -> None:
        """Continue the work that was in progress according to the log."""

    def _watches(self) -> bool:
        """Return whether ``_ticked`` must run periodically."""
        return False

    def _ticked(self, now_ms: int) -> None:
        """Check the entries that have deadlines."""

    # --- durability ------------------------------------------------------------------------------------------------

    def _stage(self, entry: _Entry, draft: Draft, records: list[Record]) -> None:
        assert entry.draft is None, entry.key
        entry.draft = draft
        self._order([entry], records)

    def _order(self, entries: list[_Entry], records: list[Record]) -> int:
        self._append += 1
        self._appends[self._append] = entries
        self._effects.append(Append(self._append, tuple(records)))
        return self._append

    def _pop_draft(self, entry: _Entry) -> Draft:
        draft: Draft | None = entry.draft
        entry.draft = None
        assert draft is not None, entry.key
        return draft

    def _append_committed(self, append: int, now_ms: int) -> None:
        self._rewriting.discard(append)
        for entry in self._appends.pop(append, ()):
            self._committed(entry, self._pop_draft(entry), now_ms)
        self._rewrite_more()

    def _append_refused(self, event: AppendRefused, now_ms: int) -> None:
        rewritten = event.append in self._rewriting
        self._rewriting.discard(event.append)
        for entry in self._appends.pop(event.append, ()):
            if rewritten and self._rewrite is not None:
                self._rewrite[entry.key] = None
            self._refused(entry, self._pop_draft(entry), event.detail, now_ms)

    # --- time ------------------------------------------------------------------------------------------------------

    def _time_passed(self, now_ms: int) -> None:
        if now_ms >= self._next_tick_ms:
            self._next_tick_ms = now_ms + TICK_MS
            self._ticked(now_ms)
            self._rewrite_more()
        if now_ms >= self._next_expiry_ms:
            self._next_expiry_ms = now_ms + EXPIRY_CHECK_MS
            for entry in list(self._entries.values()):
                if entry.draft is None:
                    self._expire(entry, now_ms)

    # --- bounded log -----------------------------------------------------------------------------------------------

    def _rewrite_more(self) -> None:
        """Rewrite some of the remaining entries in one append. Entries with a change in flight follow later.

        A large entry takes several appends. Other changes of the entry may be appended between them; the log then has
        both.
        """
        if self._rewrite is None:
            return
        ready: list[_Entry] = []
        gone: list[str] = []
        count = 0
        for key, keys in self._rewrite.items():
            entry = self._entries.get(key)
            if entry is None:
                gone.append(key)
            elif entry.draft is None:
                ready.append(entry)
                count += entry.record_count if keys is None else len(keys)
            if len(ready) == REWRITE_AT_ONCE or count >= RECORDS_AT_ONCE:
                break
        for key in gone:
            del self._rewrite[key]
        if ready:
            records: list[Record] = []
            for entry in ready:
                keys = self._rewrite.pop(entry.key)
                left = entry.record_keys() if keys is None else keys
                share = max(RECORDS_AT_ONCE - len(records), 1)
                if len(left) > share:
                    self._rewrite[entry.key] = left[share:]
                entry.draft = self._unchanged(entry)
                records += entry.records_of(left[:share])
            self._rewriting.add(self._order(ready, records))
        elif not self._rewrite and not self._rewriting:
            self._rewrite = None
            self._effects.append(Rewritten())
