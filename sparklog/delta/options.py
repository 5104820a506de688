"""What the archive of one topic was asked for, and how the job's arguments are read. Pure."""

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
#: Delta's own for files that a table has no more: readers of older versions are counted on to be done by then.
LEAST_RETENTION_H = 168


@dataclass(frozen=True, slots=True)
class MaintenanceOptions:
    """How the tables are kept; intervals in s, None: never."""

    #: Of compacted files, in bytes.
    target_file_size: int = 128 << 20
    optimize_every_s: float | None = 3600.0
    vacuum_every_s: float | None = 86_400.0
    #: How long files stay that the table has no more; None: as the table has it, 7 days unless somebody set it.
    retain_h: int | None = None


@dataclass(frozen=True, slots=True)
class ArchiveOptions:
    """What one topic's archive was asked for."""

    bootstrap: str
    topic: str
    to: str
    group: str
    #: None: a new table by ``_date``, one that is there as it is.
    partition_by: tuple[str, ...] | None = None
    #: Spark's text for an interval; None: what is there when it begins, and then the end.
    interval: str | None = "30 seconds"
    max_offsets: int = 5_000_000
    fail_on_data_loss: bool = True
    #: Columns in the values of a topic without a schema, which are JSON.
    json: StructType | None = None
    mode: Mode = "append"
    maintenance: MaintenanceOptions = field(default_factory=MaintenanceOptions)


def parse_trigger(text: str) -> str | None:
    """Spark's text for an interval; None for ``available-now``.

    Raises:
        ConfigError: neither.
    """
    if text == "available-now":
        return None
    match = _INTERVAL.fullmatch(text.strip())
    if match is None:
        raise ConfigError(f"--trigger {text}: expected available-now, or an interval such as 500ms, 30s, 5m or 1h")
    return f"{match[1]} {_UNITS[match[2]]}"


def interval_s(interval: str | None) -> float:
    """Of Spark's text for an interval, a number and a unit as ``parse_trigger`` makes it; 0: none."""
    if interval is None:
        return 0.0
    count, unit = interval.split()
    return int(count) * _UNIT_S[unit.removesuffix("s")]


def parse_every(option: str, text: str) -> float | None:
    """In s; None for ``never``. Raises ConfigError."""
    if text == "never":
        return None
    match = _TIME.fullmatch(text.strip())
    if match is None:
        raise ConfigError(f"{option} {text}: expected never, or an interval such as 30m, 1h or 1d")
    return float(int(match[1]) * _SECONDS[match[2]])


def parse_retention(text: str) -> int:
    """In h. Raises ConfigError: no time, or one below ``LEAST_RETENTION_H``."""
    match = _TIME.fullmatch(text.strip())
    hours = -(-int(match[1]) * _SECONDS[match[2]] // 3600) if match is not None else 0
    if hours < LEAST_RETENTION_H:
        raise ConfigError(
            f"--retain {text}: expected a time of at least 7d: readers of a version that is not the newest rely on its "
            "files; for less set the table's delta.deletedFileRetentionDuration"
        )
    return hours


def parse_size(option: str, text: str) -> int:
    """In bytes. Raises ConfigError."""
    match = _SIZE.fullmatch(text.strip())
    size = int(match[1]) << _SHIFTS[match[2].lower()] if match is not None else 0
    if size < 1 << 20:
        raise ConfigError(f"{option} {text}: expected a size of at least 1m, such as 128m")
    return size


def parse_schemas(
    texts: Iterable[str], topics: Sequence[str], *, parse: Callable[[str], DataType]
) -> dict[str, StructType]:
    """Columns by topic, from texts ``topic=columns``, or ``columns`` for all topics that have none of their own.
    ``parse``: Spark's parser of columns, which needs a session.

    Raises:
        ConfigError: columns that cannot be parsed, or of a topic that is not archived.
    """
    found: dict[str, StructType] = {}
    for text in texts:
        name, equals, columns = text.partition("=")
        named = equals and not check_topic_name(name.strip())
        chosen = [name.strip()] if named else list(topics)
        if named and chosen[0] not in topics:
            raise ConfigError(f"--schema {text}: topic {chosen[0]} is not among those to be archived")
        try:
            schema = parse(columns if named else text)
        except PySparkException as error:
            raise ConfigError(f"--schema {text}: {' '.join(str(error).split())[:300]}") from None
        if not isinstance(schema, StructType):
            raise ConfigError(f"--schema {text}: columns and their types expected: 'customer string, price double'")
        for topic in chosen:
            if named or topic not in found:
                found[topic] = schema
    return found
