"""Tests that a Kafka client on a port of sparklog's own protocol is recognised by its first bytes."""

from __future__ import annotations

import pytest

from sparklog.protocol.connection import ImmediateAnswer, ServerEnd, hello
from sparklog.protocol.frames import encode_frame
from sparklog.protocol.kafka_clients import is_kafka_request
from sparklog.protocol.messages import ErrorReply, HelloReply, encode_message

#: The first bytes of ApiVersions 3 and of Metadata 1, as librdkafka and kafka-python send them.
API_VERSIONS = bytes.fromhex("00000024001200030000000100077264 6b61666b6100".replace(" ", ""))
METADATA = bytes.fromhex("0000001a000300010000000100")


def end() -> ServerEnd:
    return ServerEnd(lambda cid, version: HelloReply(cid, version, 1, 1, "c", 2**20), 2**20)


@pytest.mark.parametrize("first", [API_VERSIONS, METADATA])
def test_a_kafka_client_is_refused_at_once(first: bytes) -> None:
    server = end()
    server.kafka_addresses = "127.0.0.1:29092"
    server.get_buffer()[: len(first)] = first
    assert server.decode_single(len(first)) is None
    (answer,) = server.buffer_updated(len(first))
    assert isinstance(answer, ImmediateAnswer) and answer.close and isinstance(answer.reply, ErrorReply)
    assert "127.0.0.1:29092" in answer.reply.detail
    assert server.encode_answer(answer.reply) == [], "a Kafka client cannot read a reply"


def test_without_a_kafka_listener_the_setting_is_named() -> None:
    server = end()
    server.get_buffer()[: len(METADATA)] = METADATA
    (answer,) = server.buffer_updated(len(METADATA))
    assert isinstance(answer, ImmediateAnswer) and isinstance(answer.reply, ErrorReply)
    assert "kafka.listeners" in answer.reply.detail


def test_other_bytes_get_an_error_reply() -> None:
    server = end()
    server.get_buffer()[:8] = b"GET / HT"
    (answer,) = server.buffer_updated(8)
    assert isinstance(answer, ImmediateAnswer) and server.encode_answer(answer.reply) != []


def test_no_hello_is_a_kafka_request() -> None:
    for client_id in ("", "a", "x" * 3000):
        (first,) = encode_frame(encode_message(hello(client_id)))
        assert not is_kafka_request(first)
    assert not is_kafka_request(b"")
