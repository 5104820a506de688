"""Which offsets a read covers: what the user asked for, settled against what the logs hold, cut into tasks.

Pure: the log ends come in as values. The forms are those of Spark's Kafka source: ``earliest``, ``latest``, or JSON
``{"topic": {"0": 23, "1": -1}}`` with -2 for earliest and -1 for latest. Specific offsets have to name every partition
of the read, because one that was forgotten would silently be read from somewhere else.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

import msgspec

from sparklog.errors import BrokerError, ConfigError, ErrorCode
from sparklog.model import OffsetRange, TopicPartition

EARLIEST = -2
LATEST = -1

_NAMES = {"earliest": EARLIEST, "latest": LATEST}

#: EARLIEST or LATEST for every partition, or an offset (or one of the two) for each.
OffsetSpec = int | dict[TopicPartition, int]


class PartitionRange(NamedTuple):
    """Offsets ``[start, end)`` of one partition that one task reads."""

    partition: TopicPartition
    start: int
    end: int


def parse_offset_spec(option: str, text: str | None, *, default: int) -> OffsetSpec:
    """Parse startingOffsets or endingOffsets of a batch read.

    Raises:
        ConfigError: neither a name nor JSON of the form above; a start of latest or an end of earliest, which a batch
            read would turn into no rows.
    """
    if text is None:
        return default
    spec = _parse(option, text.strip())
    senseless = LATEST if option == "startingOffsets" else EARLIEST
    for value in [spec] if isinstance(spec, int) else spec.values():
        if value == senseless:
            name = next(name for name, number in _NAMES.items() if number == senseless)
            raise ConfigError(f"option {option}={text!r}: {name} ({senseless}) is not for a batch read")
    return spec


def _parse(option: str, text: str) -> OffsetSpec:
    if text.lower() in _NAMES:
        return _NAMES[text.lower()]
    expected = 'earliest, latest or {"topic": {"0": 23}}'
    try:
        decoded = msgspec.json.decode(text, type=dict[str, dict[str, int]])
    except msgspec.MsgspecError as error:
        raise ConfigError(f"option {option}={text!r}: expected {expected}, found: {error}") from None
    spec = {}
    for topic, offsets in decoded.items():
        for number, offset in offsets.items():
            if not number.isdecimal():
                raise ConfigError(f"option {option}: partition {number!r} of topic {topic!r} is not a number")
            if offset < EARLIEST:
                raise ConfigError(f"option {option}: offset {offset} of {topic}-{number} is below -2")
            spec[TopicPartition(topic, int(number))] = offset
    if not spec:
        raise ConfigError(f"option {option}={text!r} names no partition")
    return spec


def check_partitions(option: str, spec: OffsetSpec, partitions: Collection[TopicPartition]) -> None:
    """Raises ConfigError unless specific offsets name exactly the partitions of the read."""
    if isinstance(spec, int):
        return
    missing, surplus = sorted(set(partitions) - set(spec)), sorted(set(spec) - set(partitions))
    if missing or surplus:
        raise ConfigError(
            f"option {option} has to give an offset for each partition read (-2 earliest, -1 latest); "
            f"missing: {_listed(missing)}; not read: {_listed(surplus)}"
        )


def asked_offsets(*specs: OffsetSpec) -> dict[TopicPartition, int]:
    """The highest offset that is asked for in each partition: the log is believed to reach it."""
    highest: dict[TopicPartition, int] = {}
    for spec in specs:
        for partition, offset in spec.items() if isinstance(spec, dict) else ():
            highest[partition] = max(offset, highest.get(partition, 0))
    return highest


def settle_ranges(
    *, starting: OffsetSpec, ending: OffsetSpec, log_ends: Mapping[TopicPartition, OffsetRange]
) -> list[PartitionRange]:
    """The ranges to read, ordered by partition, empty ones left out.

    ``log_ends`` gives for each partition the earliest offset and the end of what is committed.

    Raises:
        ConfigError: the specification names other partitions, or a start lies behind its end.
        BrokerError: OFFSET_OUT_OF_RANGE when an asked offset is not within the log.
    """
    check_partitions("startingOffsets", starting, log_ends)
    check_partitions("endingOffsets", ending, log_ends)
    ranges = []
    for partition in sorted(log_ends):
        held = log_ends[partition]
        start = _settle("startingOffsets", starting, partition, held=held)
        end = _settle("endingOffsets", ending, partition, held=held)
        if start > end:
            raise ConfigError(f"{partition}: startingOffsets {start} lies behind endingOffsets {end}")
        if start < end:
            ranges.append(PartitionRange(partition, start, end))
    return ranges


def _settle(option: str, spec: OffsetSpec, partition: TopicPartition, *, held: OffsetRange) -> int:
    offset = spec if isinstance(spec, int) else spec[partition]
    if offset == EARLIEST:
        return held.start
    if offset == LATEST:
        return held.end
    if not held.start <= offset <= held.end:
        raise BrokerError(
            ErrorCode.OFFSET_OUT_OF_RANGE,
            f"{option} {offset} of {partition} found, {held.start} to {held.end} expected",
        )
    return offset


def split_ranges(ranges: Sequence[PartitionRange], at_least: int) -> list[PartitionRange]:
    """Cut the largest ranges until there are ``at_least`` of them, in pieces of nearly equal size per partition.

    Pieces stay in order and together cover exactly what came in; a range is never cut below one offset.
    """
    total = sum(found.end - found.start for found in ranges)
    spare = min(at_least, total) - len(ranges)
    counts = [1 + max(0, spare) * (found.end - found.start) // total for found in ranges]
    largest = [(-(found.end - found.start) / counts[at], at) for at, found in enumerate(ranges)]
    heapq.heapify(largest)
    for _ in range(len(ranges) + spare - sum(counts)):
        at = largest[0][1]
        counts[at] += 1
        heapq.heapreplace(largest, (-(ranges[at].end - ranges[at].start) / counts[at], at))
    pieces = []
    for found, count in zip(ranges, counts, strict=True):
        size = found.end - found.start
        cuts = [found.start + size * step // count for step in range(count + 1)]
        pieces += [PartitionRange(found.partition, low, high) for low, high in itertools.pairwise(cuts)]
    return pieces


def _listed(partitions: Sequence[TopicPartition]) -> str:
    shown = ", ".join(str(partition) for partition in partitions[:8])
    more = f" and {len(partitions) - 8} more" if len(partitions) > 8 else ""
    return shown + more or "none"
