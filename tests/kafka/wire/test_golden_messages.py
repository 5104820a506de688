"""Tests against the bytes that kafka-clients 4.1.1 wrote: every message in every version, with and without nulls.

``tests/golden/kafka/WriteMessages.java`` is the program that wrote them, with the values of all fields.
"""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from sparklog.kafka.wire import (
    PARSED_VERSIONS,
    ApiKey,
    RequestHeader,
    decode_header,
    decode_request,
    decode_response,
    decode_response_header,
    request_frame,
    response_frame,
)

GOLDEN = Path(__file__).parents[2] / "golden" / "kafka" / "messages.jsonl.gz"
MESSAGES: list[dict[str, Any]] = [json.loads(line) for line in gzip.decompress(GOLDEN.read_bytes()).splitlines()]


def messages_of(kind: str, api_key: ApiKey) -> list[dict[str, Any]]:
    return [message for message in MESSAGES if message["kind"] == kind and message["key"] == api_key]


def as_json(value: Any, expected: Any) -> Any:
    """Return a decoded value as the golden file has it: only the fields of the version, and bytes as text."""
    match value:
        case bytes() | memoryview():
            return bytes(value).hex()
        case list():
            return [as_json(each, wanted) for each, wanted in zip(value, expected, strict=True)]
        case None | bool() | int() | float() | str():
            return value
        case _:
            return {name: as_json(getattr(value, name), wanted) for name, wanted in expected.items()}


def test_the_golden_file_has_all_messages_in_all_versions() -> None:
    expected = {
        (key, version, kind, variant)
        for key, (first, last) in PARSED_VERSIONS.items()
        for version in range(first, last + 1)
        for kind in ("request", "response")
        for variant in ("full", "null")
    }
    assert {(each["key"], each["version"], each["kind"], each["variant"]) for each in MESSAGES} == expected


@pytest.mark.parametrize("api_key", PARSED_VERSIONS, ids=lambda key: key.name)
def test_requests_are_read_and_written_as_kafka_does(api_key: ApiKey) -> None:
    for golden in messages_of("request", api_key):
        where = f"version {golden['version']}, {golden['variant']}"
        header, message = decode_header(memoryview(bytes.fromhex(golden["bytes"])))
        client_id = "client" if golden["variant"] == "full" else None
        assert header == RequestHeader(api_key, golden["version"], golden["version"] * 1000, client_id), where
        request = decode_request(api_key, header.api_version, message)
        assert as_json(request, golden["values"]) == golden["values"], where
        assert b"".join(request_frame(header, request))[4:].hex() == golden["bytes"], where


@pytest.mark.parametrize("api_key", PARSED_VERSIONS, ids=lambda key: key.name)
def test_responses_are_read_and_written_as_kafka_does(api_key: ApiKey) -> None:
    for golden in messages_of("response", api_key):
        where = f"version {golden['version']}, {golden['variant']}"
        version = golden["version"]
        correlation_id, message = decode_response_header(api_key, version, memoryview(bytes.fromhex(golden["bytes"])))
        assert correlation_id == version * 1000, where
        response = decode_response(api_key, version, message)
        assert as_json(response, golden["values"]) == golden["values"], where
        frame = b"".join(response_frame(RequestHeader(api_key, version, correlation_id), response))
        assert frame[:4] == (len(frame) - 4).to_bytes(4, "big"), where
        assert frame[4:].hex() == golden["bytes"], where
