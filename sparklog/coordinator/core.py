"""What all coordinators have in common: keyed entries whose only memory is the log of one partition. Pure.

A change of an entry is a draft, appended first and acted on, answered or sent only when it is committed; one is under
way for each entry at a time. Expired entries are looked for now and then. The log is bounded by writing all that is
live anew: some entries in one append, each when nothing else is being written for it. What a change means is for each
kind of coordinator to say.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import Any, Generic, Protocol, TypeVar

from sparklog.coordinator.effects import Append, Effect, Rewritten
from sparklog.coordinator.events import Appended, AppendRefused, RewriteRequested, Ticked
from sparklog.coordinator.log_records import Record

#: While something is under way, time is looked at so often.
TICK_MS = 500
#: Idle entries are looked for so often.
EXPIRY_CHECK_MS = 60_000
#: Entries written anew in one append.
REWRITE_AT_ONCE = 200

Draft = TypeVar("Draft")


class Entry(Protocol[Draft]):
    """All that is known of one key. ``draft``: the change under way; while there is one nothing else is served."""

    key: str
    draft: Draft | None

    def all_records(self) -> list[Record]:
        """What is durable of it, to be written anew."""

    @property
    def record_count(self) -> int:
        """As many as ``all_records`` gives."""


_Entry = TypeVar("_Entry", bound=Entry[Any])


class CoordinatorCore(ABC, Generic[_Entry, Draft]):
    """Owner: the broker's event loop, for one leader epoch of one partition. ``load`` all records, then ``start``."""

    def __init__(self) -> None:
        self._entries: dict[str, _Entry] = {}
        self._effects: list[Effect] = []
        self._append = 0
        self._appends: dict[int, list[_Entry]] = {}
        #: Keys still to be written anew, and appends that do it; None when there is no need.
        self._rewrite: dict[str, None] | None = None
        self._rewriting: set[int] = set()
        self._next_expiry_ms = 0
        self._next_tick_ms = 0

    # --- the door --------------------------------------------------------------------------------------------------

    @abstractmethod
    def load(self, records: Iterable[Record]) -> None:
        """Take what the partition's log holds, in order. Raises ClusterError for what cannot be read."""

    def start(self, now_ms: int) -> list[Effect]:
        """All is read: go on with what was under way."""
        self._effects = []
        self._next_expiry_ms = now_ms + EXPIRY_CHECK_MS
        self._next_tick_ms = now_ms + TICK_MS
        self._started(now_ms)
        return self._effects

    def step(self, event: Any, now_ms: int) -> list[Effect]:
        """Take one fact; return what is to be done about it, in order."""
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
            case Ticked():
                self._time_passed(now_ms)
            case _:
                self._take(event, now_ms)
        return self._effects

    @property
    def deadline_ms(self) -> int | None:
        """When to send ``Ticked``, at the latest."""
        times = [self._next_tick_ms] if self._watches() or self._rewrite is not None else []
        if self._entries:
            times.append(self._next_expiry_ms)
        return min(times, default=None)

    @property
    def live_records(self) -> int:
        """What a rewrite of the whole log would write."""
        return sum(entry.record_count for entry in self._entries.values())

    def __len__(self) -> int:
        return len(self._entries)

    # --- by each kind of coordinator -------------------------------------------------------------------------------

    @abstractmethod
    def _take(self, event: Any, now_ms: int) -> None:
        """A fact that is neither about the log nor the time."""

    @abstractmethod
    def _unchanged(self, entry: _Entry) -> Draft:
        """A draft that changes nothing: the entry is only written anew."""

    @abstractmethod
    def _committed(self, entry: _Entry, draft: Draft, now_ms: int) -> None:
        """``draft`` is in the log: take it over, answer, go on with what waits."""

    @abstractmethod
    def _refused(self, entry: _Entry, draft: Draft, detail: str, now_ms: int) -> None:
        """``draft`` is not in the log and never will be: nothing has changed; tell who waits, go on."""

    @abstractmethod
    def _expire(self, entry: _Entry, now_ms: int) -> None:
        """Begin to forget it if its time is up. Nothing is under way for it."""

    def _started(self, now_ms: int) -> None:
        """All is read."""

    def _watches(self) -> bool:
        """Whether ``_ticked`` is to be called."""
        return False

    def _ticked(self, now_ms: int) -> None:
        """Look at what has deadlines of its own."""

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

    def _taken(self, entry: _Entry) -> Draft:
        draft: Draft | None = entry.draft
        entry.draft = None
        assert draft is not None, entry.key
        return draft

    def _append_committed(self, append: int, now_ms: int) -> None:
        self._rewriting.discard(append)
        for entry in self._appends.pop(append, ()):
            self._committed(entry, self._taken(entry), now_ms)
        self._rewrite_more()

    def _append_refused(self, event: AppendRefused, now_ms: int) -> None:
        rewritten = event.append in self._rewriting
        self._rewriting.discard(event.append)
        for entry in self._appends.pop(event.append, ()):
            if rewritten and self._rewrite is not None:
                self._rewrite[entry.key] = None
            self._refused(entry, self._taken(entry), event.detail, now_ms)

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

    # --- bounding the log ------------------------------------------------------------------------------------------

    def _rewrite_more(self) -> None:
        """Write entries anew that nothing else is being written for; the others follow when that is done."""
        if self._rewrite is None:
            return
        ready: list[_Entry] = []
        for key in list(self._rewrite):
            entry = self._entries.get(key)
            if entry is None:
                del self._rewrite[key]
            elif entry.draft is None and len(ready) < REWRITE_AT_ONCE:
                ready.append(entry)
        if ready:
            records: list[Record] = []
            for entry in ready:
                del self._rewrite[entry.key]
                entry.draft = self._unchanged(entry)
                records += entry.all_records()
            self._rewriting.add(self._order(ready, records))
        elif not self._rewrite and not self._rewriting:
            self._rewrite = None
            self._effects.append(Rewritten())
