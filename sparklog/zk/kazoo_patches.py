"""Replaced parts of kazoo: waits for sockets, the timeout of a server's greeting, reconnection, and multis."""

from __future__ import annotations

import logging
import select
import struct
from collections.abc import Sequence
from typing import Any, ClassVar

from kazoo.exceptions import EXCEPTIONS, ZookeeperError
from kazoo.handlers.threading import SequentialThreadingHandler
from kazoo.protocol import serialization
from kazoo.protocol.connection import AUTH_XID, ConnectionHandler
from kazoo.protocol.states import KeeperState
from kazoo.retry import ForceRetryError, KazooRetry
from kazoo.security import CREATOR_ALL_ACL, OPEN_ACL_UNSAFE, READ_ACL_UNSAFE

from sparklog.zk.ops import Check, Create, Op, SetData

#: The number of consecutive silent connections that a session survives: each attempt gets this share of its time.
_GREETINGS_IN_A_SESSION = 4

_log = logging.getLogger(__name__)


class UnknownError(ZookeeperError):  # type: ignore[misc]
    """An error code of a response that kazoo has no name for."""


# kazoo would raise at its lookup of such a code, after it has removed the request from those that a lost connection
# fails: the caller would wait forever.
EXCEPTIONS.default_factory = lambda: UnknownError


class KazooHandler(SequentialThreadingHandler):  # type: ignore[misc]
    """kazoo's threads with a cheaper ``select``.

    kazoo calls it before each read and each write, four times per request. Its own version creates and closes an epoll
    descriptor each time, which was most of the cost of a request.
    """

    def select(
        self, readers: Sequence[Any], writers: Sequence[Any], _: Sequence[Any], timeout: float | None = None
    ) -> tuple[list[Any], list[Any], list[Any]]:
        """Wait like ``select.select``, for any descriptor number.

        No socket is in both lists. An error of a socket counts as readiness: the next read or write reports it.
        """
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
    """kazoo's connections, with three differences.

    A connection without a response to a known session's greeting is closed while the session still has time for
    another. kazoo waits for the whole session timeout: a server that had just started and had accepted the connection
    before it could serve it cost the session.

    Only a close ends the attempts to connect. kazoo's thread ends with any unknown error, such as a failed name lookup
    without a free file descriptor, and nothing would start another thread.

    The response to an authentication is matched to that request. ZooKeeper sends this response at once, before those to
    earlier requests, and kazoo matches it to the oldest request.
    """

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
        """Connect as kazoo does, but treat an unknown error as a lost connection: the next attempt follows a pause."""
        try:
            return super()._connect_loop(retry)
        except ForceRetryError:
            raise
        except Exception as error:
            _log.warning("reconnecting to ZooKeeper after %s: %s", type(error).__name__, error)
            # Requests in flight on this connection get no response; this fails them for their callers.
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
#: Every session may do everything.
OPEN_TO_ALL = tuple(OPEN_ACL_UNSAFE)
#: The identities that the creating session has proved may do everything; any other session may read.
CLOSED = (*CREATOR_ALL_ACL, *READ_ACL_UNSAFE)
_STAT_BYTES = struct.calcsize("!qqqqiiiqiiq")
#: The position of the data's version in a stat.
_VERSION_AT = struct.calcsize("!qqqq")


def acl_bytes(acl: Sequence[Any]) -> bytes:
    """Return an ACL in the form of requests. Source: ZooKeeper's jute file, vector<ACL>."""
    parts = [_INT.pack(len(acl))]
    for entry in acl:
        scheme, name = entry.id.scheme.encode(), entry.id.id.encode()
        parts += (_INT.pack(entry.perms), _INT.pack(len(scheme)), scheme, _INT.pack(len(name)), name)
    return b"".join(parts)


_OPEN_TO_ALL = acl_bytes(OPEN_TO_ALL)


class Multi:
    """A multi that is encoded and decoded here.

    kazoo's ``Transaction`` creates several objects for each operation, with repeated checks, and for each result: half
    of the cost of a thousand small writes in the sending process.

    The results are in order: the path of a Create, the new version of a SetData, None; exceptions for all if one has
    failed.
    """

    #: ZooKeeper's OpCode.multi, as in kazoo. For this type kazoo converts the results of multis itself.
    type: ClassVar[int] = serialization.Transaction.type

    def __init__(self, operations: Sequence[Op], root: str, acl: bytes = _OPEN_TO_ALL) -> None:
        """Keep the operations; ``root`` precedes every path, and ``acl`` is that of created nodes."""
        self._acl = acl
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
                parts += (_BEGIN[_CREATE], *place, _INT.pack(len(op.data)), op.data, self._acl, flags)
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
