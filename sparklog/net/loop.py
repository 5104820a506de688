"""The event loop that brokers, the controller and producers run on: uvloop where installed, else asyncio's own."""

from __future__ import annotations

import asyncio
import importlib
import importlib.util
import socket
import threading
from typing import Any, cast


class _PlainLoop(asyncio.SelectorEventLoop):
    """asyncio's own loop, which also finds hosts once the main thread has ended."""

    async def getaddrinfo(self, *arguments: Any, **options: Any) -> list[Any]:
        """Look a host up in a thread of asyncio's pool, or in this thread when the pool takes no more work."""
        if threading.main_thread().is_alive():
            return await super().getaddrinfo(*arguments, **options)
        return socket.getaddrinfo(*arguments, **options)


def new_event_loop() -> asyncio.AbstractEventLoop:
    """Return uvloop's loop where uvloop is installed, else asyncio's.

    A program's last thread may begin when the main thread has ended. Python then refuses to import what uvloop needs,
    and asyncio's loop takes its place.
    """
    if importlib.util.find_spec("uvloop") is None or not threading.main_thread().is_alive():
        return _PlainLoop()
    return cast(asyncio.AbstractEventLoop, importlib.import_module("uvloop").new_event_loop())


def tune(transport: asyncio.BaseTransport) -> None:
    """Send small frames at once: a request that waits for Nagle's timer waits 40 ms."""
    sock = transport.get_extra_info("socket")
    if sock is not None and sock.family in {socket.AF_INET, socket.AF_INET6}:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
