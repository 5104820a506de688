"""What the targets of both server ends share: frames, the events of an end, and its limits."""

from __future__ import annotations

from collections.abc import Iterator

from sparklog.kafka.connection import KafkaServerEnd
from sparklog.protocol.connection import ImmediateAnswer, ServerEnd
from sparklog.protocol.frames import encode_frame
from sparklog.protocol.messages import Request, encode_message
from sparklog.protocol.received import ReceivedRequest

#: The largest reply to a peer that has not logged in.
MAX_REPLY = 8192
#: The largest buffer that such a peer makes the server keep.
MAX_BUFFER = 256 * 1024


def frame(message: Request, body: bytes = b"") -> bytes:
    return b"".join(map(bytes, encode_frame(encode_message(message), [body] if body else [])))


def received(end: ServerEnd | KafkaServerEnd, piece: bytes) -> Iterator[ReceivedRequest | ImmediateAnswer]:
    """Give the end some bytes, and yield its events until one closes the connection."""
    while piece:
        buffer = end.get_buffer()
        count = min(len(buffer), len(piece))
        buffer[:count] = piece[:count]
        piece = piece[count:]
        event = end.decode_single(count)
        for one in end.buffer_updated(count) if event is None else [event]:
            yield one
            if isinstance(one, ImmediateAnswer) and one.close:
                return
