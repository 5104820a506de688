"""Parts of kazoo that are replaced: how it waits for sockets, how long for a server's greeting, and what ends its
attempts to connect; and how a multi is packed."""

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

#: How many silent connections in a row a session lives through: each attempt gets this share of its time.
_GREETINGS_IN_A_SESSION = 4

_log = logging.getLogger(__name__)


class UnknownError(ZookeeperError):  # type: ignore[misc]
    """An answer's error code that kazoo has no name for."""


# kazoo raises where it looks such a code up, when the request is no longer among those that are told of a lost
# connection: whoever waits for it would wait for ever.
EXCEPTIONS.default_factory = lambda: UnknownError


class Handler(SequentialThreadingHandler):  # type: ignore[misc]
    """kazoo's threads with a cheaper ``select``: kazoo asks before each read and each write, four times a request, and
    its own makes and closes an epoll descriptor every time, which was most of what a request cost."""

    def select(
        self, readers: Sequence[Any], writers: Sequence[Any], _: Sequence[Any], timeout: float | None = None
    ) -> tuple[list[Any], list[Any], list[Any]]:
        """As ``select.select``, for any descriptor number. No socket is asked for both, and trouble with one counts as
        readiness: the read or write that follows says what it is."""
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

    One that does not answer a known session's greeting is given up while the session still has time for another. kazoo
    waits for as long as the session lasts: a server that had just started and had taken the connection before it could
    serve it cost the session.

    Nothing but being closed ends the attempts to connect. kazoo's thread ends with any error that it does not know,
    such as that of looking a host's name up without a file descriptor to spare, and nothing would start another.

    The answer to an authentication goes to that request. ZooKeeper answers it at once, before the requests that were
    sent earlier, and kazoo takes each such answer for that of the oldest request.
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
        """As kazoo's, but an unknown error counts as a lost connection: the next attempt follows after a pause."""
        try:
            return super()._connect_loop(retry)
        except ForceRetryError:
            raise
        except Exception as error:
            _log.warning("reconnecting to ZooKeeper after %s: %s", type(error).__name__, error)
            # Requests that were under way on this connection get no answer, and whoever waits is told so.
            self.client._session_callback(KeeperState.CONNECTING)
            raise ForceRetryError("Reconnecting") from error


#: What precedes each operation and each result: kind, whether it is the end, error. Source: ZooKeeper's MultiHeader.
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
#: Everybody may do everything.
OPEN_TO_ALL = tuple(OPEN_ACL_UNSAFE)
#: The identities that the creating session has proved may do everything, anybody else may read.
CLOSED = (*CREATOR_ALL_ACL, *READ_ACL_UNSAFE)
_STAT_BYTES = struct.calcsize("!qqqqiiiqiiq")
#: Where the version of the data is in a stat.
_VERSION_AT = struct.calcsize("!qqqq")


def acl_bytes(acl: Sequence[Any]) -> bytes:
    """Return an ACL as requests carry it. Source: ZooKeeper's jute file, vector<ACL>."""
    parts = [_INT.pack(len(acl))]
    for entry in acl:
        scheme, name = entry.id.scheme.encode(), entry.id.id.encode()
        parts += (_INT.pack(entry.perms), _INT.pack(len(scheme)), scheme, _INT.pack(len(name)), name)
    return b"".join(parts)


_OPEN_TO_ALL = acl_bytes(OPEN_TO_ALL)


class Multi:
    """As kazoo's ``Transaction``, which makes several objects of each operation, with checks that have been made here,
    and of each result: half of what a thousand small writes cost the process that sends them.

    Results in order: path of a Create, new version of a SetData, None; exceptions for all when one has failed.
    """

    #: ZooKeeper's OpCode.multi is kazoo's; kazoo looks for it to give results of its own another form
    type: ClassVar[int] = serialization.Transaction.type

    def __init__(self, operations: Sequence[Op], root: str, acl: bytes = _OPEN_TO_ALL) -> None:
        """``root`` precedes every path; ``acl`` is that of created nodes."""
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
