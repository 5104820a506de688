"""Encoding and decoding of messages, and of the headers and frames around them.

A frame on a connection is a length of four bytes, a header and a message. The decoding functions expect a frame without
its length. The module compiles the reader and the writer of a message and version at the first use, which takes about a
millisecond, and keeps them.

Invalid bytes raise :class:`MalformedMessage`, and no other exception. The module ignores bytes after a message's end,
as Kafka does.
"""

from __future__ import annotations

import functools
import struct
from typing import Any, NamedTuple

# The import of these modules declares all messages.
from sparklog.kafka.wire import admin, data, groups, metadata, offsets, security, transactions  # noqa: F401
from sparklog.kafka.wire.api_keys import ApiKey
from sparklog.kafka.wire.fields import REQUESTS, RESPONSES, Message
from sparklog.kafka.wire.malformed import MalformedMessage
from sparklog.kafka.wire.primitives import Buffer, skip_tagged_fields, uvarint
from sparklog.kafka.wire.read_compiler import Reader, compile_reader
from sparklog.kafka.wire.write_compiler import Writer, compile_writer

#: The versions that this package decodes and encodes. ApiVersions responses advertise the ranges of ``API_VERSIONS``.
PARSED_VERSIONS: dict[ApiKey, tuple[int, int]] = {
    key: (request.versions.first, request.versions.last) for key, request in sorted(REQUESTS.items())
}
#: The versions that ApiVersions responses advertise. Some releases of librdkafka compress batches only if the
#: advertised versions of Produce start at 0. So Kafka advertises version 0, although it reads only versions from 3 on.
#: Source: KAFKA-18659.
API_VERSIONS: dict[ApiKey, tuple[int, int]] = PARSED_VERSIONS | {
    ApiKey.PRODUCE: (0, PARSED_VERSIONS[ApiKey.PRODUCE][1])
}

#: The maximum number of elements of all arrays of one request together. Decoding them takes at most 0.06 s and 12 MB,
#: and a handler may visit all of them once without a pause.
MAX_ELEMENTS = 120_000
#: The maximum number of elements of a Produce request. Decoding them takes less than 0.02 s. The limit is lower because
#: Produce requests of any size are decoded on the event loop.
MAX_PRODUCE_ELEMENTS = 40_000
#: The maximum number of tagged fields of a header. Kafka's own headers have none.
_MAX_HEADER_TAGS = 1000
_LENGTH_BYTES = 4
_NOT_A_MESSAGE = (struct.error, IndexError, UnicodeDecodeError, OverflowError)


class RequestHeader(NamedTuple):
    """The header of a request. ``api_key`` and ``api_version`` may be unknown to this package."""

    api_key: int
    api_version: int
    correlation_id: int
    client_id: str | None = None


def is_supported(api_key: int, version: int) -> bool:
    """Return whether requests of this version can be decoded."""
    known = REQUESTS.get(api_key)  # type: ignore[call-overload]
    return known is not None and version in known.versions


def decode_header(frame: memoryview) -> tuple[RequestHeader, memoryview]:
    """Return the header of a request and the bytes of its message.

    The function also decodes the header of an unknown version of ApiVersions, so that a newer client gets a response.

    Raises:
        MalformedMessage: the frame is too short, or its client id is not UTF-8.
    """
    try:
        api_key, version, correlation_id, length = _HEADER.unpack_from(frame)
        position = _HEADER.size
        client_id = None
        if length >= 0:
            position += length
            if position > len(frame):
                raise MalformedMessage(f"a client id of {length} bytes in a frame of {len(frame)}")
            client_id = str(frame[_HEADER.size : position], "utf-8")
        known = REQUESTS.get(api_key)
        if known is not None and version in known.flexible:
            position = _after_tags(frame, position)
    except _NOT_A_MESSAGE as error:
        raise MalformedMessage(f"a frame of {len(frame)} bytes starts with no request header: {error}") from None
    return RequestHeader(api_key, version, correlation_id, client_id), frame[position:]


_HEADER = struct.Struct(">hhih")


def _after_tags(frame: memoryview, position: int) -> int:
    count, position = uvarint(frame, position)
    if count > _MAX_HEADER_TAGS:
        raise MalformedMessage(f"a header with {count} tagged fields, at most {_MAX_HEADER_TAGS} expected")
    return skip_tagged_fields(frame, position, count, len(frame))


def decode_request(api_key: int, version: int, message: memoryview) -> Any:
    """Return the request that ``message``, the bytes after the header, contains.

    Records in it are views of ``message``.

    Raises:
        MalformedMessage: the bytes are not this message, or the version is unknown.
    """
    return _decode(REQUESTS, api_key, version, message)


def decode_response(api_key: int, version: int, message: memoryview) -> Any:
    """Return the response that ``message``, the bytes after the header, contains.

    Raises:
        MalformedMessage: the bytes are not this message, or the version is unknown.
    """
    return _decode(RESPONSES, api_key, version, message)


def encode_request(api_key: int, version: int, request: Any) -> list[Buffer]:
    """Return the bytes of a request without its header, as buffers. Buffers of records are not copied."""
    return _encode(REQUESTS, api_key, version, request, bytearray())


def encode_response(api_key: int, version: int, response: Any) -> list[Buffer]:
    """Return the bytes of a response without its header, as buffers. Buffers of records are not copied."""
    return _encode(RESPONSES, api_key, version, response, bytearray())


def request_frame(header: RequestHeader, request: Any) -> list[Buffer]:
    """Return a whole request: the frame's length, the header and the message."""
    out = bytearray(_LENGTH_BYTES)
    client_id = None if header.client_id is None else header.client_id.encode()
    length = -1 if client_id is None else len(client_id)
    out += _HEADER.pack(header.api_key, header.api_version, header.correlation_id, length)
    out += client_id or b""
    if header.api_version in _known(REQUESTS, header.api_key, header.api_version).flexible:
        out.append(0)
    return _with_length(_encode(REQUESTS, header.api_key, header.api_version, request, out))


def response_frame(header: RequestHeader, response: Any) -> list[Buffer]:
    """Return the whole response to a request: the frame's length, the header and the message.

    The response to an unknown version of ApiVersions has version 0, which every client can read.
    """
    api_key, version, correlation_id, _ = header
    if api_key == ApiKey.API_VERSIONS and not is_supported(api_key, version):
        version = 0
    out = bytearray(_LENGTH_BYTES)
    out += correlation_id.to_bytes(4, "big", signed=True)
    if _tags_in_response_header(api_key, version):
        out.append(0)
    return _with_length(_encode(RESPONSES, api_key, version, response, out))


def decode_response_header(api_key: int, version: int, frame: memoryview) -> tuple[int, memoryview]:
    """Return the correlation id of a response and the bytes of its message.

    Raises:
        MalformedMessage: the frame is too short.
    """
    try:
        correlation_id = int.from_bytes(frame[:_LENGTH_BYTES], "big", signed=True)
        position = _after_tags(frame, _LENGTH_BYTES) if _tags_in_response_header(api_key, version) else _LENGTH_BYTES
    except _NOT_A_MESSAGE as error:
        raise MalformedMessage(f"a frame of {len(frame)} bytes starts with no response header: {error}") from None
    if len(frame) < _LENGTH_BYTES:
        raise MalformedMessage(f"a response of {len(frame)} bytes")
    return correlation_id, frame[position:]


def _tags_in_response_header(api_key: int, version: int) -> bool:
    """Return whether the header of a response has tagged fields. The header of ApiVersions never has them."""
    return api_key != ApiKey.API_VERSIONS and version in _known(RESPONSES, api_key, version).flexible


def _known(table: dict[ApiKey, Message], api_key: int, version: int) -> Message:
    known = table.get(api_key)  # type: ignore[call-overload]
    if known is None or version not in known.versions:
        raise MalformedMessage(f"version {version} of API {api_key} is unknown")
    found: Message = known
    return found


def _decode(table: dict[ApiKey, Message], api_key: int, version: int, message: memoryview) -> Any:
    read = (_request_reader if table is REQUESTS else _response_reader)(api_key, version)
    try:
        decoded, _ = read(message, 0, len(message))
    except _NOT_A_MESSAGE as error:
        name = ApiKey(api_key).name
        raise MalformedMessage(f"{len(message)} bytes are not version {version} of {name}: {error}") from None
    return decoded


def _encode(table: dict[ApiKey, Message], api_key: int, version: int, value: Any, out: bytearray) -> list[Buffer]:
    write = (_request_writer if table is REQUESTS else _response_writer)(api_key, version)
    parts: list[Buffer] = [out]
    write(value, parts)
    if not parts[-1]:
        parts.pop()
    return parts


def _with_length(parts: list[Buffer]) -> list[Buffer]:
    length = sum(len(part) for part in parts) - _LENGTH_BYTES
    parts[0][:_LENGTH_BYTES] = length.to_bytes(_LENGTH_BYTES, "big")
    return parts


def _reader(table: dict[ApiKey, Message], api_key: int, version: int) -> Reader:
    known = _known(table, api_key, version)
    limit = None
    if table is REQUESTS:
        limit = MAX_PRODUCE_ELEMENTS if api_key == ApiKey.PRODUCE else MAX_ELEMENTS
    return compile_reader(known.declared, version, flexible=version in known.flexible, max_elements=limit)


def _writer(table: dict[ApiKey, Message], api_key: int, version: int) -> Writer:
    known = _known(table, api_key, version)
    return compile_writer(known.declared, version, flexible=version in known.flexible)


@functools.cache
def _request_reader(api_key: int, version: int) -> Reader:
    return _reader(REQUESTS, api_key, version)


@functools.cache
def _response_reader(api_key: int, version: int) -> Reader:
    return _reader(RESPONSES, api_key, version)


@functools.cache
def _request_writer(api_key: int, version: int) -> Writer:
    return _writer(REQUESTS, api_key, version)


@functools.cache
def _response_writer(api_key: int, version: int) -> Writer:
    return _writer(RESPONSES, api_key, version)
