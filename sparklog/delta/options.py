"""The options of the archive of one topic, and parsers of the job's arguments."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from pyspark.errors import PySparkException
from pyspark.sql.types import DataType, StructType

from sparklog.delta.archive_progress import Mode
from sparklog.errors import ConfigError
from sparklog.model import check_topic_name

_INTERVAL = re.compile(r"(\d+)\s*(ms|s|m|h)")
_UNITS = {"ms": "milliseconds", "s": "seconds", "m": "minutes", "h": "hours"}
_UNIT_S = {"millisecond": 0.001, "second": 1.0, "minute": 60.0, "hour": 3600.0}
_TIME = re.compile(r"(\d+)\s*(s|m|h|d)")
_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86_400}
_SIZE = re.compile(r"(\d+)\s*(k|m|g|)b?", re.IGNORECASE)
_SHIFTS = {"": 0, "k": 10, "m": 20, "g": 30}
#: Delta's default retention of unreferenced files. Readers of older versions must finish within it.
LEAST_RETENTION_H = 168


@dataclass(frozen=True, slots=True)
class MaintenanceOptions:
    """The options of table maintenance. Intervals are in seconds; None means never."""

    #: The target size of compacted files, in bytes.
    target_file_size: int = 128 << 20
    optimize_every_s: float | None = 3600.0
    vacuum_every_s: float | None = 86_400.0
    #: The time for which unreferenced files are kept. None means the table's setting, by default 7 days.
    retain_h: int | None = None


@dataclass(frozen=True, slots=True)
class ArchiveOptions:
    """The options with which one topic is archived."""

    bootstrap: str
    topic: str
    to: str
    group: str
    #: The partition columns. None means ``_date`` for a new table, and no check for an existing one.
    partition_by: tuple[str, ...] | None = None
    #: The interval of batches, in Spark's format. None means to archive the existing records and stop.
    interval: str | None = "30 seconds"
    max_offsets: int = 5_000_000
    fail_on_data_loss: bool = True
    #: The columns to parse from the JSON values of a topic without a schema.
    json: StructType | None = None
    mode: Mode = "append"
    maintenance: MaintenanceOptions = field(default_factory=MaintenanceOptions)


def parse_trigger(text: str) -> str | None:
    """Parse a trigger: return an interval in Spark's format, or None for ``available-now``.

    Raises:
        ConfigError: the text is neither.
    """
    if text == "available-now":
        return None
    match = _INTERVAL.fullmatch(text.strip())
    if match is None:
        raise ConfigError(f"--trigger {text}: expected available-now, or an interval such as 500ms, 30s, 5m or 1h")
    return f"{match[1]} {_UNITS[match[2]]}"


def interval_s(interval: str | None) -> float:
    """Return the seconds of an interval from ``parse_trigger``, or 0 if it is None."""
    if interval is None:
        return 0.0
    count, unit = interval.split()
    return int(count) * _UNIT_S[unit.removesuffix("s")]


def parse_every(option: str, text: str) -> float | None:
    """Parse the interval ``text``: return its seconds, or None for ``never``.

    Raises ConfigError, which names ``option``, for any other text.
    """
    if text == "never":
        return None
    match = _TIME.fullmatch(text.strip())
    if match is None:
        raise ConfigError(f"{option} {text}: expected never, or an interval such as 30m, 1h or 1d")
    return float(int(match[1]) * _SECONDS[match[2]])


def parse_retention(text: str) -> int:
    """Parse a retention time: return it in hours, rounded up.

    Raises ConfigError if the text is not a time, or if the time is shorter than ``LEAST_RETENTION_H``.
    """
    match = _TIME.fullmatch(text.strip())
    hours = -(-int(match[1]) * _SECONDS[match[2]] // 3600) if match is not None else 0
    if hours < LEAST_RETENTION_H:
        raise ConfigError(
            f"--retain {text}: expected a time of at least 7d: readers of older versions need their files; "
            "to use less, set the table's delta.deletedFileRetentionDuration"
        )
    return hours


def parse_size(option: str, text: str) -> int:
    """Parse a size of at least 1 MiB: return it in bytes.

    Raises ConfigError, which names ``option``, for any other text.
    """
    match = _SIZE.fullmatch(text.strip())
    size = int(match[1]) << _SHIFTS[match[2].lower()] if match is not None else 0
    if size < 1 << 20:
        raise ConfigError(f"{option} {text}: expected a size of at least 1m, such as 128m")
    return size


def parse_schemas(
    texts: Iterable[str], topics: Sequence[str], *, parse: Callable[[str], DataType]
) -> dict[str, StructType]:
    """Parse texts of the form ``topic=columns`` or ``columns``; return the columns by topic.

    A text without a topic applies to every topic that no other text names. ``parse`` is Spark's parser of columns,
    which needs a session.

    Raises:
        ConfigError: columns cannot be parsed, or their topic is not archived.
    """
    found: dict[str, StructType] = {}
    for text in texts:
        name, equals, columns = text.partition("=")
        named = equals and not check_topic_name(name.strip())
        chosen = [name.strip()] if named else list(topics)
        if named and chosen[0] not in topics:
            raise ConfigError(f"--schema {text}: topic {chosen[0]} is not in --topics")
        try:
            schema = parse(columns if named else text)
        except PySparkException as error:
            raise ConfigError(f"--schema {text}: {' '.join(str(error).split())[:300]}") from None
        if not isinstance(schema, StructType):
            raise ConfigError(f"--schema {text}: expected columns with types: 'customer string, price double'")
        for topic in chosen:
            if named or topic not in found:
                found[topic] = schema
    return found
