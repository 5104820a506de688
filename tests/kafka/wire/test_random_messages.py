"""Tests of the codec with random messages and random bytes."""

from __future__ import annotations

import contextlib
import io
import sys
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparklog.kafka.wire import (
    MalformedMessage,
    decode_header,
    decode_request,
    decode_response,
    encode_request,
    encode_response,
)
from tests.kafka.wire.random_messages import VERSIONS, comparable, messages
from tests.kafka.wire.test_golden_messages import MESSAGES

CODECS = {"request": (encode_request, decode_request), "response": (encode_response, decode_response)}


@st.composite
def any_message(draw: st.DrawFn) -> tuple[str, int, int, Any]:
    kind, api_key, version = draw(st.sampled_from(VERSIONS))
    return kind, api_key, version, draw(messages(kind, api_key, version))


@given(any_message())
def test_a_message_is_read_as_it_was_written(given_message: tuple[str, int, int, Any]) -> None:
    kind, api_key, version, message = given_message
    encode, decode = CODECS[kind]
    written = b"".join(encode(api_key, version, message))
    read = decode(api_key, version, memoryview(written))
    assert comparable(read) == comparable(message)
    assert b"".join(encode(api_key, version, read)) == written


@st.composite
def damaged_frame(draw: st.DrawFn) -> bytes:
    """Draw a frame of kafka-clients with a few bytes changed, removed or added."""
    frame = bytearray.fromhex(draw(st.sampled_from(MESSAGES))["bytes"])
    for _ in range(draw(st.integers(0, 4))):
        at = draw(st.integers(0, len(frame)))
        piece = draw(
            st.binary(max_size=5) | st.sampled_from([b"\xff", b"\xff\xff\xff\xff", b"\x7f\xff\xff\xff", b"\0"])
        )
        frame[at : at + draw(st.integers(0, 6))] = piece
    return bytes(frame)


@given(damaged_frame() | st.binary(max_size=200), st.sampled_from(VERSIONS))
def test_damaged_bytes_raise_one_kind_of_error(frame: bytes, other: tuple[str, int, int]) -> None:
    with contextlib.suppress(MalformedMessage):
        header, message = decode_header(memoryview(frame))
        for kind, (_, decode) in CODECS.items():
            with contextlib.suppress(MalformedMessage):
                read = decode(header.api_key, header.api_version, message)
                # What was accepted can be written: no value is out of the range of its type.
                CODECS[kind][0](header.api_key, header.api_version, read)
    kind, api_key, version = other
    with contextlib.suppress(MalformedMessage):
        CODECS[kind][1](api_key, version, memoryview(frame))


@st.composite
def message_that_kio_accepts(draw: st.DrawFn) -> tuple[str, int, int, bytes]:
    """Draw the bytes of a message whose numbers kio can make into its own times, periods and error codes."""
    kind, api_key, version = draw(st.sampled_from(VERSIONS))
    message = draw(messages(kind, api_key, version))
    return kind, api_key, version, b"".join(CODECS[kind][0](api_key, version, with_kios_limits(message)))


def with_kios_limits(value: Any) -> Any:
    if isinstance(value, list):
        return [with_kios_limits(each) for each in value]
    if not hasattr(value, "__struct_fields__"):
        return value
    changed = {}
    for name in value.__struct_fields__:
        found = getattr(value, name)
        if isinstance(found, int) and "error_code" in name:
            found = found % 90
        elif isinstance(found, int) and ("time" in name or name.endswith("_ms")):
            found = found % 10**9
        changed[name] = with_kios_limits(found)
    return type(value)(**changed)


@pytest.mark.skipif(sys.version_info < (3, 11), reason="kio needs Python 3.11")
@given(message_that_kio_accepts())
def test_kio_reads_the_bytes_and_writes_the_same(given_bytes: tuple[str, int, int, bytes]) -> None:
    from kio.index import load_request_schema, load_response_schema
    from kio.serial import entity_reader, entity_writer

    kind, api_key, version, written = given_bytes
    schema: Any = (load_request_schema if kind == "request" else load_response_schema)(api_key, version)
    entity, size = entity_reader(schema)(written, 0)
    assert size == len(written)
    again = io.BytesIO()
    entity_writer(schema)(again, entity)
    assert again.getvalue() == written
