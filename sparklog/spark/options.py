"""Options of the data source: one table of names, parsed once into frozen values.

The names and meanings are those of Spark's Kafka source where that has the option. Spark hands option names over in
lower case and adds some of its own, which are let through; any other unknown name is refused with the nearest known
one, because a misspelt option that is ignored reads the wrong rows quietly.
A view can both read and insert, so reading and writing share one table and each takes what is its own.
"""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass

import msgspec

from sparklog.client.bootstrap import parse_bootstrap
from sparklog.errors import ConfigError
from sparklog.model import TopicPartition, check_topic_name
from sparklog.spark.offsets import EARLIEST, LATEST, OffsetSpec, parse_offset_spec

BOOTSTRAP_VARIABLE = "SPARKLOG_BOOTSTRAP_SERVERS"

#: Canonical names with what they mean; the lower-case form is what arrives from Spark.
READ_OPTIONS: dict[str, str] = {
    "subscribe": "topics to read, separated by commas",
    "subscribePattern": "regular expression that whole topic names have to match",
    "assign": 'partitions to read: {"topic": [0, 1]}',
    "startingOffsets": 'earliest, or {"topic": {"0": 23, "1": -2}}; -2 is earliest',
    "endingOffsets": 'latest, or {"topic": {"0": 42, "1": -1}}; -1 is latest',
    "includeHeaders": "add the column headers (default topics)",
    "minPartitions": "split the read into at least so many tasks",
}
WRITE_OPTIONS: dict[str, str] = {
    "topic": "topic to write to; wins over a topic column",
    "compression": "none, lz4 or zstd",
}
COMMON_OPTIONS: dict[str, str] = {
    "bootstrap.servers": "host:port,host:port of some brokers",
    "kafka.bootstrap.servers": "the same, under the Kafka source's name",
}
OPTIONS: dict[str, str] = {**COMMON_OPTIONS, **READ_OPTIONS, **WRITE_OPTIONS}

#: What Spark itself puts among the options (table properties, the path of ``load(path)``, streaming's checkpoint).
_SPARKS_OWN = frozenset(
    {"provider", "owner", "path", "checkpointlocation", "location", "external", "comment", "is_managed_location"}
)
_CANONICAL = {name.lower(): name for name in OPTIONS}
_COMPRESSIONS: dict[str, str | None] = {"none": None, "lz4": "lz4", "zstd": "zstd"}


@dataclass(frozen=True, slots=True)
class Subscribe:
    """All partitions of the named topics."""

    topics: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class SubscribePattern:
    """All partitions of the topics whose whole name matches."""

    pattern: str


@dataclass(frozen=True, slots=True)
class Assign:
    """Exactly these partitions."""

    partitions: tuple[TopicPartition, ...]


TopicSelection = Subscribe | SubscribePattern | Assign


@dataclass(frozen=True, slots=True)
class ReadOptions:
    """What a read was asked for; not yet compared with what the cluster has."""

    bootstrap: str
    selection: TopicSelection
    starting: OffsetSpec
    ending: OffsetSpec
    include_headers: bool
    min_partitions: int


@dataclass(frozen=True, slots=True)
class WriteOptions:
    """What a write was asked for. ``topic`` None: the DataFrame has a column that names it."""

    bootstrap: str
    topic: str | None
    compression: str | None


def parse_read_options(options: Mapping[str, str], defaults: Mapping[str, str]) -> ReadOptions:
    """Options as Spark delivers them, over ``defaults`` (canonical names) of a configured source.

    Raises:
        ConfigError: an unknown option, a bad value, none or several of subscribe, subscribePattern and assign.
    """
    given = _known(options)
    starting = parse_offset_spec("startingOffsets", given.get("startingOffsets"), default=EARLIEST)
    ending = parse_offset_spec("endingOffsets", given.get("endingOffsets"), default=LATEST)
    return ReadOptions(
        bootstrap=_bootstrap(given, defaults),
        selection=_selection(given),
        starting=starting,
        ending=ending,
        include_headers=_boolean(given, "includeHeaders"),
        min_partitions=_positive(given, "minPartitions"),
    )


def parse_write_options(options: Mapping[str, str], defaults: Mapping[str, str]) -> WriteOptions:
    """As ``parse_read_options``, for a write."""
    given = _known(options)
    topic = given.get("topic")
    if topic is not None:
        _check_topic("topic", topic)
    compression = given.get("compression", "none").strip().lower()
    if compression not in _COMPRESSIONS:
        raise ConfigError(f"option compression={compression!r}: expected {', '.join(_COMPRESSIONS)}")
    return WriteOptions(
        bootstrap=_bootstrap(given, defaults),
        topic=topic,
        compression=_COMPRESSIONS[compression],
    )


def _known(options: Mapping[str, str]) -> dict[str, str]:
    """Canonical name -> text, without what Spark added."""
    given = {}
    for name, text in options.items():
        lower = name.lower()
        if lower in _CANONICAL:
            given[_CANONICAL[lower]] = text
        elif lower not in _SPARKS_OWN and not lower.startswith("option."):
            raise ConfigError(_unknown(name))
    return given


def _unknown(name: str) -> str:
    near = difflib.get_close_matches(name.lower(), _CANONICAL, n=1, cutoff=0.5)
    hint = f"did you mean {_CANONICAL[near[0]]!r}?" if near else f"known options: {', '.join(sorted(OPTIONS))}"
    return f"unknown option {name!r}; {hint}"


def _bootstrap(given: Mapping[str, str], defaults: Mapping[str, str]) -> str:
    """The option, else its alias, else the configured default, else the environment of the planning process."""
    own, alias = given.get("bootstrap.servers"), given.get("kafka.bootstrap.servers")
    if own is not None and alias is not None and own != alias:
        raise ConfigError(f"bootstrap.servers={own!r} and kafka.bootstrap.servers={alias!r} contradict each other")
    text = own or alias or defaults.get("bootstrap.servers") or os.environ.get(BOOTSTRAP_VARIABLE)
    if not text:
        raise ConfigError(
            f"no brokers to ask: set option bootstrap.servers, call sparklog.configure(spark, bootstrap=...), "
            f"or set {BOOTSTRAP_VARIABLE} before Spark's JVM starts"
        )
    parse_bootstrap(text)
    return text


def _selection(given: Mapping[str, str]) -> TopicSelection:
    names = [name for name in ("subscribe", "subscribePattern", "assign") if name in given]
    if len(names) != 1:
        found = " and ".join(names) or "none of them"
        hint = "; option topic is for writing" if "topic" in given and not names else ""
        raise ConfigError(f"exactly one of subscribe, subscribePattern and assign is expected, found {found}{hint}")
    text = given[names[0]]
    match names[0]:
        case "subscribe":
            topics = tuple(dict.fromkeys(part.strip() for part in text.split(",") if part.strip()))
            if not topics:
                raise ConfigError("option subscribe names no topic")
            for topic in topics:
                _check_topic("subscribe", topic)
            return Subscribe(topics)
        case "subscribePattern":
            try:
                re.compile(text)
            except re.error as error:
                raise ConfigError(f"option subscribePattern={text!r} is not a regular expression: {error}") from None
            return SubscribePattern(text)
        case _:
            return _assign(text)


def _assign(text: str) -> Assign:
    try:
        decoded = msgspec.json.decode(text, type=dict[str, list[int]])
    except msgspec.MsgspecError as error:
        raise ConfigError(f'option assign={text!r}: expected {{"topic": [0, 1]}}, found: {error}') from None
    partitions = tuple(sorted({TopicPartition(topic, number) for topic in decoded for number in decoded[topic]}))
    if not partitions:
        raise ConfigError("option assign names no partition")
    for topic in decoded:
        _check_topic("assign", topic)
    return Assign(partitions)


def _check_topic(option: str, topic: str) -> None:
    if complaint := check_topic_name(topic):
        raise ConfigError(f"option {option}: {complaint}")


def _boolean(given: Mapping[str, str], name: str) -> bool:
    text = given.get(name, "false").strip().lower()
    if text not in {"true", "false"}:
        raise ConfigError(f"option {name}={text!r}: expected true or false")
    return text == "true"


def _positive(given: Mapping[str, str], name: str) -> int:
    """0 when not given."""
    if name not in given:
        return 0
    text = given[name].strip()
    if not text.isdecimal() or not 0 < int(text) <= 1_000_000:
        raise ConfigError(f"option {name}={text!r}: expected a whole number from 1 to 1000000")
    return int(text)
