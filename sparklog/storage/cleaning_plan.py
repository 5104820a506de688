"""The plan of a cleaning: when a log is due for compaction, up to which offset, and which segments are merged.

This module is pure. A log is cleaned from its front. Earlier cleanings have cleaned the part below
``CleanerState.end``. The dirty part begins at this offset and ends at a limit. The limit is never above the base offset
of the active segment, the high watermark or the last stable offset. A segment with records younger than
``min.compaction.lag.ms`` is above the limit too.

Tombstones and markers are removed in two steps, because consumers and followers may be in the middle of the log. The
first cleaning that reaches a tombstone or marker removes the records that the tombstone or marker deletes. A later
cleaning removes the tombstone or marker itself, at least ``delete.retention.ms`` after the first cleaning. The age of a
record is counted from the leader's clock at the append, not from the event time, which may be old. Source: Kafka's
``LogCleanerManager`` and ``Cleaner``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from sparklog.config import TopicConfig

CLEANER_FILE = "cleaned"


class CleanerState(msgspec.Struct, frozen=True):
    """The progress of the compaction of one log, stored in the log's file ``cleaned``.

    - ``end``: below this offset each key has only its newest record.
    - ``passes``: pairs of an offset and the time of the first compaction that reached it, in ms since the epoch.
      Offsets and times ascend.
    - ``deletes_end``: tombstones and transaction markers below this offset have been removed.
    - ``deletes``: the number of tombstones and transaction markers that are still in the log.
    """

    end: int = 0
    passes: tuple[tuple[int, int], ...] = ()
    deletes_end: int = 0
    deletes: int = 0
    version: int = 1

    def horizon(self, now_ms: int, delete_retention_ms: int) -> int:
        """Return the offset below which tombstones and markers are old enough to be removed now."""
        passed = [offset for offset, at_ms in self.passes if at_ms + delete_retention_ms <= now_ms]
        return max(passed, default=0)

    def cleaned(self, end: int, now_ms: int, *, horizon: int, deletes: int) -> CleanerState:
        """Return the state after a compaction up to ``end`` that removed tombstones and markers below ``horizon``.

        ``deletes`` is the number of tombstones and markers that are still in the log.
        """
        # Passes below the horizon have served their purpose.
        kept = tuple(one for one in self.passes if one[0] >= horizon)
        passes = (*kept, (end, now_ms)) if end > self.end else kept
        return CleanerState(max(end, self.end), passes, max(horizon, self.deletes_end), deletes)

    def truncated(self, log_end: int) -> CleanerState:
        """Return the state after a truncation of the log to ``log_end``.

        Batches that are appended later count as dirty.
        """
        if self.end <= log_end and self.deletes_end <= log_end:
            return self
        passes = tuple((min(offset, log_end), at_ms) for offset, at_ms in self.passes if offset <= log_end)
        return CleanerState(min(self.end, log_end), passes, min(self.deletes_end, log_end), self.deletes)


class SegmentFacts(NamedTuple):
    """The properties of a segment that decide whether and how it is compacted."""

    base_offset: int
    end_offset: int
    size_bytes: int
    schema_id: int
    #: The append time of the segment's first batch, in microseconds since the epoch.
    first_append_us: int
    #: The append time of the segment's last batch, in microseconds since the epoch.
    last_append_us: int


class CleaningCandidate(NamedTuple):
    """The part of a log that a compaction should process now: its first ``segment_count`` segments.

    ``dirty_bytes`` is the total size of the segments in this part that no earlier compaction has covered completely.
    """

    segment_count: int
    dirty_ratio: float
    dirty_bytes: int
    #: Tombstones and markers below this offset may be removed.
    horizon: int


def due(
    segments: Sequence[SegmentFacts], state: CleanerState, *, now_us: int, config: TopicConfig, at_once: bool = False
) -> CleaningCandidate | None:
    """Return the part of a log that must be compacted now, or None if no compaction is due.

    ``segments`` are the segments that may be compacted, from the log's start on. With ``at_once`` a log with dirty
    segments is due even if its ratio of dirty bytes is low.
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
    """Return the next time at which a compaction may become due although no records are appended.

    The time is in microseconds since the epoch. None means never.
    """
    dirty = [segment for segment in segments if segment.end_offset > state.end]
    times = [segment.last_append_us + config.min_compaction_lag_ms * 1000 for segment in dirty]
    times += [segment.first_append_us + config.max_compaction_lag_ms * 1000 + 1 for segment in dirty[:1]]
    if state.deletes > 0:
        times += [(at_ms + config.delete_retention_ms) * 1000 for _, at_ms in state.passes]
    return min((time_us for time_us in times if time_us > now_us), default=None)


def groups(segments: Sequence[SegmentFacts], *, segment_bytes: int) -> list[list[SegmentFacts]]:
    """Divide the segments into groups, and return them. A compaction merges each group into one segment.

    The segments of a group are adjacent, have one schema, and together have at most ``segment_bytes`` before the
    compaction. A larger segment forms a group alone.
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
