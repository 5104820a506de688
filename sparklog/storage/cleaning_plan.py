"""When a compacted log is due for cleaning, how far it may go, and which segments become one. Pure.

A log is cleaned from its front. Below ``CleanerState.end`` it was cleaned before; from there to the limit it is dirty.
The limit: sealed segments whose transactions are decided, so never the active segment, and nothing above the high
watermark or the last stable offset; and none with records younger than ``min.compaction.lag.ms``.

Tombstones and markers go in two steps, for readers and replicas that are on their way through the log: what they
delete goes at once, they themselves when a cleaning has passed them ``delete.retention.ms`` ago. Source: Kafka's
``LogCleanerManager`` and ``Cleaner``; ages are by the leader's clock at append, not by event time, which may be old.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from sparklog.config import TopicConfig

CLEANER_FILE = "cleaned"


class CleanerState(msgspec.Struct, frozen=True):
    """What earlier cleanings of one log have done; the content of its file ``cleaned``.

    ``end``: below it no key has an older record. ``passes``: (offset, ms since the epoch): when a cleaning first came
    so far; both rise. ``deletes_end``: tombstones and markers below are gone. ``deletes``: how many there are still.
    """

    end: int = 0
    passes: tuple[tuple[int, int], ...] = ()
    deletes_end: int = 0
    deletes: int = 0
    version: int = 1

    def horizon(self, now_ms: int, delete_retention_ms: int) -> int:
        """Tombstones and markers below this offset may go."""
        passed = [offset for offset, at_ms in self.passes if at_ms + delete_retention_ms <= now_ms]
        return max(passed, default=0)

    def cleaned(self, end: int, now_ms: int, *, horizon: int, deletes: int) -> CleanerState:
        """After a cleaning that knew all keys below ``end`` and let tombstones below ``horizon`` go."""
        # of the passes whose time has come only the last one matters
        kept = tuple(one for one in self.passes if one[0] >= horizon)
        passes = (*kept, (end, now_ms)) if end > self.end else kept
        return CleanerState(max(end, self.end), passes, max(horizon, self.deletes_end), deletes)

    def cut(self, log_end: int) -> CleanerState:
        """The log was cut: what is appended there again was never cleaned."""
        if self.end <= log_end and self.deletes_end <= log_end:
            return self
        passes = tuple((min(offset, log_end), at_ms) for offset, at_ms in self.passes if offset <= log_end)
        return CleanerState(min(self.end, log_end), passes, min(self.deletes_end, log_end), self.deletes)


class SegmentFacts(NamedTuple):
    """What the plan has to know of a segment."""

    base_offset: int
    end_offset: int
    size_bytes: int
    schema_id: int
    #: of its first batch, us
    first_append_us: int
    #: of its last batch, us
    last_append_us: int


class CleaningCandidate(NamedTuple):
    """A log to be cleaned: the first ``segment_count`` segments, of which ``dirty_bytes`` are dirty."""

    segment_count: int
    dirty_ratio: float
    dirty_bytes: int
    #: tombstones and markers below may go
    horizon: int


def due(
    segments: Sequence[SegmentFacts], state: CleanerState, *, now_us: int, config: TopicConfig, at_once: bool = False
) -> CleaningCandidate | None:
    """Whether the log is to be cleaned now. ``segments``: sealed and decided, from the log's front.

    ``at_once``: whatever the dirty ratio.
    """
    count = len(segments)
    min_lag_us = config.min_compaction_lag_ms * 1000
    for number, segment in enumerate(segments):
        if segment.end_offset > state.end and segment.last_append_us > now_us - min_lag_us:
            count = number
            break
    chosen = segments[:count]
    if not chosen:
        return None
    now_ms = now_us // 1000
    horizon = min(state.horizon(now_ms, config.delete_retention_ms), chosen[-1].end_offset)
    dirty = [segment for segment in chosen if segment.end_offset > state.end]
    dirty_bytes = sum(segment.size_bytes for segment in dirty)
    ratio = dirty_bytes / max(1, sum(segment.size_bytes for segment in chosen))
    old = bool(dirty) and now_us - dirty[0].first_append_us > config.max_compaction_lag_ms * 1000
    deletable = state.deletes > 0 and horizon > state.deletes_end
    if deletable or (dirty and (at_once or old or ratio >= config.min_cleanable_dirty_ratio)):
        return CleaningCandidate(count, ratio, dirty_bytes, horizon)
    return None


def due_again_us(
    segments: Sequence[SegmentFacts], state: CleanerState, *, now_us: int, config: TopicConfig
) -> int | None:
    """Of a log that is not ``due`` at ``now_us``: the first time at which it may be, while it stays as it is; None:
    never. Microseconds since the epoch."""
    dirty = [segment for segment in segments if segment.end_offset > state.end]
    times = [segment.last_append_us + config.min_compaction_lag_ms * 1000 for segment in dirty]
    times += [segment.first_append_us + config.max_compaction_lag_ms * 1000 + 1 for segment in dirty[:1]]
    if state.deletes > 0:
        times += [(at_ms + config.delete_retention_ms) * 1000 for _, at_ms in state.passes]
    return min((time_us for time_us in times if time_us > now_us), default=None)


def groups(segments: Sequence[SegmentFacts], *, segment_bytes: int) -> list[list[SegmentFacts]]:
    """Segments that become one: neighbours of one schema that fit ``segment_bytes`` together, as they are now."""
    found: list[list[SegmentFacts]] = []
    size = 0
    for segment in segments:
        if found and segment.schema_id == found[-1][-1].schema_id and size + segment.size_bytes <= segment_bytes:
            found[-1].append(segment)
            size += segment.size_bytes
        else:
            found.append([segment])
            size = segment.size_bytes
    return found
