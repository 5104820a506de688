"""Frames: the encoding of messages and batches in a byte stream, for all transports. This module does no I/O.

One frame, little-endian::

    u32 length          bytes that follow this field
    u32 header_length   bytes of the header
    header              one message in MessagePack
    zeros               up to the next multiple of 8, counted from the frame's first byte
    body                batch headers and batches, which this module does not parse

The body starts on an 8-byte boundary of the frame, and every received frame has separate memory. So Arrow can use the
batches in place, without a copy. One system call may fill the receive buffer with many small frames, which are then
copied out of it. A large frame is received directly into its own memory.
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
#: The decoder skips a frame that is too large. If the frame's header has at most this size, the decoder keeps the
#: header, so that the error reply has the request's correlation id.
OVERSIZE_HEADER_BYTES = 64 * 1024
SCRATCH_BYTES = 256 * 1024
#: Frames larger than this are received directly into their own memory. For smaller frames a copy costs less than
#: another system call.
OWN_MEMORY_BYTES = SCRATCH_BYTES // 2
_JOIN_BYTES = 32 * 1024
#: The padding after a header, by the header's length modulo 8. The prefix has eight bytes, so it needs no padding.
_PADDING = [bytes(-length % 8) for length in range(8)]
_NOTHING = memoryview(b"")


def _body_start(header_length: int) -> int:
    return (PREFIX_BYTES + header_length + 7) & ~7


def encode_frame(header: bytes, body: Sequence[Buffer] = (), body_bytes: int = -1) -> list[Buffer]:
    """Return the buffers of a frame, in the order in which to send them. The parts of a large body are not copied.

    ``body_bytes`` is the total size of the body's parts. A negative value means that it is unknown.
    """
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
    """Return the bytes of a frame that precede its body. ``body_bytes`` is the size of the body and must not be 0."""
    prefix = PREFIX.pack(_body_start(len(header)) - 4 + body_bytes, len(header))
    return prefix + header + _PADDING[len(header) & 7]


class FrameDecoder:
    """A decoder that splits the received bytes of one connection into frames.

    Its owner calls ``get_buffer``, receives bytes into the buffer, and then calls ``buffer_updated``. It may call
    ``decode_single`` before ``buffer_updated``.

    Raises from ``buffer_updated``:
      ProtocolError: MALFORMED_FRAME, fatal: the bytes are not frames and the connection must be closed.
        FRAME_TOO_LARGE, fatal: the first frame, or a frame before the end of the login, is too large.
    """

    def __init__(self, max_frame_bytes: int, first_max_bytes: int = 0, login_max_bytes: int = 0) -> None:
        """Allocate the receive buffer.

        ``first_max_bytes`` limits the first frame. ``login_max_bytes`` limits the frames after it until ``end_login``
        is called. A limit of 0 has no effect.
        """
        self._limit = max_frame_bytes
        #: The size limits before the login is complete: of the next frame, and of the frames after it. 0 means none.
        self._small_limit, self._next_small_limit = first_max_bytes, login_max_bytes
        self._scratch = memoryview(bytearray(SCRATCH_BYTES))
        self._end = 0
        self._large: memoryview | None = None
        self._filled = 0
        self._skip = 0
        self._oversize: OversizeFrame | None = None
        #: Whether the next received bytes begin a frame, and only the maximum frame size limits this frame.
        self._at_start = not first_max_bytes

    def get_buffer(self) -> memoryview:
        """Return the buffer into which to receive the next bytes. It always has room for at least one byte."""
        if self._large is not None:
            return self._large[self._filled :]
        return self._scratch[self._end :] if self._end else self._scratch

    @property
    def beginning(self) -> memoryview:
        """Return the received bytes that are not decoded yet. They are not a frame if ``buffer_updated`` has failed."""
        return self._scratch[: self._end]

    @property
    def is_body_in_progress(self) -> bool:
        """Return whether a large frame with a body is being received."""
        if self._large is None:
            return False
        return _body_start(PREFIX.unpack_from(self._large)[1]) < len(self._large)

    @property
    def receiving(self) -> tuple[int, int]:
        """Return the size of the large frame that is being received, and the number of bytes received so far.

        Return (0, 0) if no large frame is being received.
        """
        return (0, 0) if self._large is None else (len(self._large), self._filled)

    def decode_single(self, count: int) -> Frame | None:
        """Return the frame if the ``count`` received bytes are exactly one frame. This is a fast path for that case.

        Return None otherwise. Then the caller must call ``buffer_updated``. If the frame has no body, its header is a
        memoryview of the receive buffer, and is valid only until more bytes are received.
        """
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
        """Return the frames that are complete after ``count`` more bytes were received into the buffer, in order."""
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
            if self._small_limit and total > self._small_limit:
                name = "first frame" if self._small_limit != self._next_small_limit else "frame before a complete login"
                raise ProtocolError(
                    ErrorCode.FRAME_TOO_LARGE,
                    f"{name} of {total} bytes, at most {self._small_limit} accepted",
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
                self._small_limit = self._next_small_limit
                if start == end:
                    break
            elif total > OWN_MEMORY_BYTES:
                self._large = uninitialized_memory(total)
                self._filled = end - start
                self._large[: self._filled] = scratch[start:end]
                start = end
                break
            else:
                break
        if start:
            # Copy to a bytes object first, because the source and the target of the move may overlap.
            scratch[: end - start] = bytes(scratch[start:end])
        self._end = end - start
        self._at_start = start == end and not (self._skip or self._small_limit) and self._large is None
        return frames

    def end_login(self) -> None:
        """Remove the limits that apply before the login is complete. Larger frames are accepted from now on."""
        self._small_limit = self._next_small_limit = 0
        self._at_start = not self._end


def uninitialized_memory(size: int) -> memoryview:
    """Return uninitialized memory. A bytearray would be slower, because it sets every byte to zero."""
    # Imported here because numpy takes long to load, and programs with only small frames do not need it.
    import numpy as np

    return np.empty(size, dtype=np.uint8).data


def _cut(whole: memoryview, header_length: int) -> Frame:
    header_end = PREFIX_BYTES + header_length
    return Frame(whole[PREFIX_BYTES:header_end], whole[(header_end + 7) & ~7 :])
