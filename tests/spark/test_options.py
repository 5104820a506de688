"""Tests of options as Spark delivers them: in lower case, together with Spark's own."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest

from sparklog.errors import ConfigError
from sparklog.model import Span, TopicPartition
from sparklog.spark.limits import TriggerLimits
from sparklog.spark.offsets import EARLIEST, LATEST, ByOffset, ByTime
from sparklog.spark.options import BOOTSTRAP_VARIABLE, check_stored, without_security
from sparklog.spark.read_filter import Bounds
from sparklog.spark.read_options import (
    Assign,
    ReadOptions,
    Subscribe,
    SubscribePattern,
    parse_read_options,
    parse_schema_options,
)
from sparklog.spark.write_options import parse_write_options

BOOTSTRAP = {"bootstrap.servers": "one:9092"}
A0, A1 = TopicPartition("a", 0), TopicPartition("a", 1)


def given(options: dict[str, str]) -> dict[str, str]:
    return {"subscribe": "a", **{name.lower().replace("__", "."): text for name, text in options.items()}}


def read(**options: str) -> ReadOptions:
    return parse_read_options(given(options), BOOTSTRAP)


def stream(**options: str) -> ReadOptions:
    return parse_read_options(given(options), BOOTSTRAP, streaming=True)


def test_a_read_has_defaults() -> None:
    expected = ReadOptions(
        bootstrap="one:9092",
        selection=Subscribe(("a",)),
        starting=ByOffset("startingOffsets", EARLIEST),
        ending=ByOffset("endingOffsets", LATEST),
        include_headers=False,
        fail_on_data_loss=True,
        isolation=1,
        min_partitions=0,
        max_records_per_partition=None,
        where=Bounds(),
        limits=TriggerLimits(None, None, 900_000),
        group_id=None,
    )
    assert read() == expected
    assert stream().starting == ByOffset("startingOffsets", LATEST)


def test_timestamps_take_precedence_over_offsets() -> None:
    by_partition = '{"a":{"0":5,"1":6}}'
    offsets = '{"a":{"0":23,"1":-2}}'
    every = {"startingTimestamp": "7", "startingOffsetsByTimestamp": by_partition, "startingOffsets": offsets}
    assert read(**every).starting == ByTime("startingTimestamp", 7000, or_latest=False)
    del every["startingTimestamp"]
    assert read(**every).starting == ByTime("startingOffsetsByTimestamp", {A0: 5000, A1: 6000}, or_latest=False)
    every = {"endingTimestamp": "7", "endingOffsetsByTimestamp": by_partition, "endingOffsets": '{"a":{"0":1,"1":-1}}'}
    assert read(**every).ending == ByTime("endingTimestamp", 7000, or_latest=True)
    del every["endingTimestamp"]
    assert read(**every).ending == ByTime("endingOffsetsByTimestamp", {A0: 5000, A1: 6000}, or_latest=True)
    late = read(startingTimestamp="7", startingOffsetsByTimestampStrategy="Latest").starting
    assert late == ByTime("startingTimestamp", 7000, or_latest=True)


def test_a_stream_reads_its_limits_and_its_group() -> None:
    found = stream(
        startingOffsets="latest",
        maxOffsetsPerTrigger="100",
        minOffsetsPerTrigger="10",
        maxTriggerDelay="30s",
        groupId=" lag ",
    )
    assert found.limits == TriggerLimits(100, 10, 30_000)
    assert found.group_id == "lag"
    # A batch read ignores an option that only a stream uses, as the Kafka source does.
    assert read(maxOffsetsPerTrigger="100").limits == TriggerLimits()


@pytest.mark.parametrize("name", ["endingOffsets", "endingTimestamp", "endingOffsetsByTimestamp", "where"])
def test_a_stream_has_no_end(name: str) -> None:
    with pytest.raises(ConfigError, match=f"option {name} is for batch reads"):
        stream(**{name: "latest"})


def test_option_names_of_the_kafka_source_are_accepted() -> None:
    assert read(kafka__isolation__level="read_uncommitted").isolation == 0
    assert read(isolation__level="READ_COMMITTED").isolation == 1
    assert read().local_reads == "auto"
    assert read(localReads="Require").local_reads == "require"
    assert read(failOnDataLoss="FALSE", maxRecordsPerPartition="5").max_records_per_partition == 5


def test_a_schema_is_requested_before_the_read_kind_is_known() -> None:
    options = {"subscribe": "a", "startingoffsets": "latest", "maxoffsetspertrigger": "5", "includeheaders": "true"}
    found = parse_schema_options(options, BOOTSTRAP)
    assert (found.selection, found.include_headers) == (Subscribe(("a",)), True)


def test_the_where_option_is_parsed() -> None:
    assert read(where="offset >= 5").where == Bounds(offset=Span(5))


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("kafka.group.id", "is not supported: .*groupId"),
        ("groupIdPrefix", "is not supported: .*groupId"),
        ("kafka.include.headers", "is not supported"),
        ("kafkaConsumer.pollTimeoutMs", "is not supported: requests are retried"),
    ],
)
def test_kafka_options_without_meaning_are_refused(name: str, hint: str) -> None:
    with pytest.raises(ConfigError, match=hint):
        parse_read_options({"subscribe": "a", name: "x"}, BOOTSTRAP)


def test_topics_are_selected_in_three_ways() -> None:
    def selection(**options: str) -> object:
        return parse_read_options({name.lower(): text for name, text in options.items()}, BOOTSTRAP).selection

    assert selection(subscribe="b, a,b") == Subscribe(("b", "a"))
    assert selection(subscribePattern="flights-.*") == SubscribePattern("flights-.*")
    assert selection(assign='{"b":[1,0],"a":[2]}') == Assign(
        (TopicPartition("a", 2), TopicPartition("b", 0), TopicPartition("b", 1))
    )


def test_offsets_are_parsed_by_partition() -> None:
    options = read(startingOffsets='{"a":{"0":23,"1":-2}}', endingOffsets='{"a":{"0":42,"1":-1}}')
    assert options.starting == ByOffset("startingOffsets", {A0: 23, A1: EARLIEST})
    assert options.ending == ByOffset("endingOffsets", {A0: 42, A1: LATEST})


def test_sparks_own_options_are_ignored() -> None:
    options = {"subscribe": "a", "provider": "sparklog", "owner": "me", "path": "x", "option.subscribe": "a"}
    assert parse_read_options({**options, "checkpointlocation": "c"}, BOOTSTRAP).selection == Subscribe(("a",))


@pytest.mark.parametrize(
    ("name", "suggestion"),
    [
        ("startingoffset", "startingOffsets"),
        ("subscrbe", "subscribe"),
        ("bootstrap.server", "bootstrap.servers"),
        ("includeheader", "includeHeaders"),
        ("topics", "topic"),
    ],
)
def test_an_unknown_option_is_refused_with_the_nearest_name(name: str, suggestion: str) -> None:
    with pytest.raises(ConfigError, match=f"unknown option '{name}'; did you mean '{suggestion}'"):
        parse_read_options({"subscribe": "a", name: "x"}, BOOTSTRAP)


def test_an_unknown_option_lists_all_known_ones() -> None:
    with pytest.raises(ConfigError, match=r"unknown option 'zzz'; known options: .*assign, .*subscribePattern"):
        parse_read_options({"subscribe": "a", "zzz": "x"}, BOOTSTRAP)


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({}, "found none"),
        ({"topic": "a"}, "option topic is for writes"),
        ({"subscribe": "a", "assign": '{"a":[0]}'}, "found subscribe and assign"),
        ({"subscribe": " , "}, "has no topics"),
        ({"subscribe": "a b"}, "topic name 'a b'"),
        ({"subscribepattern": "("}, "not a regular expression"),
        ({"assign": "a"}, r'expected \{"topic": \[0, 1\]\}'),
        ({"assign": '{"a":["0"]}'}, "Expected `int`"),
        ({"assign": '{"a":[]}'}, "has no partitions"),
        ({"subscribe": "a", "startingoffsets": "latest"}, "not supported for a batch read"),
        ({"subscribe": "a", "startingoffsets": '{"a":{"0":-1}}'}, "not supported for a batch read"),
        ({"subscribe": "a", "endingoffsets": "earliest"}, "not supported for a batch read"),
        ({"subscribe": "a", "endingoffsets": '{"a":{"0":-3}}'}, "less than -2"),
        ({"subscribe": "a", "endingoffsets": '{"a":{"x":3}}'}, "partition 'x' of topic 'a' is not a number"),
        ({"subscribe": "a", "endingoffsets": "{}"}, "has no partitions"),
        ({"subscribe": "a", "endingoffsets": "5"}, "expected earliest, latest or"),
        ({"subscribe": "a", "includeheaders": "yes"}, "expected true or false"),
        ({"subscribe": "a", "minpartitions": "0"}, "whole number from 1"),
        ({"subscribe": "a", "maxrecordsperpartition": "-1"}, "whole number from 1"),
        ({"subscribe": "a", "startingtimestamp": "yesterday"}, "expected milliseconds since 1970"),
        ({"subscribe": "a", "startingtimestamp": "9999999999999999999"}, "expected milliseconds since 1970"),
        ({"subscribe": "a", "startingoffsetsbytimestamp": '{"a":{"0":-1}}'}, "expected milliseconds since 1970"),
        ({"subscribe": "a", "startingoffsetsbytimestamp": "5"}, r'expected \{"topic": \{"0": 1700000000000'),
        ({"subscribe": "a", "startingoffsetsbytimestampstrategy": "skip"}, "expected error or latest"),
        ({"subscribe": "a", "localReads": "always"}, "expected auto, never, require"),
        ({"subscribe": "a", "isolation.level": "serializable"}, "expected read_committed or read_uncommitted"),
        ({"subscribe": "a", "isolation.level": "read_committed", "kafka.isolation.level": "x"}, "contradict"),
        ({"subscribe": "a", "where": "x > 1"}, "conditions on partition, offset and timestamp"),
        ({"subscribe": "a", "bootstrap.servers": "host:x"}, "'host:x' found; expected host:port"),
        ({"subscribe": "a", "bootstrap.servers": "host:70000"}, "expected host:port"),
        ({"subscribe": "a", "bootstrap.servers": "a:1", "kafka.bootstrap.servers": "b:1"}, "contradict each other"),
    ],
)
def test_bad_read_options_are_refused(options: dict[str, str], complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        parse_read_options(options, BOOTSTRAP)


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"maxoffsetspertrigger": "0"}, "whole number from 1"),
        ({"maxtriggerdelay": "soon"}, "expected a duration"),
        ({"maxtriggerdelay": "5 weeks"}, "expected a duration"),
        ({"maxoffsetspertrigger": "5", "minoffsetspertrigger": "6"}, "6 is greater than maxOffsetsPerTrigger 5"),
        ({"groupid": " "}, "expected 1 to 249 bytes"),
    ],
)
def test_bad_stream_options_are_refused(options: dict[str, str], complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        parse_read_options({"subscribe": "a", **options}, BOOTSTRAP, streaming=True)


def test_the_bootstrap_address_has_an_order_of_sources(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(BOOTSTRAP_VARIABLE, "environment:1")
    subscribe = {"subscribe": "a"}
    assert (
        parse_read_options({**subscribe, "bootstrap.servers": "option:1, b:2"}, BOOTSTRAP).bootstrap == "option:1, b:2"
    )
    assert parse_read_options({**subscribe, "kafka.bootstrap.servers": "alias:1"}, BOOTSTRAP).bootstrap == "alias:1"
    assert parse_read_options(subscribe, BOOTSTRAP).bootstrap == "one:9092"
    assert parse_read_options(subscribe, {}).bootstrap == "environment:1"
    monkeypatch.setenv("SPARKLOG_BOOTSTRAP", "short:1")
    assert parse_read_options(subscribe, {}).bootstrap == "short:1"
    monkeypatch.delenv("SPARKLOG_BOOTSTRAP")
    monkeypatch.delenv(BOOTSTRAP_VARIABLE)
    with pytest.raises(ConfigError, match=r"no brokers given: .*sparklog\.configure.*SPARKLOG_BOOTSTRAP_SERVERS"):
        parse_read_options(subscribe, {})


# --- TLS and the login ------------------------------------------------------------------------------------------------

JAAS = 'org.apache.kafka.common.security.scram.ScramLoginModule required username="anna" password="%s";'


def secured(**more: str) -> dict[str, str]:
    options = {"subscribe": "a", "kafka.security.protocol": "SASL_SSL", "kafka.sasl.mechanism": "SCRAM-SHA-256"}
    return {**options, "kafka.ssl.truststore.location": "/ca.pem", **more}


def test_options_of_the_kafka_source_set_tls_and_the_login(tmp_path: Path) -> None:
    (tmp_path / "password").write_text("a-secret\n")
    reference = f"${{file:{tmp_path / 'password'}}}"
    by_jaas = parse_read_options(secured(**{"kafka.sasl.jaas.config": JAAS % reference}), BOOTSTRAP).security
    own = {"security.protocol": "SASL_SSL", "sasl.mechanism": "SCRAM-SHA-256", "ssl.ca.location": "/ca.pem"}
    own |= {"sasl.username": "anna", "sasl.password": reference}
    by_name = parse_write_options({"topic": "a", **own}, BOOTSTRAP).security
    assert by_jaas == by_name
    assert by_jaas is not None and by_jaas.password.reveal() == "a-secret"
    sent = pickle.loads(pickle.dumps(by_jaas))
    assert sent.password.reveal() == "a-secret" and b"a-secret" not in pickle.dumps(by_jaas)


@pytest.mark.parametrize(
    "more",
    [{"kafka.sasl.jaas.config": JAAS % "a-secret"}, {"sasl.username": "anna", "sasl.password": "a-secret"}],
    ids=["jaas", "password"],
)
def test_a_password_in_an_option_is_neither_pickled_nor_stored(more: dict[str, str]) -> None:
    found = parse_read_options(secured(**more), BOOTSTRAP)
    assert found.security is not None and found.security.password.reveal() == "a-secret"
    assert "a-secret" not in repr(found)
    with pytest.raises(TypeError, match="a password is not pickled"):
        pickle.dumps(found)
    with pytest.raises(ConfigError, match="stored in Spark's catalog") as caught:
        check_stored(found.security)
    assert "a-secret" not in str(caught.value)
    assert without_security({"subscribe": "a", **secured(**more)}) == {"subscribe": "a"}


def test_options_of_java_keystores_do_not_stop_a_job() -> None:
    more = {"kafka.ssl.truststore.password": "changeit", "kafka.sasl.login.callback.handler.class": "org.example.Login"}
    more |= {"sasl.username": "anna", "sasl.password": "${env:ANNA}"}
    assert parse_read_options(secured(**more), BOOTSTRAP).security is not None
    with pytest.raises(ConfigError, match="not a reference"):
        parse_read_options(secured(**more, **{"ssl.key.location": "/key.pem", "ssl.key.password": "b"}), BOOTSTRAP)


def test_an_option_and_its_alias_must_not_differ() -> None:
    with pytest.raises(ConfigError, match="contradict each other"):
        parse_read_options(secured(**{"security.protocol": "SSL"}), BOOTSTRAP)


def test_without_options_the_environment_decides() -> None:
    assert parse_read_options({"subscribe": "a"}, BOOTSTRAP).security is None
