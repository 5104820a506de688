"""Every truncation and every changed byte of every message: what is no message raises one kind of error.

The tests take half a minute. ``test_random_messages`` makes random changes in a second.
"""

from __future__ import annotations

import contextlib

import pytest

from sparklog.kafka.wire import (
    PARSED_VERSIONS,
    ApiKey,
    MalformedMessage,
    decode_header,
    decode_request,
    decode_response,
    decode_response_header,
)
from tests.kafka.wire.test_golden_messages import messages_of

pytestmark = [pytest.mark.long, pytest.mark.timeout(3600)]

#: What replaces a byte: no elements, the longest short length, and numbers that are negative or go on.
REPLACEMENTS = (0x00, 0x01, 0x7F, 0x80, 0xFF)


def damaged(frame: bytes) -> list[bytes]:
    """Return the frame cut at every length, and with every byte replaced."""
    cut = [frame[:length] for length in range(len(frame))]
    changed = [
        frame[:at] + bytes([byte]) + frame[at + 1 :]
        for at in range(len(frame))
        for byte in (*REPLACEMENTS, frame[at] ^ 0x01, frame[at] ^ 0x80)
    ]
    return cut + changed


@pytest.mark.parametrize("api_key", PARSED_VERSIONS, ids=lambda key: key.name)
def test_damaged_messages_raise_one_kind_of_error(api_key: ApiKey) -> None:
    accepted = refused = 0
    for golden in messages_of("request", api_key):
        for frame in damaged(bytes.fromhex(golden["bytes"])):
            refused += 1
            with contextlib.suppress(MalformedMessage):
                header, message = decode_header(memoryview(frame))
                decode_request(header.api_key, header.api_version, message)
                accepted += 1
    for golden in messages_of("response", api_key):
        version = golden["version"]
        for frame in damaged(bytes.fromhex(golden["bytes"])):
            refused += 1
            with contextlib.suppress(MalformedMessage):
                _, message = decode_response_header(api_key, version, memoryview(frame))
                decode_response(api_key, version, message)
                accepted += 1
    refused -= accepted
    assert accepted
    assert refused
