"""Frames: how messages and batches are cut out of a byte stream. Sans-IO, shared by every transport.

One frame, little-endian::

    u32 length          bytes that follow this field
    u32 header_length   bytes of the header
    header              one message in MessagePack
    zeros               up to the next multiple of 8, counted from the frame's first byte
    body                batch headers and batches, never parsed here

The body starts on an 8-byte boundary of the frame, and every frame with a body gets memory of its own, so that Arrow
reads its buffers in place. Small frames are cut from a receive buffer that one system call may fill with many of them;
a large frame is received directly into its final memory.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import TypeAlias

from sparklog.errors import ErrorCode, ProtocolError
from sparklog.protocol.received import Frame, OversizeFrame

Buffer: TypeAlias = "bytes | bytearray | memoryview"

PREFIX = struct.Struct("<II")
PREFIX_BYTES = PREFIX.size
#: A frame that is too large is skipped, but a header up to this size is kept to answer with its correlation id.
OVERSIZE_HEADER_BYTES = 64 * 1024
_SCRATCH_BYTES = 256 * 1024
#: Frames above this are received into their own memory; below, moving a partial one costs less than a system call.
_OWN_MEMORY_BYTES = _SCRATCH_BYTES // 2
_JOIN_BYTES = 32 * 1024
#: What a header of so many bytes, modulo 8, is filled up with; the prefix itself is eight.
_PADDING = [bytes(-length % 8) for length in range(8)]
_NOTHING = memoryview(b"")


def _body_start(header_length: int) -> int:
    return (PREFIX_BYTES + header_length + 7) & ~7


def encode_frame(header: bytes, body: Sequence[Buffer] = (), body_bytes: int = -1) -> list[Buffer]:
    """Return buffers to be sent in order; large body parts are passed through without a copy. ``body_bytes``: what the
    body's parts are together; below 0: not told."""
    header_bytes = len(header)
    if not body:
        return [PREFIX.pack(PREFIX_BYTES - 4 + header_bytes, header_bytes) + header]
    if body_bytes < 0:
        body_bytes = 0
        for part in body:
            body_bytes += len(part) if type(part) is bytes else memoryview(part).nbytes
    if not body_bytes:
        return [PREFIX.pack(PREFIX_BYTES - 4 + header_bytes, header_bytes) + header]
    padding = _PADDING[header_bytes & 7]
    prefix = PREFIX.pack(PREFIX_BYTES - 4 + header_bytes + len(padding) + body_bytes, header_bytes)
    if body_bytes <= _JOIN_BYTES:
        return [b"".join((prefix, header, padding, *body))]
    return [prefix + header + padding, *body]


def before_body(header: bytes, body_bytes: int) -> bytes:
    """What a frame has in front of a body of so many bytes, not 0."""
    prefix = PREFIX.pack(_body_start(len(header)) - 4 + body_bytes, len(header))
    return prefix + header + _PADDING[len(header) & 7]


class FrameDecoder:
    """Turns received bytes into frames. Owner: one connection. ``get_buffer`` then ``buffer_updated``, in turns, or
    ``alone`` first.

    Raises from ``buffer_updated``:
        ProtocolError: MALFORMED_FRAME, fatal: the bytes are not frames and the connection has to be closed.
            FRAME_TOO_LARGE, fatal: the first frame is too large.
    """

    def __init__(self, max_frame_bytes: int, first_max_bytes: int = 0) -> None:
        """``first_max_bytes``: of the first frame, 0: as of any other."""
        self._limit = max_frame_bytes
        self._first_limit = first_max_bytes
        self._scratch = memoryview(bytearray(_SCRATCH_BYTES))
        self._end = 0
        self._large: memoryview | None = None
        self._filled = 0
        self._skip = 0
        self._oversize: OversizeFrame | None = None
        #: What is received next begins a frame, and nothing is left to be said of an earlier one.
        self._at_start = not first_max_bytes

    def get_buffer(self) -> memoryview:
        """Where the transport may write received bytes; never empty."""
        if self._large is not None:
            return self._large[self._filled :]
        return self._scratch[self._end :] if self._end else self._scratch

    @property
    def body_under_way(self) -> bool:
        """A large frame is being received, and it has a body."""
        if self._large is None:
            return False
        return _body_start(PREFIX.unpack_from(self._large)[1]) < len(self._large)

    @property
    def receiving(self) -> tuple[int, int]:
        """Bytes of the large frame that is being received, and how many of them have come; (0, 0): there is none."""
        return (0, 0) if self._large is None else (len(self._large), self._filled)

    def alone(self, count: int) -> Frame | None:
        """As ``buffer_updated`` where the bytes are one frame and nothing else, as mostly where latency counts. None
        for any other: then ``buffer_updated`` is to be told of them.

        A header without a body has no memory of its own: it is there until more is received."""
        if not (self._at_start and PREFIX_BYTES <= count <= self._limit):
            return None
        scratch = self._scratch
        length, header_length = PREFIX.unpack_from(scratch)
        header_end = PREFIX_BYTES + header_length
        if length + 4 != count or header_end > count:
            return None
        if header_end == count:
            return Frame(scratch[PREFIX_BYTES:count], _NOTHING)
        whole = memoryview(bytes(scratch[:count]))
        return Frame(whole[PREFIX_BYTES:header_end], whole[(header_end + 7) & ~7 :])

    def buffer_updated(self, count: int) -> list[Frame | OversizeFrame]:
        """Account for ``count`` bytes written into the buffer; return the frames they completed, in order."""
        if self._large is not None:
            self._filled += count
            if self._filled < len(self._large):
                return []
            whole, self._large = self._large, None
            self._at_start = True
            return [_cut(whole, PREFIX.unpack_from(whole)[1])]
        self._at_start = False
        self._end += count
        return self._cut_scratch()

    def _cut_scratch(self) -> list[Frame | OversizeFrame]:
        frames: list[Frame | OversizeFrame] = []
        scratch, start, end = self._scratch, 0, self._end
        while True:
            if self._skip:
                skipped = min(self._skip, end - start)
                start += skipped
                self._skip -= skipped
                if self._skip:
                    break
            if self._oversize is not None:
                frames.append(self._oversize)
                self._oversize = None
            if end - start < PREFIX_BYTES:
                break
            length, header_length = PREFIX.unpack_from(scratch, start)
            total = length + 4
            if length < 4 or PREFIX_BYTES + header_length > total:
                raise ProtocolError(
                    ErrorCode.MALFORMED_FRAME,
                    f"frame of {total} bytes with a header of {header_length}: not a sparklog frame",
                    fatal=True,
                )
            if self._first_limit and total > self._first_limit:
                raise ProtocolError(
                    ErrorCode.FRAME_TOO_LARGE,
                    f"first frame of {total} bytes, at most {self._first_limit} accepted",
                    fatal=True,
                )
            if total > self._limit:
                kept = header_length if header_length <= OVERSIZE_HEADER_BYTES else 0
                if end - start < PREFIX_BYTES + kept:
                    break
                header = bytes(scratch[start + PREFIX_BYTES : start + PREFIX_BYTES + kept])
                self._oversize = OversizeFrame(header, total, self._limit)
                self._skip = total
            elif end - start >= total:
                frames.append(_cut(memoryview(bytes(scratch[start : start + total])), header_length))
                start += total
                self._first_limit = 0
            elif total > _OWN_MEMORY_BYTES:
                self._large = _memory(total)
                self._filled = end - start
                self._large[: self._filled] = scratch[start:end]
                start = end
                break
            else:
                break
        if start:
            # A bytes copy in between: the two regions of one memory may overlap.
            scratch[: end - start] = bytes(scratch[start:end])
        self._end = end - start
        self._at_start = start == end and not self._skip and self._large is None
        return frames


def _memory(size: int) -> memoryview:
    """Of bytes that nobody has set, which bytearray would do."""
    import numpy as np  # not for those whose frames are all small: it takes longer to load than all they do

    return np.empty(size, dtype=np.uint8).data


def _cut(whole: memoryview, header_length: int) -> Frame:
    header_end = PREFIX_BYTES + header_length
    return Frame(whole[PREFIX_BYTES:header_end], whole[(header_end + 7) & ~7 :])
