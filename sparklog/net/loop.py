"""The event loop that brokers, the controller and producers run on: uvloop where installed, else asyncio's own."""

from __future__ import annotations

import asyncio
import importlib
import importlib.util
import socket
from typing import cast


def new_event_loop() -> asyncio.AbstractEventLoop:
    """uvloop is an extra: everything works without it, slower."""
    if importlib.util.find_spec("uvloop") is None:
        return asyncio.new_event_loop()
    return cast(asyncio.AbstractEventLoop, importlib.import_module("uvloop").new_event_loop())


def tune(transport: asyncio.BaseTransport) -> None:
    """Send small frames at once: a request that waits for Nagle's timer waits 40 ms."""
    sock = transport.get_extra_info("socket")
    if sock is not None and sock.family in {socket.AF_INET, socket.AF_INET6}:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
