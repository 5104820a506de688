"""The messages between a consumer and a broker on the same host, on the Unix socket for local reads.

There is one request and one reply. Each is one packet in MessagePack. With a successful reply the broker passes two
open file descriptors, for reading: the segment's data file and its index. Later releases may add fields with defaults
at the end, as in the other messages.
"""

from __future__ import annotations

import msgspec

from sparklog.errors import BrokerError, ErrorCode
from sparklog.protocol.fields import Listed, SignedTicket
from sparklog.protocol.messages import AbortedRange

FORMAT_VERSION = 1


class OpenSegment(msgspec.Struct, frozen=True, array_like=True):
    """A request for the open files of the segment that contains ``offset``.

    The other fields have the same meaning as in ``FetchPartition`` and ``Fetch``.
    """

    version: int
    topic: str
    partition: int
    topic_id: str
    leader_epoch: int
    last_epoch: int
    offset: int
    isolation: int
    #: The signed ticket of the client; empty if the broker named the socket in its reply to the hello.
    ticket: SignedTicket = b""


class OpenedSegment(msgspec.Struct, frozen=True, array_like=True):
    """The reply to OpenSegment.

    The consumer may read the batches ``[first_batch, first_batch + batch_count)`` of the index, and map the first
    ``data_bytes`` of the data file. These batches are below the high watermark or, with ``isolation`` read committed,
    below the last stable offset. If there is nothing to read at the offset yet, the reply has no batches and no
    descriptors. ``code``, ``detail``, ``diverging`` and ``aborted`` have the same meaning as in ``FetchedPartition``.
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
    """Decode a packet of the consumer. Raises BrokerError: INVALID_REQUEST, UNSUPPORTED_VERSION."""
    try:
        request = _decode_request(packet)
    except msgspec.MsgspecError as error:
        raise BrokerError(ErrorCode.INVALID_REQUEST, f"not a request for a segment: {error}") from None
    _check_version(request.version)
    return request


def decode_reply(packet: bytes) -> OpenedSegment:
    """Decode a packet of the broker. Raises BrokerError: INVALID_REQUEST, UNSUPPORTED_VERSION."""
    try:
        reply = _decode_reply(packet)
    except msgspec.MsgspecError as error:
        raise BrokerError(ErrorCode.INVALID_REQUEST, f"not a reply about a segment: {error}") from None
    _check_version(reply.version)
    return reply


def _check_version(version: int) -> None:
    if version != FORMAT_VERSION:
        raise BrokerError(
            ErrorCode.UNSUPPORTED_VERSION, f"local reads of version {version} found, {FORMAT_VERSION} expected"
        )
