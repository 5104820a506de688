"""The offsets of a read: parsing of the user's offsets and times, resolution to offsets of the logs, and tasks.

The module does no I/O: callers pass log ends and offsets of times. The formats are those of Spark's Kafka source:
``earliest``, ``latest``, JSON ``{"topic": {"0": 23, "1": -1}}`` with -2 for earliest and -1 for latest, or times in
milliseconds. JSON by partition must name every partition of the read, because a forgotten partition would silently be
read from another offset.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import msgspec

from sparklog.errors import BrokerError, ConfigError, ErrorCode
from sparklog.model import OffsetRange, TopicPartition

EARLIEST = -2
LATEST = -1

_NAMES = {"earliest": EARLIEST, "latest": LATEST}
#: The maximum number of milliseconds that fits into 64 bits as microseconds.
_MAX_MS = (2**63 - 1) // 1000


@dataclass(frozen=True, slots=True)
class ByOffset:
    """A start or end of a read that the user gives by offset.

    ``offsets`` is EARLIEST or LATEST for all partitions, or it has an offset, EARLIEST or LATEST for each partition.
    """

    option: str
    offsets: int | Mapping[TopicPartition, int]


@dataclass(frozen=True, slots=True)
class ByTime:
    """A start or end of a read, given as a time in us since the epoch: the first record at or after that time.

    ``times`` is one time for all partitions, or it has a time for each partition. If a partition has no such record,
    the end of its log is used if ``or_latest`` is set; otherwise this is an error.
    """

    option: str
    times: int | Mapping[TopicPartition, int]
    or_latest: bool

    def of(self, partition: TopicPartition) -> int:
        return self.times if isinstance(self.times, int) else self.times[partition]


#: The start or end of a read.
StartPlace = ByOffset | ByTime


class PartitionRange(NamedTuple):
    """The offsets ``[start, end)`` of one partition, which one task reads."""

    partition: TopicPartition
    start: int
    end: int


def parse_by_offset(option: str, text: str | None, *, default: int) -> ByOffset:
    """Parse the option startingOffsets or endingOffsets. If it is not set (None), the result is ``default``.

    Raises:
        ConfigError: the text is neither earliest, latest nor JSON in the format that the module describes.
    """
    if text is None:
        return ByOffset(option, default)
    if text.strip().lower() in _NAMES:
        return ByOffset(option, _NAMES[text.strip().lower()])
    offsets = _by_partition(option, text, 'earliest, latest or {"topic": {"0": 23}}')
    for tp, offset in offsets.items():
        if offset < EARLIEST:
            raise ConfigError(f"option {option}: offset {offset} of {tp} is less than -2")
    return ByOffset(option, offsets)


def parse_by_time(option: str, text: str, *, or_latest: bool) -> ByTime:
    """Parse an option that gives times in ms: one number, or JSON by partition.

    The text is JSON if the option's name ends with OffsetsByTimestamp.

    Raises:
        ConfigError: the text does not have this format, or a time is before 1970 or exceeds 64 bits of microseconds.
    """
    if "OffsetsByTimestamp" in option:
        times = _by_partition(option, text, '{"topic": {"0": 1700000000000}}')
        return ByTime(option, {tp: _to_us(option, str(ms)) for tp, ms in times.items()}, or_latest)
    return ByTime(option, _to_us(option, text.strip()), or_latest)


def _to_us(option: str, text: str) -> int:
    if not (text.isascii() and text.isdecimal()) or int(text) > _MAX_MS:
        raise ConfigError(f"option {option}: expected milliseconds since 1970, found {text!r}")
    return int(text) * 1000


def _by_partition(option: str, text: str, expected: str) -> dict[TopicPartition, int]:
    try:
        decoded = msgspec.json.decode(text, type=dict[str, dict[str, int]])
    except msgspec.MsgspecError as error:
        raise ConfigError(f"option {option}={text!r}: expected {expected}, found: {error}") from None
    found = {}
    for topic, numbers in decoded.items():
        for number, value in numbers.items():
            if not (number.isascii() and number.isdecimal()):
                raise ConfigError(f"option {option}: partition {number!r} of topic {topic!r} is not a number")
            found[TopicPartition(topic, int(number))] = value
    if not found:
        raise ConfigError(f"option {option}={text!r} has no partitions")
    return found


def asked_offsets(*places: StartPlace) -> dict[TopicPartition, int]:
    """Return the highest offset that the user gave for each partition as a start or end.

    EARLIEST and LATEST count as 0. A partition for which the user gave no offset is omitted.
    """
    named: dict[TopicPartition, int] = {}
    for place in places:
        if isinstance(place, ByOffset) and not isinstance(place.offsets, int):
            for tp, offset in place.offsets.items():
                named[tp] = max(offset, named.get(tp, 0))
    return named


def times_to_ask(place: StartPlace, partitions: Collection[TopicPartition]) -> dict[TopicPartition, int]:
    """Return the time (us) to look up for each partition. The result is empty for a start or end given by offset.

    Raises:
        ConfigError: ``place`` names single partitions, but not exactly the partitions of the read.
    """
    _check_partitions(place, partitions)
    return {tp: place.of(tp) for tp in partitions} if isinstance(place, ByTime) else {}


def settle(
    place: StartPlace,
    held: Mapping[TopicPartition, OffsetRange],
    at_times: Mapping[TopicPartition, int | None],
    *,
    strict: bool = True,
) -> dict[TopicPartition, int]:
    """Resolve ``place``, the start or the end of a read, to an offset in each partition of ``held``.

    ``held`` has the earliest offset and the readable end of each log. ``at_times`` has the offsets of the times from
    ``times_to_ask``, or None if no record is at or after the time. Without ``strict``, an offset outside the log is
    moved to the nearer end of the log.

    Raises:
        ConfigError: ``place`` names single partitions, but not exactly the partitions of the read.
        BrokerError: OFFSET_OUT_OF_RANGE if an offset is outside the log, or no record is at or after a time.
    """
    _check_partitions(place, held)
    if isinstance(place, ByTime):
        return {tp: _at_time(place, tp, held[tp], found=at_times[tp]) for tp in held}
    return {tp: _at_offset(place, tp, held[tp], strict=strict) for tp in held}


def _check_partitions(place: StartPlace, partitions: Collection[TopicPartition]) -> None:
    named = place.times if isinstance(place, ByTime) else place.offsets
    if isinstance(named, int):
        return
    missing, surplus = sorted(set(partitions) - set(named)), sorted(set(named) - set(partitions))
    if missing or surplus:
        kind = "a time" if isinstance(place, ByTime) else "an offset"
        hint = "" if isinstance(place, ByTime) else " (-2 earliest, -1 latest)"
        raise ConfigError(
            f"option {place.option} must give {kind} for each partition of the read{hint}; "
            f"missing: {_listed(missing)}; not read: {_listed(surplus)}"
        )


def _at_time(place: ByTime, partition: TopicPartition, held: OffsetRange, *, found: int | None) -> int:
    if found is not None:
        return max(held.start, min(found, held.end))
    if place.or_latest:
        return held.end
    raise BrokerError(
        ErrorCode.OFFSET_OUT_OF_RANGE,
        f"{place.option}: {partition} has no record at or after {place.of(partition) // 1000} ms; "
        "startingOffsetsByTimestampStrategy=latest starts at the end of the log instead",
    )


def _at_offset(place: ByOffset, partition: TopicPartition, held: OffsetRange, *, strict: bool) -> int:
    offset = place.offsets if isinstance(place.offsets, int) else place.offsets[partition]
    if offset == EARLIEST:
        return held.start
    if offset == LATEST:
        return held.end
    if strict and not held.start <= offset <= held.end:
        raise BrokerError(
            ErrorCode.OFFSET_OUT_OF_RANGE,
            f"{place.option}: offset {offset} of {partition} is outside the log, which has {held.start} to {held.end}",
        )
    return max(held.start, min(offset, held.end))


def settle_ranges(starts: Mapping[TopicPartition, int], ends: Mapping[TopicPartition, int]) -> list[PartitionRange]:
    """Return the ranges from ``starts`` to ``ends``, ordered by partition, without empty ones.

    Raises:
        ConfigError: a start is after its end.
    """
    for partition, start in starts.items():
        if start > ends[partition]:
            raise ConfigError(f"{partition}: the read would start at offset {start}, after its end {ends[partition]}")
    return [PartitionRange(tp, starts[tp], ends[tp]) for tp in sorted(starts) if starts[tp] < ends[tp]]


def cut_ranges(
    ranges: Sequence[PartitionRange], *, at_least: int = 0, max_records: int | None = None
) -> list[PartitionRange]:
    """Split ranges into the ranges of tasks, as Spark's Kafka source does.

    First split each range into pieces of at most ``max_records`` offsets (maxRecordsPerPartition). If there are then
    fewer than ``at_least`` ranges (minPartitions), split further.
    """
    if max_records is not None:
        ranges = [
            piece for found in ranges for piece in split_ranges([found], -((found.start - found.end) // max_records))
        ]
    return split_ranges(ranges, at_least)


def split_ranges(ranges: Sequence[PartitionRange], at_least: int) -> list[PartitionRange]:
    """Split the largest ranges until there are at least ``at_least`` ranges, or each has one offset.

    The pieces of one range have nearly equal sizes. All pieces stay in order and cover exactly the given ranges. No
    piece is empty.
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
