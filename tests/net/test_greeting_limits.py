"""Tests that a client accepts no large frame from a server that has not completed the greeting and the login."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from sparklog.errors import BrokerError
from sparklog.net.async_client import AsyncConnection
from sparklog.net.blocking import BlockingConnection
from sparklog.net.client_security import ClientSecurity
from sparklog.protocol.connection import MAX_GREETING_REPLY_BYTES, encode_reply
from sparklog.protocol.frames import PREFIX, FrameDecoder
from sparklog.protocol.messages import Ack, HelloReply, Metadata, SaslAuthenticateReply

LARGE = 100 * 1024 * 1024
ANNA = ClientSecurity.parse(
    {
        "security.protocol": "SASL_PLAINTEXT",
        "sasl.mechanism": "SCRAM-SHA-256",
        "sasl.username": "anna",
        "sasl.password": "x",
    }
)
PLAIN = ClientSecurity()


def begin_large() -> bytes:
    """Return the beginning of a frame of 100 MiB."""
    return PREFIX.pack(LARGE, 8) + bytes(200_000)


def hello_reply(*mechanisms: str) -> bytes:
    return b"".join(map(bytes, encode_reply(HelloReply(1, 1, 7, 3, "c", 1 << 20, sasl_mechanisms=mechanisms))))


@contextmanager
def impostor(*replies: bytes) -> Iterator[int]:
    """Serve one connection: send one of the replies after each request. Yield the port."""
    listening = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        connection, _ = listening.accept()
        with connection, contextlib.suppress(ConnectionError):  # The client closes without reading everything.
            connection.settimeout(10)
            for reply in replies:
                decoder = FrameDecoder(1 << 20)
                while not decoder.buffer_updated(connection.recv_into(decoder.get_buffer())):
                    pass
                connection.sendall(reply)
            while connection.recv(65536):
                pass

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        yield listening.getsockname()[1]
    finally:
        thread.join(20)
        listening.close()
        assert not thread.is_alive()


def blocking(port: int, security: ClientSecurity, *, large_reply: bool = False) -> None:
    with BlockingConnection("127.0.0.1", port, client_id="test", timeout_s=8, security=security) as connection:
        _, body = connection.request(Metadata(0))
        assert len(body) == MAX_GREETING_REPLY_BYTES or not large_reply


def by_asyncio(port: int, security: ClientSecurity, *, large_reply: bool = False) -> None:
    async def test() -> None:
        connection = await AsyncConnection.open("127.0.0.1", port, client_id="test", security=security)
        _, body = await connection.request(Metadata(0))
        assert len(body) == MAX_GREETING_REPLY_BYTES or not large_reply
        connection.close()

    asyncio.run(test())


@pytest.mark.parametrize("connect", [blocking, by_asyncio])
@pytest.mark.parametrize(
    ("security", "replies"),
    [
        (PLAIN, [begin_large()]),
        (ANNA, [begin_large()]),
        (ANNA, [hello_reply("SCRAM-SHA-256"), begin_large()]),
    ],
    ids=["hello", "hello of a listener with logins", "login"],
)
def test_a_large_reply_before_the_end_of_the_login_is_refused(
    connect: Callable[[int, ClientSecurity], None], security: ClientSecurity, replies: list[bytes]
) -> None:
    with impostor(*replies) as port:
        began_s = time.monotonic()
        with pytest.raises(BrokerError, match=f"at most {MAX_GREETING_REPLY_BYTES} accepted"):
            connect(port, security)
        assert time.monotonic() - began_s < 4, "the client has not waited for the rest"


@pytest.mark.parametrize("connect", [blocking, by_asyncio])
def test_a_server_that_proves_nothing_sends_no_large_reply(connect: Callable[[int, ClientSecurity], None]) -> None:
    forged = b"".join(map(bytes, encode_reply(SaslAuthenticateReply(2, b"v=AAAA", True))))
    with impostor(hello_reply("SCRAM-SHA-256"), forged + begin_large()) as port, pytest.raises(BrokerError):
        connect(port, ANNA)


@pytest.mark.parametrize("connect", [blocking, by_asyncio])
def test_large_replies_are_accepted_after_the_greeting(connect: Callable[..., None]) -> None:
    large = b"".join(map(bytes, encode_reply(Ack(2), [bytes(MAX_GREETING_REPLY_BYTES)])))
    with impostor(hello_reply(), large) as port:
        connect(port, PLAIN, large_reply=True)
