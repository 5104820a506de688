"""Tests of write options, and of combinations that contradict each other."""

from __future__ import annotations

import pytest

from sparklog.errors import ConfigError
from sparklog.spark.write_options import NamedWrite, NewTopic, WriteOptions, parse_write_options

BOOTSTRAP = {"bootstrap.servers": "one:9092"}


def parse(*, streaming: bool = False, **options: str) -> WriteOptions:
    given = {name.lower().replace("__", "."): text for name, text in options.items()}
    return parse_write_options(given, BOOTSTRAP, streaming=streaming)


def test_a_write_has_defaults() -> None:
    assert parse() == WriteOptions("one:9092", None, None)
    assert parse(topic="a", compression="ZSTD", failOnDataLoss="false") == WriteOptions("one:9092", "a", "zstd")


def test_supported_write_options_are_parsed() -> None:
    assert parse(txnAppId="nightly", txnVersion="7").named == NamedWrite("nightly", 7)
    assert parse(exactlyOnce="false", kafka__acks="-1").acks == "all"
    assert parse(exactlyOnce="false", acks="0").acks == "0"
    assert parse(acks="all").exactly_once
    assert parse(transactionTimeout="10m").timeout_s == 600
    assert parse().timeout_s == 900, "the timeout must be longer than a stage's pause between two tasks"
    made = parse(createTopic="true", partitions="6", replicationFactor="3", keyColumns="carrier, flight")
    assert (made.new_topic, made.key_columns) == (NewTopic(6, 3), ("carrier", "flight"))
    assert parse(createTopic="true").new_topic == NewTopic(None, None)
    assert parse(mergeSchema="true").merge_schema


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"compression": "gzip"}, "compression='gzip': expected none, lz4, zstd"),
        ({"topic": ".."}, "topic name"),
        ({"acks": "1"}, "exactly-once writes require all; set exactlyOnce=false"),
        ({"acks": "2"}, "expected all, 1 or 0"),
        ({"acks": "all", "kafka__acks": "1"}, "contradict each other"),
        ({"txnAppId": "a"}, "found one"),
        ({"txnVersion": "1"}, "found one"),
        ({"txnAppId": "a", "txnVersion": "-1"}, "whole number from 0"),
        ({"txnAppId": "", "txnVersion": "1"}, "1 to 200 bytes"),
        ({"txnAppId": "a", "txnVersion": "1", "exactlyOnce": "false"}, "contradict each other"),
        ({"partitions": "3"}, "require createTopic=true"),
        ({"createTopic": "true", "partitions": "0"}, "whole number from 1"),
        ({"keyColumns": "a,a"}, "expected columns"),
        ({"transactionTimeout": "25h"}, "expected 1s to 24h"),
        ({"failOnDataLoss": "no"}, "expected true or false"),
        ({"txnAppid": "a", "txnVerson": "1"}, "did you mean 'txnVersion'"),
        ({"mergeSchemas": "true"}, "did you mean 'mergeSchema'"),
    ],
)
def test_bad_write_options_are_refused(options: dict[str, str], complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        parse(streaming=False, **options)


def test_a_stream_is_identified_by_its_query() -> None:
    with pytest.raises(ConfigError, match="are for batch writes"):
        parse(streaming=True, txnAppId="a", txnVersion="1")
