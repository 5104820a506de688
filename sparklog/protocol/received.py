"""The types of received frames, requests and replies.

The modules that use these types are compiled (``setup.py``). A field that is a memoryview, or that msgspec decodes by
its annotation, must be declared in a module that is not compiled. So these types have their own module.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import msgspec

from sparklog.protocol.messages import UNDECODABLE, Reply, Request


class Frame(msgspec.Struct, frozen=True, gc=False):
    """A received frame: its header and its body, as memoryviews.

    Both memoryviews keep the frame's memory alive. This memory is not written again, except in the case that
    ``FrameDecoder.decode_single`` documents.
    """

    header: memoryview
    body: memoryview


class OversizeFrame(NamedTuple):
    """A frame that was skipped because it is too large. ``header`` is empty if the header itself was too large."""

    header: bytes
    frame_bytes: int
    limit: int


class ReceivedReply(msgspec.Struct, frozen=True, gc=False):
    """A reply that a client has received, and its body."""

    reply: Reply
    body: memoryview


class NumberedRequest(Protocol):
    """A request of any protocol, with a number that distinguishes it from the connection's other requests."""

    @property
    def cid(self) -> int: ...


class ReceivedRequest(msgspec.Struct, frozen=True, gc=False):
    """A request that a server has received, and its body. ``frame_bytes`` is the size of both."""

    request: Request | NumberedRequest
    body: memoryview
    frame_bytes: int


class _Stamp(msgspec.Struct, array_like=True):
    """The first two elements of any message: its tag and correlation id."""

    tag: str
    cid: int


_stamp_decoder = msgspec.msgpack.Decoder(_Stamp)


def cid_of(header: bytes | memoryview) -> int:
    """Return the correlation id in a header that could not be decoded as a whole, or -1 if the id is unreadable too."""
    try:
        return _stamp_decoder.decode(header).cid
    except UNDECODABLE:
        return -1
