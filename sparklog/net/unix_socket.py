"""Connections within a host: whoever has reached a broker by TCP goes on over a Unix socket, if he can.

Messages take less of a processor's time there (docs/adr/0013). The socket's name is abstract: it is no file, it is gone
with the broker, and it is known in the broker's network namespace only, so that being able to connect to it is the
proof of being there. It is random, and told in the answer to the hello: nobody can have taken it before the broker.

Who came another way, through a proxy, an address translation or a tunnel, was meant to: the broker tells at which
address of its own it was reached, and whoever asked for another one stays with TCP.
Source: unix(7).
"""

from __future__ import annotations

import contextlib
import secrets
import socket
import struct
import sys
from typing import Any

from sparklog.protocol.messages import HelloReply

#: Abstract names are Linux's.
_HAS_ABSTRACT_NAMES = sys.platform == "linux"
_CREDENTIALS = struct.Struct("3i")
_GREETING_S = 1.0


def bind() -> tuple[str, socket.socket | None]:
    """A name to be told, and the socket that is to listen there; nothing where the system has none."""
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
    """Process and effective user of the other end of a Unix socket when it connected; (-1, -1) where the system does
    not say."""
    option = getattr(socket, "SO_PEERCRED", None)
    if option is None:
        return -1, -1
    pid, user, _ = _CREDENTIALS.unpack(connection.getsockopt(socket.SOL_SOCKET, option, _CREDENTIALS.size))
    return pid, user


def greeting_s(connect_timeout_s: float) -> float:
    """For so long the broker may take to greet whoever has come by its Unix socket. It has just done so by TCP, where
    whoever has waited for longer goes on."""
    return min(_GREETING_S, connect_timeout_s / 2)


def is_same(first: HelloReply, second: HelloReply) -> bool:
    """Whether one broker has given both greetings, in one life, which the name of its Unix socket stands for. Its
    incarnation does not: a broker may be registered, or registered again, between the two."""
    return (first.cluster_id, first.broker_id, first.unix_socket) == (
        second.cluster_id,
        second.broker_id,
        second.unix_socket,
    )


def ip_address(name: Any) -> tuple[str, int]:
    """Of what a socket has as its own name or its peer's; ("", 0) where it is not of TCP."""
    return (str(name[0]), int(name[1])) if isinstance(name, tuple) and len(name) >= 2 else ("", 0)


def connect(greeted: HelloReply, peer: Any) -> socket.socket | None:
    """To the broker that has said so, by a connection to ``peer``, as that one's socket names it. None: there is no
    such way, now or at all. A connection is made at once or not at all; nothing is waited for."""
    if not greeted.unix_socket or not _HAS_ABSTRACT_NAMES or ip_address(peer) != greeted.reached_at:
        return None
    connection = socket.socket(socket.AF_UNIX)
    connection.setblocking(False)
    with contextlib.suppress(OSError):
        connection.connect(f"\0{greeted.unix_socket}")
        return connection
    connection.close()
    return None
