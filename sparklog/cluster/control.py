"""The supervisor's end of a broker's control socket: one JSON line out, one JSON line back.

The connection that has said hello is the supervisor's lease on the broker; it is kept open for as long as the lease is
meant to hold. See ``broker.control_socket`` for the other end.
"""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path
from typing import Any

import msgspec

from sparklog.cluster.process import ProcessIdentity, peer_of
from sparklog.errors import ClusterError

_LINE_BYTES = 1024 * 1024


class BrokerStatus(msgspec.Struct, frozen=True):
    """A broker's answer. Fields it does not send keep their defaults: brokers of other versions are adopted too."""

    ok: bool
    broker_id: int = -1
    incarnation: int = -1
    pid: int = -1
    port: int = -1
    state: str = ""
    #: Led partitions whose in-sync followers have not yet all of the leader's log.
    lagging: int = 0
    leading: int = 0
    superseded_by: tuple[int, int] | None = None
    error: str = ""


class Superseded(ClusterError):
    """The broker obeys a newer generation of supervisors."""


class ControlConnection:
    """Owner: one task of a supervisor's loop; calls do not overlap. ``peer`` is told by the kernel."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, peer: ProcessIdentity) -> None:
        self._reader = reader
        self._writer = writer
        self.peer = peer
        self._busy = asyncio.Lock()

    @classmethod
    async def open(cls, path: Path, *, timeout_s: float = 2.0) -> ControlConnection | None:
        """None when nobody listens there."""
        try:
            reader, writer = await asyncio.wait_for(asyncio.open_unix_connection(path, limit=_LINE_BYTES), timeout_s)
        except (FileNotFoundError, ConnectionRefusedError, asyncio.TimeoutError):
            return None
        peer = peer_of(writer.get_extra_info("socket"))
        if peer is None:  # it died between listening and now
            writer.close()
            return None
        return cls(reader, writer, peer)

    async def call(self, op: str, *, timeout_s: float, **fields: Any) -> BrokerStatus:
        """Send one command, return the broker's status after it.

        Raises:
            asyncio.TimeoutError: no answer in time; the connection is of no further use.
            ConnectionError: the broker closed it.
            Superseded: a newer generation holds the broker.
            ClusterError: the broker refused.
        """
        async with self._busy:
            self._writer.write(msgspec.json.encode({"op": op, **fields}) + b"\n")
            line = await asyncio.wait_for(self._reader.readline(), timeout_s)
        if not line:
            raise ConnectionResetError(f"broker process {self.peer.pid} closed its control connection")
        answer = msgspec.json.decode(line, type=BrokerStatus)
        if answer.superseded_by is not None:
            raise Superseded("driver epoch {}, generation {}".format(*answer.superseded_by))
        if not answer.ok:
            raise ClusterError(f"broker process {self.peer.pid} refused {op!r}: {answer.error}")
        return answer

    async def close(self) -> None:
        self._writer.close()
        with contextlib.suppress(OSError):
            await self._writer.wait_closed()
