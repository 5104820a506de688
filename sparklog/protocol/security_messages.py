"""Messages of a SASL login, and requests for the Unix socket and for local reads after the login.

The client sends ``SaslAuthenticate`` until a reply is complete. The messages of the mechanism are opaque here;
``protocol.sasl`` names the modules that understand them. Source: RFC 4422; Kafka's SaslAuthenticate (KIP-152, KIP-368).
"""

from __future__ import annotations

from typing import Annotated

import msgspec

from sparklog.protocol.fields import Message, Name
from sparklog.protocol.sasl import MAX_SASL_BYTES

#: The maximum number of topics of one ticket for local reads.
MAX_TICKET_TOPICS = 16
#: One message of a SASL mechanism.
SaslBytes = Annotated[bytes, msgspec.Meta(max_length=MAX_SASL_BYTES)]


class SaslAuthenticate(Message, frozen=True, tag="sasl_authenticate"):
    """One message of a client's login. After a complete login, the client may start another one (re-authentication).

    ``mechanism`` is the same in all messages of one login.
    """

    mechanism: Name
    data: SaslBytes


class SaslAuthenticateReply(Message, frozen=True, tag="sasl_authenticate_reply"):
    """The broker's next message of the login.

    If ``complete`` is true, the broker accepts the login, but the client must still verify ``data``. The client must
    log in again on this connection within ``session_lifetime_ms``; 0 means no limit.
    """

    data: SaslBytes
    complete: bool
    session_lifetime_ms: int = 0


class RequestUnixSocket(Message, frozen=True, tag="request_unix_socket"):
    """A request for a token for the broker's Unix socket.

    With the token, the client opens a connection there that continues the session of this connection.
    """


class UnixSocketReply(Message, frozen=True, tag="unix_socket_reply"):
    """The reply to RequestUnixSocket: the socket's name, and the secret of a token for one connection to the socket.

    The name is empty if the broker has no Unix socket for this listener.
    """

    unix_socket: str = ""
    #: The address at which the client has reached the broker. A client that connected to another address must not move
    #: to the Unix socket.
    reached_at: tuple[str, int] = ("", 0)
    secret: bytes = b""


class RequestLocalReads(Message, frozen=True, tag="request_local_reads"):
    """A request for a ticket with which the client gets open segment files of these topics (see ``local_reads``).

    A client on the broker's host sends it if the reply to its hello names no socket for local reads.
    """

    topics: Annotated[tuple[Name, ...], msgspec.Meta(max_length=MAX_TICKET_TOPICS)]


class LocalReadsReply(Message, frozen=True, tag="local_reads_reply"):
    """The reply to RequestLocalReads.

    Processes on the host with this ``boot_id`` can get files at ``local_socket`` with ``ticket``, for ``lifetime_ms``
    from now on. ``local_socket`` is empty if the broker has no such socket.
    """

    boot_id: str = ""
    local_socket: str = ""
    ticket: bytes = b""
    lifetime_ms: int = 0
    throttle_time_ms: int = 0
