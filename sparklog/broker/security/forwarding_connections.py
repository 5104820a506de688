"""Wrappers of a client's connection, which change the handler's reply before it is sent."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence

from sparklog.broker.requests.slices import Slices, answer_failure
from sparklog.net.server_connection import ServerConnection
from sparklog.protocol.frames import Buffer
from sparklog.protocol.messages import Reply, Request
from sparklog.security.partial_answers import Allows, shown


class ForwardingConnection:
    """A wrapper of a client's connection, which a handler gets in place of the connection.

    The wrapper has only the part of ``ServerConnection`` that handlers use. If a handler uses another attribute, the
    handler fails and the client gets an error.
    """

    def __init__(self, connection: ServerConnection) -> None:
        self.client = connection
        self.peer = connection.peer
        self.peer_host = connection.peer_host
        self.listener = connection.listener
        self.principal = connection.principal
        self.token_id = connection.token_id
        self.identity = connection.identity
        self.client_id = connection.client_id
        self.within_host = connection.within_host

    @property
    def server_queue(self) -> tuple[int, int]:
        return self.client.server_queue

    @property
    def certificates_expire_in_s(self) -> int | None:
        return self.client.certificates_expire_in_s

    def done(self, cid: int) -> None:
        self.client.done(cid)

    def close(self) -> None:
        self.client.close()

    def pause_requests(self) -> None:
        self.client.pause_requests()

    def resume_requests(self) -> None:
        self.client.resume_requests()


class MergingConnection(ForwardingConnection):
    """A wrapper of a client's connection that passes each reply through ``change`` before it is sent.

    If ``closes`` is set, it closes the connection after a request without a reply (acks=0).
    """

    def __init__(self, connection: ServerConnection, change: Callable[[Reply], Reply]) -> None:
        super().__init__(connection)
        self._change = change
        self.closes = False

    def reply(self, message: Reply, body: Sequence[Buffer] = (), body_bytes: int = -1) -> None:
        self.client.reply(self._change(message), body, body_bytes)

    def done(self, cid: int) -> None:
        if self.closes:
            end_without_reply(self.client, cid)
        else:
            self.client.done(cid)


class HidingConnection(ForwardingConnection):
    """A wrapper of a client's connection that removes from replies what the principal may not see.

    A reply may have hundreds of thousands of entries, so the wrapper checks them in slices, and other work runs between
    two slices. Until the last slice is done, the connection handles no further request.
    """

    def __init__(self, connection: ServerConnection, request: Request, slices: Slices, allows: Allows) -> None:
        super().__init__(connection)
        self._request = request
        self._slices = slices
        self._allows = allows
        self._hiding = False

    def reply(self, message: Reply, body: Sequence[Buffer] = (), body_bytes: int = -1) -> None:
        self._hiding = True
        self._slices.run(self, self._steps(message), self._failed)

    def _steps(self, message: Reply) -> Generator[None, None, None]:
        reply = yield from shown(message, self._allows, self._slices.over)
        self._hiding = False
        self.client.reply(reply)

    def _failed(self, error: Exception) -> None:
        self._hiding = False
        answer_failure(self.client, self._request, error)

    def resume_requests(self) -> None:
        if not self._hiding:
            self.client.resume_requests()


def end_without_reply(connection: ServerConnection, cid: int) -> None:
    """End a refused request with acks=0. It has no reply, so close the connection, as Kafka does."""
    connection.done(cid)
    connection.close()


def client_of(connection: object) -> object:
    """Return the client's own connection: the innermost one if ``connection`` is a wrapper."""
    while isinstance(connection, ForwardingConnection):
        connection = connection.client
    return connection
