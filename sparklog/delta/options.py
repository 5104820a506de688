"""What the archive of one topic was asked for, and how the job's arguments are read. Pure."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from pyspark.errors import PySparkException
from pyspark.sql.types import DataType, StructType

from sparklog.delta.seam import Mode
from sparklog.errors import ConfigError
from sparklog.model import check_topic_name

_INTERVAL = re.compile(r"(\d+)\s*(ms|s|m|h)")
_UNITS = {"ms": "milliseconds", "s": "seconds", "m": "minutes", "h": "hours"}


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
