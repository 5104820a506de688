"""The shared part of the targets of both server ends: frames, the conversation with an end, and its limits."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator

from sparklog.kafka.connection import KafkaServerEnd
from sparklog.protocol.connection import ImmediateAnswer, ServerEnd
from sparklog.protocol.frames import encode_frame
from sparklog.protocol.login import ServerLogin
from sparklog.protocol.messages import Request, SaslAuthenticateReply, encode_message
from sparklog.protocol.received import ReceivedRequest
from tests.broker.fuzz_logins.correct_logins import Good
from tests.broker.fuzz_logins.mutations import pieces

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


def converse(
    end: ServerEnd | KafkaServerEnd,
    login: ServerLogin,
    good: Good,
    frames: Iterator[bytes],
    dice: random.Random,
    *,
    check_reply: Callable[[ImmediateAnswer, bool], Iterator[str]],
    check_end: Callable[[], None] = lambda: None,
    requests: type = object,
) -> Iterator[str]:
    """Send the frames to the end in pieces, check its state after each piece, and yield the outcomes.

    ``check_reply`` gets each reply, and whether the peer is logged in. It yields the outcomes of the reply.
    ``check_end`` is called after each piece. ``requests`` is the class of the requests that the end may serve.
    """
    sent = b""
    admitted = has_logged_in = False
    for said in frames:
        if admitted and dice.random() < 0.1:
            end.session_expired()
            admitted = False
            yield "expired"
        for piece in pieces(said, dice):
            sent += piece
            for event in received(end, piece):
                if isinstance(event, ReceivedRequest):
                    assert admitted, f"{event.request} is served before the login"
                    assert isinstance(event.request, requests)
                    yield "served"
                    continue
                if isinstance(event.reply, SaslAuthenticateReply) and event.reply.complete:
                    assert login.principal is not None
                    good.check_proved(login.principal, sent)
                    admitted = has_logged_in = True
                    yield "logged in"
                yield from check_reply(event, admitted)
                if event.close:
                    return
            assert end.admitted == admitted and end.identity is None and end.session is None
            assert has_logged_in or (not end.is_body_in_progress and len(end.get_buffer()) <= MAX_BUFFER)
            check_end()
