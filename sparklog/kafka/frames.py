"""The frames of Kafka's protocol on a connection. A frame is a length of four bytes, big-endian, and a request.

This module does no I/O. One system call may fill the receive buffer with many small frames, which are then copied out
of it. A large frame is received directly into its own memory. The decoder never overwrites the memory of a returned
frame.
"""

from __future__ import annotations

from sparklog.errors import ErrorCode, ProtocolError
from sparklog.protocol.frames import OWN_MEMORY_BYTES, SCRATCH_BYTES, uninitialized_memory

#: The number of bytes of the length before each frame.
LENGTH_BYTES = 4


class KafkaFrameDecoder:
    """A decoder that splits the received bytes of one connection into frames.

    Its owner calls ``get_buffer``, receives bytes into the buffer, and then calls ``buffer_updated``. It may call
    ``decode_single`` before ``buffer_updated``.
    """

    def __init__(self, max_frame_bytes: int, login_max_bytes: int = 0) -> None:
        """Allocate the receive buffer.

        ``login_max_bytes`` limits the frames until ``end_login`` is called; 0 means no further limit.
        """
        self._max_frame_bytes = max_frame_bytes
        self._limit = login_max_bytes or max_frame_bytes
        self._scratch = memoryview(bytearray(SCRATCH_BYTES))
        self._end = 0
        self._large: memoryview | None = None
        self._filled = 0
        #: The error after the last returned frame: the next bytes are no frame, and the connection must be closed. The
        #: error shows a client of another protocol, because its first bytes are not a plausible length.
        self.error: ProtocolError | None = None

    def get_buffer(self) -> memoryview:
        """Return the buffer into which to receive the next bytes. It always has room for at least one byte."""
        if self._large is not None:
            return self._large[self._filled :]
        return self._scratch[self._end :] if self._end else self._scratch

    @property
    def receiving(self) -> tuple[int, int]:
        """Return the size of the large frame that is being received, and the number of bytes received so far.

        Return (0, 0) if no large frame is being received.
        """
        return (0, 0) if self._large is None else (len(self._large), self._filled)

    def end_login(self) -> None:
        """Remove the limit that applies before the login is complete."""
        self._limit = self._max_frame_bytes

    def decode_single(self, count: int) -> memoryview | None:
        """Return the frame if the ``count`` received bytes are exactly one frame. This is a fast path for that case.

        Return None otherwise. Then the caller must call ``buffer_updated``.
        """
        if self._end or self._large is not None or not LENGTH_BYTES < count <= self._limit:
            return None
        if int.from_bytes(self._scratch[:LENGTH_BYTES], "big") != count - LENGTH_BYTES:
            return None
        return memoryview(bytes(self._scratch[LENGTH_BYTES:count]))

    def buffer_updated(self, count: int) -> list[memoryview]:
        """Return the frames that are complete after ``count`` more bytes were received into the buffer, in order.

        The caller must then check ``error``.
        """
        if self._large is not None:
            self._filled += count
            if self._filled < len(self._large):
                return []
            whole, self._large = self._large, None
            return [whole]
        self._end += count
        return self._cut_scratch()

    def _cut_scratch(self) -> list[memoryview]:
        frames: list[memoryview] = []
        scratch, start, end = self._scratch, 0, self._end
        while end - start >= LENGTH_BYTES:
            length = int.from_bytes(scratch[start : start + LENGTH_BYTES], "big", signed=True)
            if not 0 < length <= self._limit:
                self.error = _refusal(length, self._limit)
                break
            first, last = start + LENGTH_BYTES, start + LENGTH_BYTES + length
            if last <= end:
                frames.append(memoryview(bytes(scratch[first:last])))
                start = last
            elif length > OWN_MEMORY_BYTES:
                self._large = uninitialized_memory(length)
                self._filled = end - first
                self._large[: self._filled] = scratch[first:end]
                start = end
                break
            else:
                break
        if start:
            # Copy to a bytes object first, because the source and the target of the move may overlap.
            scratch[: end - start] = bytes(scratch[start:end])
        self._end = end - start
        return frames


def _refusal(length: int, limit: int) -> ProtocolError:
    code = ErrorCode.FRAME_TOO_LARGE if length > 0 else ErrorCode.MALFORMED_FRAME
    return ProtocolError(code, f"Kafka frame of {length} bytes, 1 to {limit} accepted", fatal=True)
