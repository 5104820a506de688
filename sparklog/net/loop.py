"""The event loop of brokers, the controller and producers: uvloop's if it is installed, otherwise asyncio's."""

from __future__ import annotations

import asyncio
import importlib
import importlib.util
import socket
import threading
from typing import Any, cast


class _PlainLoop(asyncio.SelectorEventLoop):
    """asyncio's event loop, which can also resolve host names after the main thread has ended."""

    async def getaddrinfo(self, *arguments: Any, **options: Any) -> list[Any]:
        """Resolve a host name in a thread of asyncio's pool, or in this thread if the pool no longer accepts work."""
        if threading.main_thread().is_alive():
            return await super().getaddrinfo(*arguments, **options)
        return socket.getaddrinfo(*arguments, **options)


def new_event_loop() -> asyncio.AbstractEventLoop:
    """Return an event loop of uvloop if uvloop is installed, otherwise one of asyncio.

    After the main thread has ended, the loop is always one of asyncio, because Python then cannot import uvloop's
    dependencies.
    """
    if importlib.util.find_spec("uvloop") is None or not threading.main_thread().is_alive():
        return _PlainLoop()
    return cast(asyncio.AbstractEventLoop, importlib.import_module("uvloop").new_event_loop())


def tune(transport: asyncio.BaseTransport) -> None:
    """Turn off Nagle's algorithm for a TCP connection, because it may delay a small frame by 40 ms."""
    sock = transport.get_extra_info("socket")
    if sock is not None and sock.family in {socket.AF_INET, socket.AF_INET6}:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
