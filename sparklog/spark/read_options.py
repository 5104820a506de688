"""The options of a read: topics, start and end, splitting into tasks, and triggers of a stream.

Batches and streams have the same parser. As in Spark's Kafka source, a stream refuses an end, and a batch ignores
options that apply only to streams (limits of a trigger, groupId).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast, get_args

import msgspec

from sparklog.client.cluster.replica_selector import LocalReadMode
from sparklog.errors import ConfigError
from sparklog.model import TopicPartition
from sparklog.spark.limits import TriggerLimits
from sparklog.spark.offsets import EARLIEST, LATEST, ByOffset, StartPlace, parse_by_offset, parse_by_time
from sparklog.spark.options import (
    MAX_LIFETIME_MS,
    check_topic,
    either,
    find_bootstrap,
    find_security,
    known_options,
    parse_boolean,
    parse_duration_ms,
    parse_positive,
)
from sparklog.spark.read_filter import Bounds, parse_where

if TYPE_CHECKING:
    from sparklog.net.client_security import ClientSecurity

_ISOLATION = {"read_uncommitted": 0, "read_committed": 1}
_BATCH_ONLY = ("endingTimestamp", "endingOffsetsByTimestamp", "endingOffsets", "where")
_MAX_TASKS = 1_000_000
_EVERYTHING = Bounds()
_UNLIMITED = TriggerLimits()


@dataclass(frozen=True, slots=True)
class Subscribe:
    """A selection of topics: all partitions of the named topics."""

    topics: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class SubscribePattern:
    """A selection of topics: all partitions of the topics whose whole name matches a pattern."""

    pattern: str


@dataclass(frozen=True, slots=True)
class Assign:
    """A selection of partitions: exactly the given ones."""

    partitions: tuple[TopicPartition, ...]


TopicSelection = Subscribe | SubscribePattern | Assign


@dataclass(frozen=True, slots=True)
class ReadOptions:
    """The parsed options of a read. They have not been checked against the cluster yet."""

    bootstrap: str
    selection: TopicSelection
    starting: StartPlace
    #: The end of the read; only for batches.
    ending: StartPlace
    include_headers: bool = False
    fail_on_data_loss: bool = True
    #: The isolation level as in the protocol: with 1 only committed records are read.
    isolation: int = 1
    min_partitions: int = 0
    max_records_per_partition: int | None = None
    where: Bounds = _EVERYTHING
    local_reads: LocalReadMode = "auto"
    #: The path of the Delta table of the read's only topic, or of the directory of all archives.
    history: str | None = None
    #: The limits of a trigger, and the consumer group for a stream's progress. Both are only for streams.
    limits: TriggerLimits = _UNLIMITED
    group_id: str | None = None
    security: ClientSecurity | None = None
    #: The time after which the token of tasks expires unless they renew it; None means the brokers' default.
    token_lifetime_ms: int | None = None

    @property
    def is_cut(self) -> bool:
        """Return whether the user's options (minPartitions, maxRecordsPerPartition) determine the number of tasks."""
        return self.min_partitions > 0 or self.max_records_per_partition is not None


def parse_read_options(
    options: Mapping[str, str], defaults: Mapping[str, str], *, streaming: bool = False
) -> ReadOptions:
    """Parse the options of a read, as Spark passes them.

    They override ``defaults``, the options of a configured source by canonical name.

    Raises:
        ConfigError: an option is unknown, or a value is not valid; a stream has an option that is only for batches; or
            not exactly one of subscribe, subscribePattern and assign is set.
    """
    given = known_options(options)
    if streaming and (found := [name for name in _BATCH_ONLY if name in given]):
        raise ConfigError(f"option {found[0]} is for batch reads: a stream has no end")
    return ReadOptions(
        bootstrap=find_bootstrap(given, defaults),
        selection=_selection(given),
        starting=_starting(given, streaming=streaming),
        ending=_ending(given),
        include_headers=parse_boolean(given, "includeHeaders", default=False),
        fail_on_data_loss=parse_boolean(given, "failOnDataLoss", default=True),
        isolation=_isolation(given),
        min_partitions=parse_positive(given, "minPartitions", at_most=_MAX_TASKS) or 0,
        max_records_per_partition=parse_positive(given, "maxRecordsPerPartition"),
        local_reads=_local_reads(given),
        where=parse_where(given["where"]) if "where" in given else _EVERYTHING,
        limits=_limits(given) if streaming else _UNLIMITED,
        group_id=_group(given),
        history=_history(given),
        security=find_security(given),
        token_lifetime_ms=parse_positive(given, "token.lifetime.ms", at_most=MAX_LIFETIME_MS),
    )


@dataclass(frozen=True, slots=True)
class SchemaOptions:
    """The options that determine the columns of a read. They are the same for batches and streams."""

    bootstrap: str
    selection: TopicSelection
    include_headers: bool
    include_cast_errors: bool = False
    security: ClientSecurity | None = None


def parse_schema_options(options: Mapping[str, str], defaults: Mapping[str, str]) -> SchemaOptions:
    """Parse only the options that determine columns.

    Spark asks for the columns before the source knows whether the read is a batch or a stream.
    """
    given = known_options(options)
    return SchemaOptions(
        find_bootstrap(given, defaults),
        _selection(given),
        parse_boolean(given, "includeHeaders", default=False),
        parse_boolean(given, "includeCastErrors", default=False),
        find_security(given),
    )


def _starting(given: Mapping[str, str], *, streaming: bool) -> StartPlace:
    strategy = given.get("startingOffsetsByTimestampStrategy", "error").strip().lower()
    if strategy not in {"error", "latest"}:
        raise ConfigError(f"option startingOffsetsByTimestampStrategy={strategy!r}: expected error or latest")
    for name in ("startingTimestamp", "startingOffsetsByTimestamp"):
        if name in given:
            return parse_by_time(name, given[name], or_latest=strategy == "latest")
    place = parse_by_offset("startingOffsets", given.get("startingOffsets"), default=LATEST if streaming else EARLIEST)
    return place if streaming else _sensible(place, LATEST)


def _ending(given: Mapping[str, str]) -> StartPlace:
    for name in ("endingTimestamp", "endingOffsetsByTimestamp"):
        if name in given:
            return parse_by_time(name, given[name], or_latest=True)
    return _sensible(parse_by_offset("endingOffsets", given.get("endingOffsets"), default=LATEST), EARLIEST)


def _sensible(place: ByOffset, senseless: int) -> ByOffset:
    """Return ``place``. Raises ConfigError for a batch that starts at latest or ends at earliest.

    Such a batch would have no rows. Spark's Kafka source refuses it as well.
    """
    offsets = [place.offsets] if isinstance(place.offsets, int) else place.offsets.values()
    if senseless in offsets:
        name = "latest" if senseless == LATEST else "earliest"
        raise ConfigError(f"option {place.option}: {name} ({senseless}) is not supported for a batch read")
    return place


def _isolation(given: Mapping[str, str]) -> int:
    text = (either(given, "isolation.level") or "read_committed").strip().lower()
    if text not in _ISOLATION:
        raise ConfigError(f"option isolation.level={text!r}: expected {' or '.join(sorted(_ISOLATION))}")
    return _ISOLATION[text]


def _local_reads(given: Mapping[str, str]) -> LocalReadMode:
    text = given.get("localReads", "auto").strip().lower()
    for known in get_args(LocalReadMode):
        if text == known:
            return cast(LocalReadMode, known)
    raise ConfigError(f"option localReads={text!r}: expected {', '.join(get_args(LocalReadMode))}")


def _history(given: Mapping[str, str]) -> str | None:
    if "history" not in given:
        return None
    if not given["history"].strip():
        raise ConfigError("option history is empty: expected a path")
    if history_topic(_selection(given)) is None:
        raise ConfigError("option history requires a single topic in subscribe or assign")
    if not _isolation(given):
        raise ConfigError(
            "option history requires isolation.level=read_committed, because archives hold committed records only"
        )
    return given["history"].strip()


def history_topic(selection: TopicSelection) -> str | None:
    """Return the only topic of a selection, or None if the selection has several topics or is a pattern."""
    match selection:
        case Subscribe(topics):
            names = set(topics)
        case Assign(partitions):
            names = {partition.topic for partition in partitions}
        case SubscribePattern():
            names = set()
    return names.pop() if len(names) == 1 else None


def _limits(given: Mapping[str, str]) -> TriggerLimits:
    most = parse_positive(given, "maxOffsetsPerTrigger")
    least = parse_positive(given, "minOffsetsPerTrigger")
    delay_ms = parse_duration_ms(given, "maxTriggerDelay", default="15m")
    if least is not None and most is not None and least > most:
        raise ConfigError(f"minOffsetsPerTrigger {least} is greater than maxOffsetsPerTrigger {most}")
    return TriggerLimits(most, least, delay_ms)


def _group(given: Mapping[str, str]) -> str | None:
    group = given.get("groupId")
    if group is not None and not 0 < len(group.strip().encode()) <= 249:
        raise ConfigError(f"option groupId={group!r}: expected 1 to 249 bytes")
    return group.strip() if group is not None else None


def _selection(given: Mapping[str, str]) -> TopicSelection:
    names = [name for name in ("subscribe", "subscribePattern", "assign") if name in given]
    if len(names) != 1:
        found = " and ".join(names) or "none"
        hint = "; option topic is for writes" if "topic" in given and not names else ""
        if not given:
            hint = (
                "; to store options in a table, create it without columns: CREATE TABLE t USING sparklog OPTIONS (...)"
            )
        raise ConfigError(f"expected exactly one of subscribe, subscribePattern and assign, found {found}{hint}")
    text = given[names[0]]
    match names[0]:
        case "subscribe":
            topics = tuple(dict.fromkeys(part.strip() for part in text.split(",") if part.strip()))
            if not topics:
                raise ConfigError("option subscribe has no topics")
            for topic in topics:
                check_topic("subscribe", topic)
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
        raise ConfigError("option assign has no partitions")
    for topic in decoded:
        check_topic("assign", topic)
    return Assign(partitions)
