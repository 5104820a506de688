"""The options of the data source: one table of names, and parsers of the values.

Options that Spark's Kafka source also has keep their names and meanings. Spark passes option names in lower case and
adds its own options, which are accepted. Any other unknown name is refused with the most similar known name, because
ignoring a misspelled option would silently read the wrong rows. A view can both read and insert, so reads and writes
share one table, and each uses its own options.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING

from sparklog.client.cluster.bootstrap import parse_bootstrap
from sparklog.errors import ConfigError
from sparklog.model import check_topic_name

if TYPE_CHECKING:
    from sparklog.net.client_security import ClientSecurity

#: The client name in brokers' logs and metrics.
CLIENT_ID = "sparklog-spark"
BOOTSTRAP_VARIABLE = "SPARKLOG_BOOTSTRAP_SERVERS"
#: The environment variable of the command line. It takes precedence over the long variable, as on the command line.
_SHORT_VARIABLE = "SPARKLOG_BOOTSTRAP"

#: The canonical names of the options, with their meanings. Spark passes them in lower case.
READ_OPTIONS: dict[str, str] = {
    "subscribe": "comma-separated topics to read",
    "subscribePattern": "regular expression that must match whole topic names",
    "assign": 'partitions to read: {"topic": [0, 1]}',
    "startingTimestamp": "ms since the epoch: start at the first record at or after it; overrides the next two options",
    "startingOffsetsByTimestamp": 'ms for each partition: {"topic": {"0": 1700000000000}}; overrides startingOffsets',
    "startingOffsets": 'earliest, latest (streams), or {"topic": {"0": 23, "1": -2}}; -2 earliest, -1 latest',
    "startingOffsetsByTimestampStrategy": "if no record is at or after the time: error, or latest (start at the end)",
    "endingTimestamp": "batch: ms; end before the first record at or after it; overrides the next two options",
    "endingOffsetsByTimestamp": "batch: ms for each partition; overrides endingOffsets",
    "endingOffsets": 'batch: latest, or {"topic": {"0": 42, "1": -1}}; -1 is latest',
    "failOnDataLoss": "true: fail if records are lost or may be lost; false: skip them with a warning",
    "isolation.level": "read_committed or read_uncommitted",
    "includeHeaders": "add the column headers (topics without a schema)",
    "includeCastErrors": "add the column _cast_error, which describes values that Spark cannot hold; they become null",
    "minPartitions": "minimum number of tasks of the read",
    "maxRecordsPerPartition": "maximum offsets per task",
    "maxOffsetsPerTrigger": "streams: maximum offsets per batch, divided in proportion to what partitions have",
    "minOffsetsPerTrigger": "streams: minimum available offsets to start a batch",
    "maxTriggerDelay": "streams: maximum wait for minOffsetsPerTrigger (15m)",
    "groupId": "streams: store the end of the last completed batch in this consumer group",
    "localReads": "tasks map the files of a replica on their host: auto (otherwise fetch), never, require (or fail)",
    "history": "path of the topic's archive, a Delta table: archived records are read from it, later ones from the log",
    "where": "batch: partitions, offsets and times to read: offset >= 5 and timestamp < '2024-05-01T00:00:00Z'",
}
WRITE_OPTIONS: dict[str, str] = {
    "topic": "topic to write to; overrides a topic column",
    "compression": "none, lz4 or zstd",
    "exactlyOnce": "true: all rows become visible together, once; false: retried tasks may duplicate rows",
    "acks": "with exactlyOnce=false: all, 1 or 0",
    "transactionTimeout": "time without heartbeats after which an unfinished write is aborted (15m)",
    "txnAppId": "batch: name of a sequence of idempotent writes to this topic; requires txnVersion",
    "txnVersion": "batch: increasing number of the write within txnAppId; a committed version is not written again",
    "createTopic": "true: create the topic with the DataFrame's columns if it does not exist",
    "partitions": "createTopic: number of partitions",
    "replicationFactor": "createTopic: number of replicas",
    "keyColumns": "createTopic: comma-separated columns that determine a row's partition",
    "mergeSchema": "true: add columns that the topic does not have; they are null in older rows",
}
COMMON_OPTIONS: dict[str, str] = {
    "bootstrap.servers": "host:port,host:port of one or more brokers",
    "kafka.bootstrap.servers": "alias of bootstrap.servers, for the Kafka source",
    "kafka.isolation.level": "alias of isolation.level, for the Kafka source",
    "kafka.acks": "alias of acks, for the Kafka source",
    "token.lifetime.ms": "ms after which the token of tasks expires unless they renew it; at most the brokers'",
}
#: The options for TLS and the login. Each may also have the prefix ``kafka.``, as for the Kafka source.
SECURITY_OPTIONS: dict[str, str] = {
    "security.protocol": "PLAINTEXT, SSL, SASL_PLAINTEXT or SASL_SSL",
    "sasl.mechanism": "SCRAM-SHA-512 or SCRAM-SHA-256",
    "sasl.jaas.config": "the login module of Kafka's Java client, with a reference as the password",
    "sasl.username": "user of the login, instead of sasl.jaas.config",
    "sasl.password": "reference to the password: ${file:/path}, ${file:/path:key} or ${env:NAME}",
    "ssl.truststore.location": "PEM file with the authorities that the client trusts",
    "ssl.truststore.type": "PEM",
    "ssl.ca.location": "alias of ssl.truststore.location",
    "ssl.keystore.location": "PEM file with the client's certificate, and perhaps its key",
    "ssl.keystore.type": "PEM",
    "ssl.certificate.location": "alias of ssl.keystore.location",
    "ssl.key.location": "PEM file with the client's key",
    "ssl.key.password": "reference to the password of the key",
    "ssl.truststore.password": "has no effect: PEM files of certificates have no password",
    "ssl.keystore.password": "has no effect, as above",
    "sasl.login.callback.handler.class": "has no effect: a Java class",
    "sasl.oauthbearer.token.endpoint.url": "with OAUTHBEARER: the file with the token, as file:///path",
    "ssl.endpoint.identification.algorithm": "https: the certificate must be for the broker's host; empty: any host",
}
COMMON_OPTIONS |= SECURITY_OPTIONS
OPTIONS: dict[str, str] = {**COMMON_OPTIONS, **READ_OPTIONS, **WRITE_OPTIONS}

#: The maximum of ``token.lifetime.ms``: a year, as for the brokers' setting.
MAX_LIFETIME_MS = 366 * 86_400_000
#: The options that select the topics of a read. Exactly one must be set.
SELECTIONS = ("subscribe", "subscribePattern", "assign")
BOOTSTRAP_OPTIONS = ("bootstrap.servers", "kafka.bootstrap.servers")

#: The options of Spark's Kafka source that are not supported, in lower case, with what to do instead.
_KAFKA_ONLY: dict[str, str] = {
    "kafka.group.id": "reads do not join a consumer group; groupId stores progress in a group",
    "groupidprefix": "reads do not join a consumer group; groupId stores progress in a group",
    "fetchoffset.numretries": "requests are retried until they succeed or time out",
    "fetchoffset.retryintervalms": "requests are retried until they succeed or time out",
    "kafkaconsumer.polltimeoutms": "requests are retried until they succeed or time out",
    "kafka.compression.type": "use the write option compression",
}

#: The options that Spark itself adds (table properties, the path of ``load(path)``, a stream's checkpoint).
_SPARKS_OWN = frozenset(
    {"provider", "owner", "path", "checkpointlocation", "location", "external", "comment", "is_managed_location"}
)
_CANONICAL = {name.lower(): name for name in OPTIONS}
_CANONICAL |= {f"kafka.{name}": f"kafka.{name}" for name in SECURITY_OPTIONS}
_DURATION = re.compile(r"\s*(\d+)\s*([a-z]*)\s*")
_UNIT_MS = {"us": 0.001, "ms": 1, "": 1, "s": 1e3, "m": 6e4, "min": 6e4, "h": 3.6e6, "d": 8.64e7}


def known_options(options: Mapping[str, str]) -> dict[str, str]:
    """Return the options by canonical name, without the options that Spark added.

    Raises ConfigError for an unknown name.
    """
    given = {}
    for name, text in options.items():
        lower = name.lower()
        if lower in _CANONICAL:
            given[_CANONICAL[lower]] = text
        elif lower not in _SPARKS_OWN and not lower.startswith("option."):
            raise ConfigError(_unknown(name))
    return given


def _unknown(name: str) -> str:
    import difflib  # Only an unknown option needs it.

    if hint := _KAFKA_ONLY.get(name.lower()):
        return f"option {name!r} of Spark's Kafka source is not supported: {hint}"
    near = difflib.get_close_matches(name.lower(), _CANONICAL, n=1, cutoff=0.5)
    if name.lower().startswith("kafka."):
        own = difflib.get_close_matches(name.lower().removeprefix("kafka."), _CANONICAL, n=1, cutoff=0.8)
        hint = f"did you mean {_CANONICAL[own[0]]!r}?" if own else "sparklog does not use a Kafka client"
        return f"option {name!r} of Spark's Kafka source is not supported; {hint}"
    hint = f"did you mean {_CANONICAL[near[0]]!r}?" if near else f"known options: {', '.join(sorted(OPTIONS))}"
    return f"unknown option {name!r}; {hint}"


def find_security(given: Mapping[str, str]) -> ClientSecurity | None:
    """Return the settings for TLS and login, or None if no option sets one.

    If the result is None, each process uses the file that the environment variable ``SPARKLOG_CLIENT_CONFIG`` names.

    A password may be a reference (``${file:/path}`` or ``${env:NAME}``) or the password itself, because tasks get a
    token instead of the password. The password of a key has to be a reference, because tasks need the key.

    Raises:
        ConfigError: a value is not valid, an option and its alias differ, or the password of a key is not a reference.
    """
    settings: dict[str, str] = {}
    for name in SECURITY_OPTIONS:
        own = given.get(name)
        alias = given.get(f"kafka.{name}")
        if own is not None and alias is not None and own != alias:
            raise ConfigError(f"options {name} and kafka.{name} contradict each other")
        if (text := own if own is not None else alias) is not None:
            settings[name] = text
    if not settings:
        return None
    from sparklog.net.client_security import ClientSecurity

    found = ClientSecurity.parse(settings)
    if found.key_password and not found.key_password.is_reference:
        raise ConfigError("ssl.key.password is not a reference, and tasks would need it: pass ${file:/path}")
    return found


def check_stored(security: ClientSecurity | None) -> None:
    """Check that the options for TLS and login can be stored in Spark's catalog, as options of a table.

    Raises:
        ConfigError: the password is given as text, which the catalog would store, and not as a reference, such as
            ``${env:NAME}``.
    """
    if security is not None and security.password and not security.password.is_reference:
        raise ConfigError(
            "a password in the options of a table is stored in Spark's catalog: pass ${file:/path} or ${env:NAME}"
        )


def without_security(options: Mapping[str, str]) -> dict[str, str]:
    """Return the options without those for TLS and login."""
    return {name: text for name, text in options.items() if name.lower().removeprefix("kafka.") not in SECURITY_OPTIONS}


def find_bootstrap(given: Mapping[str, str], defaults: Mapping[str, str]) -> str:
    """Return the bootstrap servers.

    The result is the first of these values that is set: the option, its alias with the prefix ``kafka.``, the
    configured default, an environment variable of the planning process.

    Raises:
        ConfigError: none is set, the option and its alias differ, or an address is not valid.
    """
    own = either(given, "bootstrap.servers")
    named = os.environ.get(_SHORT_VARIABLE) or os.environ.get(BOOTSTRAP_VARIABLE)
    text = own or defaults.get("bootstrap.servers") or named
    if not text:
        raise ConfigError(
            f"no brokers given: set option bootstrap.servers, call sparklog.configure(spark, bootstrap=...), "
            f"or set {_SHORT_VARIABLE} or {BOOTSTRAP_VARIABLE} before Spark's JVM starts"
        )
    parse_bootstrap(text)
    return text


def either(given: Mapping[str, str], name: str) -> str | None:
    """Return the value of an option that may be called ``<name>`` or, as in Spark's Kafka source, ``kafka.<name>``."""
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
    """Parse the option ``name``, which must be a positive integer. Return None if the option is not set."""
    if name not in given:
        return None
    text = given[name].strip()
    if not (text.isascii() and text.isdecimal()) or not 0 < int(text) <= at_most:
        raise ConfigError(f"option {name}={text!r}: expected a whole number from 1 to {at_most}")
    return int(text)


def parse_duration_ms(given: Mapping[str, str], name: str, *, default: str) -> int:
    """Parse the option ``name``, a duration in Spark's format, and return it in ms.

    The option's text is a number of ms, or a number with a unit, such as 500ms, 30s, 15m, 1h.
    """
    text = given.get(name, default)
    match = _DURATION.fullmatch(text.lower())
    if match is None or match[2] not in _UNIT_MS:
        raise ConfigError(f"option {name}={text!r}: expected a duration such as 500ms, 30s, 15m or 1h")
    return int(int(match[1]) * _UNIT_MS[match[2]])
