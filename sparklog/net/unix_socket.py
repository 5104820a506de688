"""Unix sockets for connections within a host: a client that has connected by TCP continues on a Unix socket if it can.

Messages on a Unix socket take less processor time (docs/adr/0013). The socket has an abstract name: there is no file,
and the name disappears with the broker. Only processes in the broker's network namespace can connect, so a successful
connect proves that the client is on the same host. The name is random and part of the reply to the hello, so no other
process can have used the name before.

On a listener with TLS or logins, the name comes with a token after the login (``unix_tokens``).

A client may connect through a proxy, an address translation or a tunnel on purpose, and must then stay with TCP. So the
broker reports the local address of the TCP connection, and a client that connected to another address does not use the
Unix socket. Source: unix(7).
"""

from __future__ import annotations

import contextlib
import secrets
import socket
import struct
import sys
from typing import Any

from sparklog.protocol.messages import HelloReply, UnixSocketReply

#: Whether Unix sockets can have abstract names. Only Linux supports such names.
_HAS_ABSTRACT_NAMES = sys.platform == "linux"
_CREDENTIALS = struct.Struct("3i")
_GREETING_S = 1.0


def bind() -> tuple[str, socket.socket | None]:
    """Bind a Unix socket with a new abstract name. Return the name and the socket.

    Return an empty name and None if the system does not support abstract names.
    """
    if not _HAS_ABSTRACT_NAMES:
        return "", None
    name = f"sparklog-{secrets.token_hex(16)}"
    listener = socket.socket(socket.AF_UNIX)
    try:
        listener.bind(f"\0{name}")
        listener.setblocking(False)
    except BaseException:
        listener.close()
        raise
    return name, listener


def peer_process(connection: Any) -> tuple[int, int]:
    """Return the process id and the effective user id that the other end of a Unix socket had when it connected.

    Returns (-1, -1) if the system does not report them.
    """
    option = getattr(socket, "SO_PEERCRED", None)
    if option is None:
        return -1, -1
    pid, user, _ = _CREDENTIALS.unpack(connection.getsockopt(socket.SOL_SOCKET, option, _CREDENTIALS.size))
    return pid, user


def greeting_s(connect_timeout_s: float) -> float:
    """Return the maximum time in seconds to wait for the broker's reply to the hello on its Unix socket.

    The time is short, because the client can continue on the TCP connection if there is no reply.
    """
    return min(_GREETING_S, connect_timeout_s / 2)


def is_same(first: HelloReply, second: HelloReply) -> bool:
    """Return whether both replies came from the same broker process.

    The random name of its Unix socket identifies the process. The incarnations may differ, because the broker may
    register again between the two replies.
    """
    return (first.cluster_id, first.broker_id, first.unix_socket) == (
        second.cluster_id,
        second.broker_id,
        second.unix_socket,
    )


def ip_address(name: Any) -> tuple[str, int]:
    """Return the host and port of a socket address, or ("", 0) if it is not a TCP address."""
    return (str(name[0]), int(name[1])) if isinstance(name, tuple) and len(name) >= 2 else ("", 0)


def is_within_host(own: Any, peer: Any) -> bool:
    """Return whether a TCP connection with these socket addresses may connect two processes on the same host.

    Such a connection has the same IP address at both ends, unless the client has bound its socket to another address.
    """
    return _HAS_ABSTRACT_NAMES and bool(ip_address(own)[0]) and ip_address(own)[0] == ip_address(peer)[0]


def connect(greeted: HelloReply | UnixSocketReply, peer: Any) -> socket.socket | None:
    """Connect to the Unix socket that the broker's reply names. Return the socket, or None if that is impossible.

    ``peer`` is the address to which the client has connected by TCP. This function never waits.
    """
    if not greeted.unix_socket or not _HAS_ABSTRACT_NAMES or ip_address(peer) != greeted.reached_at:
        return None
    connection = socket.socket(socket.AF_UNIX)
    connection.setblocking(False)
    with contextlib.suppress(OSError):
        connection.connect(f"\0{greeted.unix_socket}")
        return connection
    connection.close()
    return None
