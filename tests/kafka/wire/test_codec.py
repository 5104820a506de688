"""Tests of frames, headers and the bounds of decoding."""

from __future__ import annotations

import struct

import pytest

from sparklog.kafka.wire import (
    API_VERSIONS,
    PARSED_VERSIONS,
    ApiKey,
    MalformedMessage,
    RequestHeader,
    decode_header,
    decode_request,
    decode_response,
    decode_response_header,
    encode_request,
    encode_response,
    is_supported,
    request_frame,
    response_frame,
)
from sparklog.kafka.wire.codec import MAX_ELEMENTS
from sparklog.kafka.wire.data import (
    FetchableTopicResponse,
    FetchResponse,
    PartitionData,
    PartitionProduceData,
    ProduceRequest,
    TopicProduceData,
)
from sparklog.kafka.wire.metadata import (
    ApiVersion,
    ApiVersionsRequest,
    ApiVersionsResponse,
    MetadataRequest,
    MetadataRequestTopic,
)
from sparklog.kafka.wire.primitives import uvarint_bytes


def test_a_request_frame_has_length_header_and_message() -> None:
    header = RequestHeader(ApiKey.API_VERSIONS, 3, 7, "kcat")
    frame = b"".join(request_frame(header, ApiVersionsRequest(client_software_name="a", client_software_version="b")))
    assert frame == bytes.fromhex("00000014 0012 0003 00000007 0004") + b"kcat" + bytes.fromhex("00 0261 0262 00")
    found, message = decode_header(memoryview(frame)[4:])
    assert found == header
    decoded = decode_request(found.api_key, found.api_version, message)
    assert decoded == ApiVersionsRequest(client_software_name="a", client_software_version="b")


def test_a_header_may_have_no_client_id() -> None:
    header = RequestHeader(ApiKey.METADATA, 1, -2, None)
    frame = b"".join(request_frame(header, MetadataRequest(topics=None)))
    found, message = decode_header(memoryview(frame)[4:])
    assert found == header
    assert decode_request(3, 1, message) == MetadataRequest(topics=None)


def test_the_response_header_of_api_versions_never_has_tags() -> None:
    for version in range(5):
        frame = b"".join(response_frame(RequestHeader(18, version, 9), ApiVersionsResponse()))
        correlation_id, message = decode_response_header(18, version, memoryview(frame)[4:])
        assert (correlation_id, len(message)) == (9, len(frame) - 8)


def test_an_unknown_version_of_api_versions_is_answered_in_version_0() -> None:
    frame = memoryview(bytes.fromhex("0012 0063 00000005 ffff 00 0102030405"))
    header, _ = decode_header(frame)
    assert not is_supported(header.api_key, header.api_version)
    response = ApiVersionsResponse(error_code=35, api_keys=[ApiVersion(api_key=18, min_version=0, max_version=4)])
    answer = b"".join(response_frame(header, response))
    assert answer == bytes.fromhex("00000010 00000005 0023 00000001 0012 0000 0004")


def test_records_of_a_request_are_a_view_of_the_frame() -> None:
    batch = bytes(1000)
    topics = [TopicProduceData(name="t", partition_data=[PartitionProduceData(index=1, records=batch)])]
    parts = encode_request(ApiKey.PRODUCE, 9, ProduceRequest(acks=-1, topic_data=topics))
    assert any(isinstance(part, memoryview) and part.obj is batch for part in parts)
    frame = bytearray(b"".join(parts))
    decoded = decode_request(ApiKey.PRODUCE, 9, memoryview(frame))
    (partition,) = decoded.topic_data[0].partition_data
    assert isinstance(partition.records, memoryview)
    assert partition.records.obj is frame
    assert bytes(partition.records) == batch


@pytest.mark.parametrize("version", [4, 12])
def test_records_of_a_response_may_be_several_buffers(version: int) -> None:
    pieces: list[bytes | bytearray | memoryview] = [b"a" * 600, bytearray(b"b" * 10), memoryview(b"c" * 700)]
    response = FetchResponse(
        responses=[
            FetchableTopicResponse(
                topic="t",
                partitions=[
                    PartitionData(records=pieces),
                    PartitionData(records=[b"small", b"er"]),
                    PartitionData(records=None),
                    PartitionData(records=[]),
                ],
            )
        ]
    )
    frame = b"".join(encode_response(ApiKey.FETCH, version, response))
    decoded = decode_response(ApiKey.FETCH, version, memoryview(frame))
    found = [part.records and bytes(part.records) for part in decoded.responses[0].partitions]
    assert found[:3] == [b"".join(pieces), b"smaller", None]
    assert found[3] is not None
    assert len(found[3]) == 0


def test_produce_is_advertised_from_0_and_read_from_3() -> None:
    assert API_VERSIONS[ApiKey.PRODUCE] == (0, 13)
    assert PARSED_VERSIONS[ApiKey.PRODUCE] == (3, 13)
    with pytest.raises(MalformedMessage, match="version 2 of API 0 is unknown"):
        decode_request(ApiKey.PRODUCE, 2, memoryview(bytes(100)))


@pytest.mark.parametrize("api_key", [4, 9999, -1])
def test_unknown_apis_are_malformed(api_key: int) -> None:
    assert not is_supported(api_key, 0)
    with pytest.raises(MalformedMessage):
        decode_request(api_key, 0, memoryview(b""))


@pytest.mark.parametrize(
    "body",
    [
        "7fffffff",  # more topics than bytes
        "00000002 0001 61",  # the second topic is missing
        "00000001 0005 61",  # the name is longer than the frame
        "00000001 ffff",  # the name is null in a version without null names
        "00000001 0001 ff",  # not UTF-8
        "",
    ],
)
def test_a_message_that_ends_early_or_is_no_text_is_malformed(body: str) -> None:
    with pytest.raises(MalformedMessage):
        decode_request(ApiKey.METADATA, 4, memoryview(bytes.fromhex(body)))


@pytest.mark.parametrize(
    "body",
    [
        "ffffffff0f",  # a compact array of 4294967294 elements
        "ffffffffff",  # a number of more than five bytes
        "00 01 00 00 01 07 09",  # a tagged field that is longer than the frame
        "00 01 00 00 ff7f",  # more tagged fields than bytes
    ],
)
def test_compact_lengths_and_tags_are_bounded(body: str) -> None:
    with pytest.raises(MalformedMessage):
        decode_request(ApiKey.METADATA, 9, memoryview(bytes.fromhex(body)))


def test_the_elements_of_a_request_are_limited_together() -> None:
    most = MAX_ELEMENTS // 2
    topic = "0001 61" + f"{most:08x}" + "00000000" * most
    body = bytes.fromhex("00000002" + topic + topic)
    with pytest.raises(MalformedMessage, match="more than 120000 elements in one request"):
        decode_request(ApiKey.ELECT_LEADERS, 0, memoryview(body))
    smaller = bytes.fromhex("00000001" + topic + "00000001")
    decoded = decode_request(ApiKey.ELECT_LEADERS, 0, memoryview(smaller))
    assert decoded.topic_partitions[0].partitions == [0] * most


def test_the_tagged_fields_of_a_request_are_limited_together() -> None:
    def message(tags: int) -> memoryview:
        no_topics = b"\x01\0\0"
        return memoryview(no_topics + uvarint_bytes(tags) + b"\x09\0" * tags)

    assert decode_request(ApiKey.METADATA, 12, message(MAX_ELEMENTS // 4)).topics == []
    with pytest.raises(MalformedMessage, match="more than 120000 elements in one request"):
        decode_request(ApiKey.METADATA, 12, message(MAX_ELEMENTS // 4 + 1))


def test_the_tagged_fields_of_a_header_are_limited() -> None:
    def frame(tags: int) -> memoryview:
        header = struct.pack(">hhih", ApiKey.METADATA, 12, 7, -1)
        return memoryview(header + uvarint_bytes(tags) + b"\x09\0" * tags + b"message")

    header, message = decode_header(frame(1000))
    assert (header.correlation_id, bytes(message)) == (7, b"message")
    with pytest.raises(MalformedMessage, match="1001 tagged fields"):
        decode_header(frame(1001))


def test_unknown_tagged_fields_are_ignored() -> None:
    plain = b"".join(encode_request(3, 12, MetadataRequest(topics=[MetadataRequestTopic(name="t")])))
    assert plain[-1] == 0
    extended = plain[:-1] + bytes.fromhex("02 07 03 010203 8101 00")
    assert decode_request(3, 12, memoryview(extended)) == decode_request(3, 12, memoryview(plain))


@pytest.mark.parametrize(
    "frame", ["", "0003", "0003 0001 00000001", "0003 0001 00000001 0003 61", "0012 0003 00000001 0000"]
)
def test_a_frame_without_a_whole_header_is_malformed(frame: str) -> None:
    with pytest.raises(MalformedMessage):
        decode_header(memoryview(bytes.fromhex(frame)))
