"""Sockets for clients of kafka-python, which close if they cannot connect.

kafka-python 3.0.12 drops such a socket without closing it, so Python reports it at some later time, in any test.
"""

from __future__ import annotations

import socket
from typing import Any

from kafka.net.inet import KafkaNetSocket

#: The value of a client's option ``proxy_url`` that selects these sockets. There is no proxy.
DIRECT = "direct://"


class ClosingSocket(KafkaNetSocket):  # type: ignore[misc]
    """The connections of a client. kafka-python finds the class by its scheme."""

    SCHEMES = ("direct",)

    async def sock_connect(self, net: Any, sock: socket.socket, sockaddr: Any, timeout_at: float | None = None) -> Any:
        try:
            return await super().sock_connect(net, sock, sockaddr, timeout_at=timeout_at)
        except BaseException:
            sock.close()
            raise
