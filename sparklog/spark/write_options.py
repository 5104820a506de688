"""The options of a write: topic, durability, and the creation of topics and columns.

Batches and streams have the same options, except that only a batch write can be named (txnAppId, txnVersion).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from sparklog.client.producer.transaction_run import MAX_ID_BYTES
from sparklog.errors import ConfigError
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

if TYPE_CHECKING:
    from sparklog.net.client_security import ClientSecurity

_COMPRESSIONS: dict[str, str | None] = {"none": None, "lz4": "lz4", "zstd": "zstd"}
_ACKS = {"all": "all", "-1": "all", "1": "1", "0": "0"}
_MAX_VERSION = 2**62
#: The default of the brokers' ``transaction.max.timeout.ms``.
_MAX_TIMEOUT_S = 86_400.0


@dataclass(frozen=True, slots=True)
class NewTopic:
    """The properties of a topic that a write creates. None means the brokers' default."""

    partitions: int | None
    replication_factor: int | None


@dataclass(frozen=True, slots=True)
class NamedWrite:
    """The name and number of a batch write: ``txnAppId`` and ``txnVersion``. They identify a repeated write.

    Source: Delta Lake.
    """

    app_id: str
    version: int


@dataclass(frozen=True, slots=True)
class WriteOptions:
    """The parsed options of a write. If ``topic`` is None, a column of the DataFrame names the topic."""

    bootstrap: str
    topic: str | None
    compression: str | None
    #: If False, rows are written at least once, by a producer without transactions, with ``acks``.
    exactly_once: bool = True
    acks: str = "all"
    timeout_s: float = 900.0
    named: NamedWrite | None = None
    new_topic: NewTopic | None = None
    #: The requested key columns. If None, the topic's key columns are not checked.
    key_columns: tuple[str, ...] | None = None
    merge_schema: bool = False
    security: ClientSecurity | None = None
    #: The time after which the token of tasks expires unless they renew it; None means the brokers' default.
    token_lifetime_ms: int | None = None


def parse_write_options(
    options: Mapping[str, str], defaults: Mapping[str, str], *, streaming: bool = False
) -> WriteOptions:
    """Parse the options of a write, as Spark passes them.

    They override ``defaults``, the options of a configured source by canonical name.

    Raises:
        ConfigError: an option is unknown, a value is not valid, or two options contradict each other.
    """
    given = known_options(options)
    topic = given.get("topic")
    if topic is not None:
        check_topic("topic", topic)
    compression = given.get("compression", "none").strip().lower()
    if compression not in _COMPRESSIONS:
        raise ConfigError(f"option compression={compression!r}: expected {', '.join(_COMPRESSIONS)}")
    parse_boolean(given, "failOnDataLoss", default=True)  # It may be set on a view that both reads and inserts.
    exactly_once = parse_boolean(given, "exactlyOnce", default=True)
    return WriteOptions(
        bootstrap=find_bootstrap(given, defaults),
        topic=topic,
        compression=_COMPRESSIONS[compression],
        exactly_once=exactly_once,
        acks=_acks(given, exactly_once=exactly_once),
        timeout_s=_timeout_s(given),
        named=_named_write(given, exactly_once=exactly_once, streaming=streaming),
        new_topic=_new_topic(given),
        key_columns=_key_columns(given),
        merge_schema=parse_boolean(given, "mergeSchema", default=False),
        security=find_security(given),
        token_lifetime_ms=parse_positive(given, "token.lifetime.ms", at_most=MAX_LIFETIME_MS),
    )


def _acks(given: Mapping[str, str], *, exactly_once: bool) -> str:
    text = (either(given, "acks") or "all").strip().lower()
    if text not in _ACKS:
        raise ConfigError(f"option acks={text!r}: expected all, 1 or 0")
    if exactly_once and _ACKS[text] != "all":
        raise ConfigError(
            f"option acks={text!r}: exactly-once writes require all; set exactlyOnce=false to choose acks, but rows"
            " may then be lost or duplicated"
        )
    return _ACKS[text]


def _timeout_s(given: Mapping[str, str]) -> float:
    timeout_s = parse_duration_ms(given, "transactionTimeout", default="15m") / 1000
    if not 1 <= timeout_s <= _MAX_TIMEOUT_S:
        raise ConfigError(f"option transactionTimeout={given['transactionTimeout']!r}: expected 1s to 24h")
    return timeout_s


def _named_write(given: Mapping[str, str], *, exactly_once: bool, streaming: bool) -> NamedWrite | None:
    app_id, text = given.get("txnAppId"), given.get("txnVersion")
    if app_id is None and text is None:
        return None
    if streaming:
        raise ConfigError(
            "options txnAppId and txnVersion are for batch writes: a stream is identified by its query id"
        )
    if app_id is None or text is None:
        raise ConfigError("options txnAppId and txnVersion: expected both or none, found one")
    if not exactly_once:
        raise ConfigError("options txnAppId and exactlyOnce=false contradict each other")
    if not app_id or len(app_id.encode()) > MAX_ID_BYTES:
        raise ConfigError(f"option txnAppId={app_id!r}: expected 1 to {MAX_ID_BYTES} bytes of text")
    version = text.strip()
    if not (version.isascii() and version.isdecimal()) or int(version) > _MAX_VERSION:
        raise ConfigError(f"option txnVersion={text!r}: expected a whole number from 0")
    return NamedWrite(app_id, int(version))


def _new_topic(given: Mapping[str, str]) -> NewTopic | None:
    partitions = parse_positive(given, "partitions", at_most=2**31 - 1)
    factor = parse_positive(given, "replicationFactor", at_most=2**15 - 1)
    if parse_boolean(given, "createTopic", default=False):
        return NewTopic(partitions, factor)
    if partitions is not None or factor is not None:
        raise ConfigError("options partitions and replicationFactor require createTopic=true")
    return None


def _key_columns(given: Mapping[str, str]) -> tuple[str, ...] | None:
    if "keyColumns" not in given:
        return None
    names = tuple(name for text in given["keyColumns"].split(",") if (name := text.strip()))
    if not names or len(set(names)) != len(names):
        raise ConfigError(f"option keyColumns={given['keyColumns']!r}: expected columns, such as carrier,flight")
    return names
