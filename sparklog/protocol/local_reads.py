"""What a reader and a broker of the same host say to each other over the Unix socket for local reads.

One request, one answer, each a packet of MessagePack. With a good answer come two descriptors, open for reading: the
segment's data file and its index. Structs may grow at the end with defaults, as the other messages.
"""

from __future__ import annotations

import msgspec

from sparklog.errors import BrokerError, ErrorCode
from sparklog.protocol.fields import Listed
from sparklog.protocol.messages import AbortedRange

FORMAT_VERSION = 1


class OpenSegment(msgspec.Struct, frozen=True, array_like=True):
    """Wants the segment that holds ``offset``. The fields are as in ``FetchPartition`` and ``Fetch``."""

    version: int
    topic: str
    partition: int
    topic_id: str
    leader_epoch: int
    last_epoch: int
    offset: int
    isolation: int


class OpenedSegment(msgspec.Struct, frozen=True, array_like=True):
    """Batches ``[first_batch, first_batch + batch_count)`` of the index may be read, and ``data_bytes`` of the data be
    mapped: all of it is committed, and below what ``isolation`` allows. No batches and no descriptors: there is nothing
    to read at the offset yet. ``code`` and ``detail`` as in ``FetchedPartition``, and so ``diverging`` and ``aborted``.
    """

    version: int
    code: int
    broker_id: int
    incarnation: int
    cluster_id: str
    detail: str = ""
    high_watermark: int = -1
    last_stable_offset: int = -1
    log_start_offset: int = -1
    log_end_offset: int = -1
    first_batch: int = 0
    batch_count: int = 0
    data_bytes: int = 0
    diverging: tuple[int, int] | None = None
    aborted: Listed[AbortedRange] = ()


encode = msgspec.msgpack.Encoder().encode
_decode_request = msgspec.msgpack.Decoder(OpenSegment).decode
_decode_reply = msgspec.msgpack.Decoder(OpenedSegment).decode


def decode_request(packet: bytes) -> OpenSegment:
    """Raises BrokerError: INVALID_REQUEST, UNSUPPORTED_VERSION."""
    try:
        request = _decode_request(packet)
    except msgspec.MsgspecError as error:
        raise BrokerError(ErrorCode.INVALID_REQUEST, f"not a request for a segment: {error}") from None
    _check_version(request.version)
    return request


def decode_reply(packet: bytes) -> OpenedSegment:
    """Raises BrokerError: INVALID_REQUEST, UNSUPPORTED_VERSION."""
    try:
        reply = _decode_reply(packet)
    except msgspec.MsgspecError as error:
        raise BrokerError(ErrorCode.INVALID_REQUEST, f"not an answer about a segment: {error}") from None
    _check_version(reply.version)
    return reply


def _check_version(version: int) -> None:
    if version != FORMAT_VERSION:
        raise BrokerError(
            ErrorCode.UNSUPPORTED_VERSION, f"local reads of version {version} found, {FORMAT_VERSION} expected"
        )
