"""Options as Spark delivers them: lower case, with Spark's own among them."""

from __future__ import annotations

import pytest

from sparklog.errors import ConfigError
from sparklog.model import TopicPartition
from sparklog.spark.offsets import EARLIEST, LATEST
from sparklog.spark.options import (
    BOOTSTRAP_VARIABLE,
    Assign,
    ReadOptions,
    Subscribe,
    SubscribePattern,
    parse_read_options,
    parse_write_options,
)

BOOTSTRAP = {"bootstrap.servers": "one:9092"}


def read(**options: str) -> ReadOptions:
    return parse_read_options({name.lower(): text for name, text in options.items()}, BOOTSTRAP)


def test_defaults_of_a_read() -> None:
    assert read(subscribe="flights") == ReadOptions(
        bootstrap="one:9092",
        selection=Subscribe(("flights",)),
        starting=EARLIEST,
        ending=LATEST,
        include_headers=False,
        min_partitions=0,
    )


def test_selections() -> None:
    assert read(subscribe="b, a,b").selection == Subscribe(("b", "a"))
    assert read(subscribePattern="flights-.*").selection == SubscribePattern("flights-.*")
    assert read(assign='{"b":[1,0],"a":[2]}').selection == Assign(
        (TopicPartition("a", 2), TopicPartition("b", 0), TopicPartition("b", 1))
    )


def test_offsets_per_partition() -> None:
    options = read(subscribe="a", startingOffsets='{"a":{"0":23,"1":-2}}', endingOffsets='{"a":{"0":42,"1":-1}}')
    assert options.starting == {TopicPartition("a", 0): 23, TopicPartition("a", 1): EARLIEST}
    assert options.ending == {TopicPartition("a", 0): 42, TopicPartition("a", 1): LATEST}


def test_sparks_own_options_are_let_through() -> None:
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


def test_an_unknown_option_like_no_other_lists_all() -> None:
    with pytest.raises(ConfigError, match=r"unknown option 'zzz'; known options: assign, .*subscribePattern"):
        parse_read_options({"subscribe": "a", "zzz": "x"}, BOOTSTRAP)


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({}, "found none of them"),
        ({"topic": "a"}, "option topic is for writing"),
        ({"subscribe": "a", "assign": '{"a":[0]}'}, "found subscribe and assign"),
        ({"subscribe": " , "}, "names no topic"),
        ({"subscribe": "a b"}, "topic name 'a b'"),
        ({"subscribepattern": "("}, "not a regular expression"),
        ({"assign": "a"}, r'expected \{"topic": \[0, 1\]\}'),
        ({"assign": '{"a":["0"]}'}, "Expected `int`"),
        ({"assign": '{"a":[]}'}, "names no partition"),
        ({"subscribe": "a", "startingoffsets": "latest"}, "not for a batch read"),
        ({"subscribe": "a", "startingoffsets": '{"a":{"0":-1}}'}, "not for a batch read"),
        ({"subscribe": "a", "endingoffsets": "earliest"}, "not for a batch read"),
        ({"subscribe": "a", "endingoffsets": '{"a":{"0":-3}}'}, "below -2"),
        ({"subscribe": "a", "endingoffsets": '{"a":{"x":3}}'}, "partition 'x' of topic 'a' is not a number"),
        ({"subscribe": "a", "endingoffsets": "{}"}, "names no partition"),
        ({"subscribe": "a", "endingoffsets": "5"}, "expected earliest, latest or"),
        ({"subscribe": "a", "includeheaders": "yes"}, "expected true or false"),
        ({"subscribe": "a", "minpartitions": "0"}, "whole number from 1"),
        ({"subscribe": "a", "bootstrap.servers": "host:x"}, "'host:x' is no host:port"),
        ({"subscribe": "a", "bootstrap.servers": "host:70000"}, "is no host:port"),
        ({"subscribe": "a", "bootstrap.servers": "a:1", "kafka.bootstrap.servers": "b:1"}, "contradict each other"),
    ],
)
def test_bad_read_options(options: dict[str, str], complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        parse_read_options(options, BOOTSTRAP)


def test_where_the_brokers_come_from(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(BOOTSTRAP_VARIABLE, "environment:1")
    subscribe = {"subscribe": "a"}
    assert (
        parse_read_options({**subscribe, "bootstrap.servers": "option:1, b:2"}, BOOTSTRAP).bootstrap == "option:1, b:2"
    )
    assert parse_read_options({**subscribe, "kafka.bootstrap.servers": "alias:1"}, BOOTSTRAP).bootstrap == "alias:1"
    assert parse_read_options(subscribe, BOOTSTRAP).bootstrap == "one:9092"
    assert parse_read_options(subscribe, {}).bootstrap == "environment:1"
    monkeypatch.delenv(BOOTSTRAP_VARIABLE)
    with pytest.raises(ConfigError, match=r"no brokers to ask: .*sparklog\.configure.*SPARKLOG_BOOTSTRAP_SERVERS"):
        parse_read_options(subscribe, {})


def test_write_options() -> None:
    assert parse_write_options({}, BOOTSTRAP).topic is None
    options = parse_write_options({"topic": "a", "compression": "ZSTD"}, BOOTSTRAP)
    assert (options.topic, options.compression) == ("a", "zstd")
    with pytest.raises(ConfigError, match="compression='gzip': expected none, lz4, zstd"):
        parse_write_options({"compression": "gzip"}, BOOTSTRAP)
    with pytest.raises(ConfigError, match="topic name"):
        parse_write_options({"topic": ".."}, BOOTSTRAP)
