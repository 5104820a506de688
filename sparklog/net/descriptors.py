"""The transfer of open files between two processes of the same host and user, through a Unix socket.

A request and a reply are one packet each. Packets keep their boundaries (SOCK_SEQPACKET), so no framing is needed. The
reply's packet carries the file descriptors (SCM_RIGHTS). The server never waits: it closes the connection of a peer
that does not read its reply. Source: unix(7).
"""

from __future__ import annotations

import array
import asyncio
import contextlib
import functools
import logging
import os
import socket
from collections.abc import Callable
from pathlib import Path
from types import TracebackType

from sparklog.errors import BrokerError, ErrorCode
from sparklog.net.unix_socket import peer_process

_log = logging.getLogger(__name__)

#: The longest path of a Unix socket in bytes, without the terminating zero byte. Source: unix(7), sun_path.
_MAX_PATH_BYTES = 107
#: The maximum number of bytes in a packet. The kernel's buffer for a packet is a little over 200 kB.
MAX_PACKET_BYTES = 96 * 1024
_MAX_DESCRIPTORS = 8
_MAX_CONNECTIONS = 256

#: A function that returns the reply to a request and its file descriptors. The server sends the descriptors and then
#: closes them.
Responder = Callable[[bytes], "tuple[bytes, list[int]]"]


class DescriptorServer:
    """A server that replies to requests with file descriptors.

    ``answer`` returns the reply and the descriptors for a request, and must not raise an error.

    Not thread-safe: use it only on the event loop that calls ``open``, on which ``answer`` is also called.
    """

    def __init__(self, path: Path, answer: Responder) -> None:
        self._path = path
        self._answer = answer
        self._listener: socket.socket | None = None
        self._connections: set[socket.socket] = set()

    def open(self) -> None:
        """Listen on the Unix socket.

        Raises OSError if the system does not support SOCK_SEQPACKET for Unix sockets, or if the path is too long.
        """
        if len(os.fsencode(self._path)) > _MAX_PATH_BYTES:
            raise OSError(f"{self._path}: at most {_MAX_PATH_BYTES} bytes fit a socket's address")
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            listener.setblocking(False)
            # The process that bound this path earlier held the lock of the log directory, and is dead.
            with contextlib.suppress(FileNotFoundError):
                self._path.unlink()
            listener.bind(str(self._path))
            self._path.chmod(0o700)
            listener.listen(64)
        except BaseException:
            listener.close()
            raise
        self._listener = listener
        asyncio.get_running_loop().add_reader(listener, self._accept)

    def close(self) -> None:
        for connection in list(self._connections):
            self._drop(connection)
        if self._listener is not None:
            asyncio.get_running_loop().remove_reader(self._listener)
            self._listener.close()
            self._listener = None
            with contextlib.suppress(OSError):
                self._path.unlink()

    def _accept(self) -> None:
        assert self._listener is not None
        try:
            connection, _ = self._listener.accept()
        except OSError:
            return
        if len(self._connections) >= _MAX_CONNECTIONS or peer_process(connection)[1] != os.geteuid():
            connection.close()
            return
        connection.setblocking(False)
        self._connections.add(connection)
        asyncio.get_running_loop().add_reader(connection, self._read, connection)

    def _read(self, connection: socket.socket) -> None:
        try:
            packet = connection.recv(MAX_PACKET_BYTES)
            if not packet:
                self._drop(connection)
                return
            payload, descriptors = self._answer(packet)
            try:
                socket.send_fds(connection, [payload], descriptors)
            finally:
                for descriptor in descriptors:
                    os.close(descriptor)
        except OSError as error:
            if not isinstance(error, BlockingIOError):
                _log.info("closed the connection of a local reader: %s", error)
            self._drop(connection)

    def _drop(self, connection: socket.socket) -> None:
        if connection in self._connections:
            self._connections.discard(connection)
            asyncio.get_running_loop().remove_reader(connection)
            connection.close()


class DescriptorClient:
    """A client's connection to a ``DescriptorServer``. Not thread-safe: use it in one thread."""

    def __init__(self, path: str, *, timeout_s: float) -> None:
        """Connect to ``path``. Raises OSError if no process listens there, or if this process may not connect."""
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            self._socket.settimeout(timeout_s)
            self._socket.connect(path)
        except BaseException:
            self._socket.close()
            raise

    def request(self, payload: bytes) -> tuple[bytes, list[int]]:
        """Send a request. Return the reply and its file descriptors, which the caller must close.

        Raises:
          BrokerError: NETWORK_EXCEPTION if the connection ended, or the reply was truncated.
          OSError: the request failed in another way, or took longer than ``timeout_s``.
        """
        self._socket.sendall(payload)
        found, ancillary, flags, _ = self._socket.recvmsg(MAX_PACKET_BYTES, socket.CMSG_SPACE(_MAX_DESCRIPTORS * 4))
        descriptors = array.array("i")
        for level, kind, content in ancillary:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                descriptors.frombytes(content[: len(content) - len(content) % descriptors.itemsize])
        if not found or flags & (socket.MSG_TRUNC | socket.MSG_CTRUNC):
            for descriptor in descriptors:
                os.close(descriptor)
            raise BrokerError(ErrorCode.NETWORK_EXCEPTION, "the connection for local reads ended")
        return found, list(descriptors)

    def close(self) -> None:
        self._socket.close()

    def __enter__(self) -> DescriptorClient:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


@functools.cache
def boot_id() -> str:
    """Return the id of this host's current boot, or the empty string if the system does not provide it."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


@functools.lru_cache(maxsize=1024)
def is_this_host(name: str) -> bool:
    """Return whether a host name or address belongs to this host, which means that a socket can be bound to it."""
    try:
        found = socket.getaddrinfo(name, 0, type=socket.SOCK_DGRAM)
    except OSError:
        return False
    for family, kind, protocol, _, address in found:
        try:
            with socket.socket(family, kind, protocol) as probe:
                probe.bind(address)
        except OSError:
            continue
        return True
    return False
