"""Received frames, requests and replies.

They are apart from the modules that use them because of the Python compiler. A field that is a view, or that msgspec
decodes by its annotation, must be declared in a module that is not compiled (``setup.py``).
"""

from __future__ import annotations

from typing import NamedTuple

import msgspec

from sparklog.protocol.messages import UNDECODABLE, Reply, Request


class Frame(msgspec.Struct, frozen=True, gc=False):
    """A received frame.

    Both views keep the frame's memory alive. The memory is never written again, except as documented at
    ``FrameDecoder.decode_single``.
    """

    header: memoryview
    body: memoryview


class OversizeFrame(NamedTuple):
    """A frame over the limit, which was skipped. ``header`` is empty if it was too large itself."""

    header: bytes
    frame_bytes: int
    limit: int


class ReceivedReply(msgspec.Struct, frozen=True, gc=False):
    reply: Reply
    body: memoryview


class ReceivedRequest(msgspec.Struct, frozen=True, gc=False):
    request: Request
    body: memoryview
    frame_bytes: int


class _Stamp(msgspec.Struct, array_like=True):
    """The first two elements of any message: its tag and correlation id."""

    tag: str
    cid: int


_stamp_decoder = msgspec.msgpack.Decoder(_Stamp)


def cid_of(header: bytes | memoryview) -> int:
    """Return the correlation id of a header that could not be decoded as a whole, or -1."""
    try:
        return _stamp_decoder.decode(header).cid
    except UNDECODABLE:
        return -1
