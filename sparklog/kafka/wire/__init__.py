"""Kafka's wire protocol without I/O: frames, headers and the messages of Kafka 4.1.

The messages are declared in ``metadata``, ``data``, ``offsets``, ``groups``, ``admin``, ``transactions`` and
``security``. Import their classes from those modules. Compiled readers and writers turn them into bytes and back.
"""

from __future__ import annotations

from sparklog.kafka.wire.api_keys import ApiKey
from sparklog.kafka.wire.codec import (
    API_VERSIONS,
    PARSED_VERSIONS,
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
from sparklog.kafka.wire.fields import ZERO_UUID
from sparklog.kafka.wire.malformed import MalformedMessage

__all__ = [
    "API_VERSIONS",
    "PARSED_VERSIONS",
    "ZERO_UUID",
    "ApiKey",
    "MalformedMessage",
    "RequestHeader",
    "decode_header",
    "decode_request",
    "decode_response",
    "decode_response_header",
    "encode_request",
    "encode_response",
    "is_supported",
    "request_frame",
    "response_frame",
]
