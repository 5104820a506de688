"""Replacements for parts of kazoo: waiting for sockets, TLS, the connection timeout, reconnection, and multis."""

from __future__ import annotations

import logging
import select
import socket
import ssl
import struct
from collections.abc import Callable, Iterable, Sequence
from typing import Any, ClassVar, NamedTuple

from kazoo.exceptions import EXCEPTIONS, ZookeeperError
from kazoo.handlers.threading import SequentialThreadingHandler
from kazoo.protocol import serialization
from kazoo.protocol.connection import AUTH_XID, ConnectionHandler
from kazoo.protocol.states import KeeperState
from kazoo.retry import ForceRetryError, KazooRetry
from kazoo.security import ACL, CREATOR_ALL_ACL, OPEN_ACL_UNSAFE, READ_ACL_UNSAFE, Id

from sparklog.errors import ConfigError
from sparklog.zk import paths
from sparklog.zk.ops import Check, Create, Op, SetData

#: The number of connection attempts without a response that fit into a session timeout. The time limit of an attempt is
#: the session timeout divided by this number.
_GREETINGS_IN_A_SESSION = 4

_log = logging.getLogger(__name__)


class UnknownError(ZookeeperError):  # type: ignore[misc]
    """The error for a response of ZooKeeper with an error code that kazoo does not know."""


# Without this, kazoo raises at the lookup of such a code. It has then already removed the request from its list of
# pending requests, so the request never fails and the caller waits forever.
EXCEPTIONS.default_factory = lambda: UnknownError


class KazooHandler(SequentialThreadingHandler):  # type: ignore[misc]
    """kazoo's handler for threads, with a faster ``select`` and another implementation of TLS.

    kazoo calls ``select`` before each read and write, four times per request. kazoo's own ``select`` creates and closes
    an epoll descriptor each time, which took most of the time of a request.

    ``tls`` returns a context for each new connection, or is None for connections without TLS. kazoo's own TLS also
    trusts the certificate authorities of the system. kazoo's TLS also waits too long: if one TLS record contains two
    responses, kazoo reads the first one and then waits for more bytes from the network.
    """

    def __init__(self, tls: Callable[[], ssl.SSLContext] | None = None) -> None:
        super().__init__()
        self._tls = tls
        #: The name of the host to which the next connection is made. Release 2.10 of kazoo passes only the host's
        #: address.
        self.host = ""
        #: The reason why the last connection with TLS failed; empty if the connection did not fail.
        self.tls_failure = ""

    def create_connection(self, address: tuple[str, int], *, timeout: float | None = None, **_: Any) -> socket.socket:
        """Connect to a ZooKeeper server, with TLS if it is configured.

        Raises OSError, or ConfigError if a file for TLS cannot be used.
        """
        if self._tls is None:
            found: socket.socket = super().create_connection(address, timeout=timeout)
            return found
        context = self._tls()
        plain: socket.socket = super().create_connection(address, timeout=timeout)
        try:
            return context.wrap_socket(plain, server_hostname=self.host or address[0])
        except BaseException:
            plain.close()
            raise

    def select(
        self, readers: Sequence[Any], writers: Sequence[Any], _: Sequence[Any], timeout: float | None = None
    ) -> tuple[list[Any], list[Any], list[Any]]:
        """Wait until a socket is ready. Unlike ``select.select``, accept file descriptors with any number.

        No socket may be in both lists. A socket with an error counts as ready: the next read or write raises the error.
        """
        # Bytes that TLS has already decrypted do not make the descriptor readable.
        if self._tls is not None and (
            ready_now := [one for one in readers if isinstance(one, ssl.SSLSocket) and one.pending()]
        ):
            return ready_now, [], []
        poll = select.poll()
        for waiting in readers:
            poll.register(waiting, select.POLLIN)
        for waiting in writers:
            poll.register(waiting, select.POLLOUT)
        ready = {number for number, _events in poll.poll(None if timeout is None else timeout * 1000)}
        return (
            [waiting for waiting in readers if waiting.fileno() in ready],
            [waiting for waiting in writers if waiting.fileno() in ready],
            [],
        )


class Connections(ConnectionHandler):  # type: ignore[misc]
    """kazoo's connection handler, with four differences.

    If a server does not respond when an existing session connects, the connection is closed early enough for the
    session to try another server. kazoo waits for the whole session timeout, so the session expired if a server that
    was still starting accepted the connection.

    The attempts to connect end only when the client is closed. kazoo's thread ends at any unknown error, such as a name
    lookup that fails because no file descriptor is free, and is not started again.

    The response to an authentication request is matched to that request. ZooKeeper sends it before the responses to
    earlier requests, and kazoo would match it to the oldest request.

    The handler learns the name of the server's host, and why a connection with TLS failed.
    """

    def _connect(self, host: str, hostip: str, port: int) -> Any:
        handler = self.handler
        handler.host = host
        try:
            found = super()._connect(host, hostip, port)
        except Exception as error:
            cause = error if isinstance(error, ConfigError) else error.__context__
            if isinstance(cause, (ssl.SSLError, ConfigError)):
                handler.tls_failure = str(cause)
            raise
        handler.tls_failure = ""
        return found

    def _read_header(self, timeout: float) -> Any:
        header, buffer, offset = super()._read_header(timeout)
        if header.xid == AUTH_XID:
            pending = self.client._pending
            asked = next((entry for entry in pending if entry[2] == AUTH_XID), None)
            if asked is not None:
                pending.remove(asked)
                pending.appendleft(asked)
        return header, buffer, offset

    def _invoke(self, timeout: float, request: Any, xid: Any = None) -> Any:
        if self.client._session_id:
            timeout = min(timeout, self.client._session_timeout / 1000 / _GREETINGS_IN_A_SESSION)
        return super()._invoke(timeout, request, xid)

    def _connect_loop(self, retry: KazooRetry) -> Any:
        """Connect as kazoo does. After an unknown error, also wait and try again, as after a lost connection."""
        try:
            return super()._connect_loop(retry)
        except ForceRetryError:
            raise
        except Exception as error:
            _log.warning("reconnecting to ZooKeeper after %s: %s", type(error).__name__, error)
            # Fail the requests in flight on this connection, because they get no response.
            self.client._session_callback(KeeperState.CONNECTING)
            raise ForceRetryError("Reconnecting") from error


#: The header of each operation and each result: kind, end flag, error. Source: ZooKeeper's MultiHeader.
_HEADER = struct.Struct("!iBi")
_INT = struct.Struct("!i")
_CREATE, _DELETE, _SET, _CHECK = (
    kind.type
    for kind in (
        serialization.Create,
        serialization.Delete,
        serialization.SetData,
        serialization.CheckVersion,
    )
)
_ERROR = -1
_END = _HEADER.pack(-1, True, -1)
_BEGIN = {kind: _HEADER.pack(kind, False, -1) for kind in (_CREATE, _DELETE, _SET, _CHECK)}
#: The ACL under which any session may do everything.
OPEN_TO_ALL = tuple(OPEN_ACL_UNSAFE)
#: The ACL under which sessions with the creator's credentials may do everything, and any other session may read.
CLOSED = (*CREATOR_ALL_ACL, *READ_ACL_UNSAFE)
#: The ACL under which sessions with the creator's credentials may do everything, and any other session nothing.
SECRET = tuple(CREATOR_ALL_ACL)
_STAT_BYTES = struct.calcsize("!qqqqiiiqiiq")
#: The position of the data version in ZooKeeper's Stat structure.
_VERSION_AT = struct.calcsize("!qqqq")


class AclEntry(NamedTuple):
    """One entry of a node's ACL: an identity (scheme and name), and what sessions with this identity may do."""

    permissions: int
    scheme: str
    name: str

    @property
    def is_for_all(self) -> bool:
        """Return whether the entry is for every session."""
        return self.scheme == "world"


def acl_entries(acl: Sequence[Any]) -> frozenset[AclEntry]:
    """Convert an ACL from kazoo's form to entries."""
    return frozenset(AclEntry(entry.perms, entry.id.scheme, entry.id.id) for entry in acl)


def kazoo_acl(entries: Iterable[AclEntry]) -> list[ACL]:
    """Convert entries to an ACL in kazoo's form."""
    return [ACL(entry.permissions, Id(entry.scheme, entry.name)) for entry in sorted(entries)]


#: What any session may do with a closed node.
READ_BY_ALL = acl_entries(READ_ACL_UNSAFE)
#: The ACL of an open node.
OPEN_ENTRIES = acl_entries(OPEN_TO_ALL)


def acl_bytes(acl: Sequence[Any]) -> bytes:
    """Encode an ACL, given in kazoo's form, for a request to ZooKeeper. Source: ZooKeeper's jute file, vector<ACL>."""
    parts = [_INT.pack(len(acl))]
    for entry in acl:
        scheme, name = entry.id.scheme.encode(), entry.id.id.encode()
        parts += (_INT.pack(entry.perms), _INT.pack(len(scheme)), scheme, _INT.pack(len(name)), name)
    return b"".join(parts)


_OPEN_TO_ALL = acl_bytes(OPEN_TO_ALL)


class Multi:
    """A multi request (ZooKeeper transaction), encoded and decoded without kazoo's ``Transaction``.

    kazoo's ``Transaction`` creates several objects for each operation and each result and repeats checks, which took
    half of the processor time of a thousand small writes.

    The results are in the order of the operations: the path of a Create, the new version of a SetData, None for others.
    If one operation fails, all results are exceptions.
    """

    #: The request type: ZooKeeper's OpCode.multi.
    type: ClassVar[int] = serialization.Transaction.type

    def __init__(
        self, operations: Sequence[Op], root: str, acl: bytes = _OPEN_TO_ALL, secret_acl: bytes | None = None
    ) -> None:
        """Create a multi of these operations. ``root`` is put before every path.

        Created nodes get ``acl``, and secret ones ``secret_acl``, by default the same.
        """
        self._acl = acl
        self._secret_acl = secret_acl if secret_acl is not None else acl
        self._operations = operations
        self._root = root.encode()

    def serialize(self) -> bytes:
        parts: list[bytes] = []
        root = self._root
        for op in self._operations:
            path = root + op.path.encode()
            place = (_INT.pack(len(path)), path)
            if isinstance(op, SetData):
                parts += (_BEGIN[_SET], *place, _INT.pack(len(op.data)), op.data, _INT.pack(op.version))
            elif isinstance(op, Check):
                parts += (_BEGIN[_CHECK], *place, _INT.pack(op.version))
            elif isinstance(op, Create):
                flags = _INT.pack(int(op.ephemeral))
                acl = self._secret_acl if paths.is_secret(op.path) else self._acl
                parts += (_BEGIN[_CREATE], *place, _INT.pack(len(op.data)), op.data, acl, flags)
            else:
                parts += (_BEGIN[_DELETE], *place, _INT.pack(op.version))
        parts.append(_END)
        return b"".join(parts)

    @staticmethod
    def deserialize(reply: bytes, offset: int) -> list[Any]:
        results: list[Any] = []
        while True:
            kind, end, _ = _HEADER.unpack_from(reply, offset)
            offset += _HEADER.size
            if end:
                return results
            if kind == _SET:
                results.append(_INT.unpack_from(reply, offset + _VERSION_AT)[0])
                offset += _STAT_BYTES
            elif kind == _CREATE:
                length = _INT.unpack_from(reply, offset)[0]
                offset += _INT.size
                results.append(reply[offset : offset + length].decode())
                offset += length
            elif kind == _ERROR:
                results.append(EXCEPTIONS[_INT.unpack_from(reply, offset)[0]]())
                offset += _INT.size
            else:
                results.append(None)
