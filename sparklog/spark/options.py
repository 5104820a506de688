"""Options of the data source: one table of names, and how their texts are read.

The names and meanings are those of Spark's Kafka source where that has the option. Spark hands option names over in
lower case and adds some of its own, which are let through; any other unknown name is refused with the nearest known
one, because a misspelt option that is ignored reads the wrong rows quietly.
A view can both read and insert, so reading and writing share one table and each takes what is its own.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping

from sparklog.client.cluster.bootstrap import parse_bootstrap
from sparklog.errors import ConfigError
from sparklog.model import check_topic_name

#: As brokers' logs and metrics name who asks.
CLIENT_ID = "sparklog-spark"
BOOTSTRAP_VARIABLE = "SPARKLOG_BOOTSTRAP_SERVERS"
#: The command line's; it comes first, here as there.
_SHORT_VARIABLE = "SPARKLOG_BOOTSTRAP"

#: Canonical names with what they mean; the lower-case form is what arrives from Spark.
READ_OPTIONS: dict[str, str] = {
    "subscribe": "topics to read, separated by commas",
    "subscribePattern": "regular expression that whole topic names have to match",
    "assign": 'partitions to read: {"topic": [0, 1]}',
    "startingTimestamp": "ms since the epoch: begin with the first record at or after it; wins over the next two",
    "startingOffsetsByTimestamp": 'ms for each partition: {"topic": {"0": 1700000000000}}; wins over startingOffsets',
    "startingOffsets": 'earliest, latest (streams), or {"topic": {"0": 23, "1": -2}}; -2 earliest, -1 latest',
    "startingOffsetsByTimestampStrategy": "error or latest: where no record is that young",
    "endingTimestamp": "batch: ms; end before the first record at or after it; wins over the next two",
    "endingOffsetsByTimestamp": "batch: ms for each partition; wins over endingOffsets",
    "endingOffsets": 'batch: latest, or {"topic": {"0": 42, "1": -1}}; -1 is latest',
    "failOnDataLoss": "true: fail when records are gone or may be; false: skip them with a warning",
    "isolation.level": "read_committed or read_uncommitted",
    "includeHeaders": "add the column headers (default topics)",
    "includeCastErrors": "add the column _cast_error: what Spark's types cannot hold is null, and it says what",
    "minPartitions": "split the read into at least so many tasks",
    "maxRecordsPerPartition": "split the read so that no task has more offsets",
    "maxOffsetsPerTrigger": "streams: offsets in one batch at most, spread over partitions by what they have",
    "minOffsetsPerTrigger": "streams: wait until there are so many",
    "maxTriggerDelay": "streams: but no longer than this (15m)",
    "groupId": "streams: store the end of the last finished batch in this consumer group",
    "localReads": "auto: tasks map the files of a replica on their host; never: they fetch; require: they fail without",
    "history": "path of the topic's archive, a Delta table: what is in it is read from there, the rest from the log",
    "where": "batch: partitions, offsets and times to read: offset >= 5 and timestamp < '2024-05-01T00:00:00Z'",
}
WRITE_OPTIONS: dict[str, str] = {
    "topic": "topic to write to; wins over a topic column",
    "compression": "none, lz4 or zstd",
    "exactlyOnce": "true: all rows show together, once; false: each when acknowledged, twice when a task runs again",
    "acks": "with exactlyOnce=false: all, 1 or 0",
    "transactionTimeout": "an unfinished write that gives no sign of life for so long is aborted (15m)",
    "txnAppId": "batch: name of writes to this topic that are run again until they succeed; with txnVersion",
    "txnVersion": "batch: number of the write within txnAppId, growing; what is committed already is not written again",
    "createTopic": "true: make a topic that is not there, with the DataFrame's columns",
    "partitions": "createTopic: how many",
    "replicationFactor": "createTopic: how many replicas",
    "keyColumns": "createTopic: columns that decide a row's partition, separated by commas",
    "mergeSchema": "true: add columns that the topic does not have; its older rows read as null",
}
COMMON_OPTIONS: dict[str, str] = {
    "bootstrap.servers": "host:port,host:port of some brokers",
    "kafka.bootstrap.servers": "the same, under the Kafka source's name",
    "kafka.isolation.level": "isolation.level, under the Kafka source's name",
    "kafka.acks": "acks, under the Kafka source's name",
}
OPTIONS: dict[str, str] = {**COMMON_OPTIONS, **READ_OPTIONS, **WRITE_OPTIONS}

#: What a read is of: exactly one of them.
SELECTIONS = ("subscribe", "subscribePattern", "assign")
BOOTSTRAP_OPTIONS = ("bootstrap.servers", "kafka.bootstrap.servers")

#: Options of Spark's Kafka source that can mean nothing here, in lower case -> what to do instead.
_KAFKA_ONLY: dict[str, str] = {
    "kafka.group.id": "reading takes no part in group balancing; groupId stores progress in a group",
    "groupidprefix": "reading takes no part in group balancing; groupId stores progress in a group",
    "fetchoffset.numretries": "requests are repeated until they succeed or time is up",
    "fetchoffset.retryintervalms": "requests are repeated until they succeed or time is up",
    "kafkaconsumer.polltimeoutms": "requests are repeated until they succeed or time is up",
    "kafka.compression.type": "compression is the option of a write",
}

#: What Spark itself puts among the options (table properties, the path of ``load(path)``, streaming's checkpoint).
_SPARKS_OWN = frozenset(
    {"provider", "owner", "path", "checkpointlocation", "location", "external", "comment", "is_managed_location"}
)
_CANONICAL = {name.lower(): name for name in OPTIONS}
_DURATION = re.compile(r"\s*(\d+)\s*([a-z]*)\s*")
_UNIT_MS = {"us": 0.001, "ms": 1, "": 1, "s": 1e3, "m": 6e4, "min": 6e4, "h": 3.6e6, "d": 8.64e7}


def known_options(options: Mapping[str, str]) -> dict[str, str]:
    """Canonical name -> text, without what Spark added. Raises ConfigError for a name that is not in the table."""
    given = {}
    for name, text in options.items():
        lower = name.lower()
        if lower in _CANONICAL:
            given[_CANONICAL[lower]] = text
        elif lower not in _SPARKS_OWN and not lower.startswith("option."):
            raise ConfigError(_unknown(name))
    return given


def _unknown(name: str) -> str:
    import difflib  # not in processes whose options are known

    if hint := _KAFKA_ONLY.get(name.lower()):
        return f"option {name!r} of Spark's Kafka source means nothing here: {hint}"
    near = difflib.get_close_matches(name.lower(), _CANONICAL, n=1, cutoff=0.5)
    if name.lower().startswith("kafka."):
        own = difflib.get_close_matches(name.lower().removeprefix("kafka."), _CANONICAL, n=1, cutoff=0.8)
        hint = f"did you mean {_CANONICAL[own[0]]!r}?" if own else "there is no Kafka client to be set up by it"
        return f"option {name!r} of Spark's Kafka source means nothing here; {hint}"
    hint = f"did you mean {_CANONICAL[near[0]]!r}?" if near else f"known options: {', '.join(sorted(OPTIONS))}"
    return f"unknown option {name!r}; {hint}"


def find_bootstrap(given: Mapping[str, str], defaults: Mapping[str, str]) -> str:
    """The option, else its alias, else the configured default, else the environment of the planning process.

    Raises:
        ConfigError: none of them, two that differ, or an address that cannot be read.
    """
    own = either(given, "bootstrap.servers")
    named = os.environ.get(_SHORT_VARIABLE) or os.environ.get(BOOTSTRAP_VARIABLE)
    text = own or defaults.get("bootstrap.servers") or named
    if not text:
        raise ConfigError(
            f"no brokers to ask: set option bootstrap.servers, call sparklog.configure(spark, bootstrap=...), "
            f"or set {_SHORT_VARIABLE} or {BOOTSTRAP_VARIABLE} before Spark's JVM starts"
        )
    parse_bootstrap(text)
    return text


def either(given: Mapping[str, str], name: str) -> str | None:
    """The text of an option that the Kafka source knows under ``kafka.<name>``."""
    own, alias = given.get(name), given.get(f"kafka.{name}")
    if own is not None and alias is not None and own != alias:
        raise ConfigError(f"{name}={own!r} and kafka.{name}={alias!r} contradict each other")
    return alias if own is None else own


def check_topic(option: str, topic: str) -> None:
    if complaint := check_topic_name(topic):
        raise ConfigError(f"option {option}: {complaint}")


def parse_boolean(given: Mapping[str, str], name: str, *, default: bool) -> bool:
    text = given.get(name, str(default)).strip().lower()
    if text not in {"true", "false"}:
        raise ConfigError(f"option {name}={text!r}: expected true or false")
    return text == "true"


def parse_positive(given: Mapping[str, str], name: str, *, at_most: int = 2**63 - 1) -> int | None:
    """None when not given."""
    if name not in given:
        return None
    text = given[name].strip()
    if not (text.isascii() and text.isdecimal()) or not 0 < int(text) <= at_most:
        raise ConfigError(f"option {name}={text!r}: expected a whole number from 1 to {at_most}")
    return int(text)


def parse_duration_ms(given: Mapping[str, str], name: str, *, default: str) -> int:
    """Spark's texts for durations: a number of ms, or with a unit as in 500ms, 30s, 15m, 1h."""
    text = given.get(name, default)
    match = _DURATION.fullmatch(text.lower())
    if match is None or match[2] not in _UNIT_MS:
        raise ConfigError(f"option {name}={text!r}: expected a duration such as 500ms, 30s, 15m or 1h")
    return int(int(match[1]) * _UNIT_MS[match[2]])
