"""The parts of a server's connection that depend on the wire protocol of its listener.

``ServerConnection`` has everything that does not depend on the bytes: the limits, the back-pressure, TLS and logins.
The rest depends on the protocol: ``ConnectionEnd`` decodes bytes into requests, and ``Handler`` handles the requests.
sparklog's own protocol is in ``native_protocol``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from sparklog.protocol.connection import ImmediateAnswer, ImmediateReply
from sparklog.protocol.frames import Buffer
from sparklog.protocol.login import ServerLogin
from sparklog.protocol.proof import Identity
from sparklog.protocol.received import ReceivedRequest


class Handler(Protocol):
    """The part of the broker that handles the requests of one connection."""

    def request_received(self, request: Any, body: memoryview) -> None:
        """Handle a request.

        The handler must end every request with one call of the connection's ``reply``, ``send`` or ``done``, at once or
        later.
        """

    def connection_lost(self) -> None:
        """Handle the end of the connection. The connection discards later replies."""


class ConnectionEnd(Protocol):
    """The server's side of one connection without I/O: it decodes bytes into requests, and performs the logins.

    ``protocol.connection.ServerEnd`` is the end of sparklog's own protocol, ``KafkaServerEnd`` that of Kafka's.
    """

    #: The state of the logins on a listener that requires them, otherwise None.
    login: ServerLogin | None
    #: The identity that the peer has proved, which is a broker or the controller. None for a client.
    identity: Identity | None
    #: The session of the peer's TCP connection, which this connection must continue, because a token has proved it.
    session: object
    #: Whether requests are served: the greeting and, if the listener requires one, the login are complete.
    admitted: bool
    client_id: str

    @property
    def may_prove(self) -> bool:
        """Return whether the peer has offered to prove its identity and has not sent the proof yet."""

    @property
    def claimed_session(self) -> object:
        """Return the login session that this connection on the Unix socket continues, or None.

        The session began on the peer's TCP connection, for which the peer got a token. The peer has named that token,
        but may not have proved yet that it knows the token.
        """

    @property
    def is_body_in_progress(self) -> bool:
        """Return whether a large request with a body is being received."""

    @property
    def receiving(self) -> tuple[int, int]:
        """Return the size and the received bytes of the large request in progress; (0, 0) if there is none."""

    def get_buffer(self) -> memoryview:
        """Return the buffer into which to receive the next bytes."""

    def decode_single(self, count: int) -> ReceivedRequest | ImmediateAnswer | None:
        """Decode the ``count`` received bytes if they are exactly one frame. This is a fast path for that case.

        Return the request, or an ``ImmediateAnswer`` if this ``ConnectionEnd`` itself responds to the request. Return
        None for other bytes. Then the caller must call ``buffer_updated``.
        """

    def buffer_updated(self, count: int) -> Sequence[ReceivedRequest | ImmediateAnswer]:
        """Return the requests that are complete now that ``count`` more bytes have arrived, in order.

        Return an ``ImmediateAnswer`` for each request to which this ``ConnectionEnd`` responds itself. An answer with
        ``close`` is the last item.
        """

    def session_expired(self) -> None:
        """Record that the login session has expired.

        This side of the connection then accepts no requests until the peer logs in again.
        """

    def encode_answer(self, reply: ImmediateReply) -> list[Buffer]:
        """Return the bytes of a reply that this ``ConnectionEnd`` made itself, or of an error that ends the connection.

        Return an empty list if the protocol has no bytes for the error.
        """
