"""The plan of a cleaning: when a compacted log is due, how far the cleaning may go, and which segments become one.

Pure. A log is cleaned from its front. Below ``CleanerState.end`` an earlier cleaning has cleaned it. From there to the
limit it is dirty. Only sealed segments without open transactions are below the limit: never the active segment, and
nothing above the high watermark or the last stable offset. Records younger than ``min.compaction.lag.ms`` are above the
limit too.

Tombstones and markers are removed in two steps, because readers and replicas may be in the middle of the log. The
records that they delete are removed at once. They themselves are removed when a cleaning passed them
``delete.retention.ms`` ago. Source: Kafka's ``LogCleanerManager`` and ``Cleaner``. Ages are by the leader's clock at
append, not by event time, which may be old.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from sparklog.config import TopicConfig

CLEANER_FILE = "cleaned"


class CleanerState(msgspec.Struct, frozen=True):
    """The result of earlier cleanings of one log, stored in its file ``cleaned``.

    ``end``: below it no key has an older record. ``passes``: (offset, ms since the epoch) of the first cleaning that
    reached that offset; both rise. ``deletes_end``: tombstones and markers below it are removed. ``deletes``: the
    number that remain.
    """

    end: int = 0
    passes: tuple[tuple[int, int], ...] = ()
    deletes_end: int = 0
    deletes: int = 0
    version: int = 1

    def horizon(self, now_ms: int, delete_retention_ms: int) -> int:
        """Return the offset below which tombstones and markers may be removed."""
        passed = [offset for offset, at_ms in self.passes if at_ms + delete_retention_ms <= now_ms]
        return max(passed, default=0)

    def cleaned(self, end: int, now_ms: int, *, horizon: int, deletes: int) -> CleanerState:
        """Return the state after a cleaning with all keys below ``end`` that removed tombstones below ``horizon``."""
        # of the passes that are old enough only the last one matters
        kept = tuple(one for one in self.passes if one[0] >= horizon)
        passes = (*kept, (end, now_ms)) if end > self.end else kept
        return CleanerState(max(end, self.end), passes, max(horizon, self.deletes_end), deletes)

    def truncated(self, log_end: int) -> CleanerState:
        """Return the state after a truncation to ``log_end``. Batches that are appended there later are dirty."""
        if self.end <= log_end and self.deletes_end <= log_end:
            return self
        passes = tuple((min(offset, log_end), at_ms) for offset, at_ms in self.passes if offset <= log_end)
        return CleanerState(min(self.end, log_end), passes, min(self.deletes_end, log_end), self.deletes)


class SegmentFacts(NamedTuple):
    """The facts of a segment that the plan needs."""

    base_offset: int
    end_offset: int
    size_bytes: int
    schema_id: int
    #: The append time of its first batch, us.
    first_append_us: int
    #: The append time of its last batch, us.
    last_append_us: int


class CleaningCandidate(NamedTuple):
    """A log to be cleaned: its first ``segment_count`` segments, of which ``dirty_bytes`` are dirty."""

    segment_count: int
    dirty_ratio: float
    dirty_bytes: int
    #: Tombstones and markers below this offset may be removed.
    horizon: int


def due(
    segments: Sequence[SegmentFacts], state: CleanerState, *, now_us: int, config: TopicConfig, at_once: bool = False
) -> CleaningCandidate | None:
    """Return the cleaning that is due now, or None.

    ``segments`` are the cleanable ones from the log's front.

    ``at_once`` ignores the dirty ratio.
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
    """Return the earliest time at which a log that is not ``due`` now can become due without new records.

    The time is in microseconds since the epoch; None means never.
    """
    dirty = [segment for segment in segments if segment.end_offset > state.end]
    times = [segment.last_append_us + config.min_compaction_lag_ms * 1000 for segment in dirty]
    times += [segment.first_append_us + config.max_compaction_lag_ms * 1000 + 1 for segment in dirty[:1]]
    if state.deletes > 0:
        times += [(at_ms + config.delete_retention_ms) * 1000 for _, at_ms in state.passes]
    return min((time_us for time_us in times if time_us > now_us), default=None)


def groups(segments: Sequence[SegmentFacts], *, segment_bytes: int) -> list[list[SegmentFacts]]:
    """Return the groups of segments that become one.

    They are neighbours of one schema that fit ``segment_bytes`` before the cleaning.
    """
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
