"""Connections within a host: a client that has reached a broker by TCP continues on a Unix socket, if it can.

Messages take less processor time there (docs/adr/0013). The socket's name is abstract: it is not a file, and it ends
with the broker. It is visible only in the broker's network namespace, so a successful connect proves that the client is
there. The name is random and part of the reply to the hello: no other process can have taken it before the broker.

A client that connects through a proxy, an address translation or a tunnel does so on purpose. The broker reports the
local address of the TCP connection, and a client that connected to another address stays with TCP. Source: unix(7).
"""

from __future__ import annotations

import contextlib
import secrets
import socket
import struct
import sys
from typing import Any

from sparklog.protocol.messages import HelloReply

#: Only Linux has abstract names.
_HAS_ABSTRACT_NAMES = sys.platform == "linux"
_CREDENTIALS = struct.Struct("3i")
_GREETING_S = 1.0


def bind() -> tuple[str, socket.socket | None]:
    """Return the name to advertise and the bound socket; an empty name and None if the system has no such sockets."""
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
    """Return the process and the effective user of the other end of a Unix socket at its connect.

    Returns (-1, -1) if the system does not report them.
    """
    option = getattr(socket, "SO_PEERCRED", None)
    if option is None:
        return -1, -1
    pid, user, _ = _CREDENTIALS.unpack(connection.getsockopt(socket.SOL_SOCKET, option, _CREDENTIALS.size))
    return pid, user


def greeting_s(connect_timeout_s: float) -> float:
    """Return the time for the broker's greeting on its Unix socket, in seconds.

    The broker has just greeted by TCP, where the client continues after this time.
    """
    return min(_GREETING_S, connect_timeout_s / 2)


def is_same(first: HelloReply, second: HelloReply) -> bool:
    """Return whether one broker process gave both greetings, which the name of its Unix socket shows.

    Its incarnation does not show it: a broker may register, or register again, between the two.
    """
    return (first.cluster_id, first.broker_id, first.unix_socket) == (
        second.cluster_id,
        second.broker_id,
        second.unix_socket,
    )


def ip_address(name: Any) -> tuple[str, int]:
    """Return the host and port of a socket's own or peer's name; ("", 0) if it is not a TCP socket."""
    return (str(name[0]), int(name[1])) if isinstance(name, tuple) and len(name) >= 2 else ("", 0)


def connect(greeted: HelloReply, peer: Any) -> socket.socket | None:
    """Connect to the Unix socket that the broker advertised to a connection to ``peer``; None if that is impossible.

    The connect succeeds at once or not at all; it never waits.
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
