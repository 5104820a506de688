"""Supervisor's end of a broker's control socket: one JSON line per request, one per response.

A connection that has sent hello is the supervisor's lease on the broker, which lasts while the connection is open. The
broker's control socket is the other end.
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
    """Response of a broker. Missing fields have defaults, because brokers of other versions are adopted too."""

    ok: bool
    broker_id: int = -1
    incarnation: int = -1
    pid: int = -1
    port: int = -1
    state: str = ""
    #: Led partitions whose in-sync followers have not caught up yet.
    lagging: int = 0
    leading: int = 0
    superseded_by: tuple[int, int] | None = None
    error: str = ""


class Superseded(ClusterError):
    """Refusal of a broker that has a newer generation of supervisors."""


class ControlConnection:
    """Connection to a broker. Owner: one task of a supervisor's loop; calls do not overlap. The kernel reports
    ``peer``."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, peer: ProcessIdentity) -> None:
        self._reader = reader
        self._writer = writer
        self.peer = peer
        self._busy = asyncio.Lock()

    @classmethod
    async def open(cls, path: Path, *, timeout_s: float = 2.0) -> ControlConnection | None:
        """Connect. Return None if no process listens at ``path``."""
        try:
            reader, writer = await asyncio.wait_for(asyncio.open_unix_connection(path, limit=_LINE_BYTES), timeout_s)
        except (FileNotFoundError, ConnectionRefusedError, asyncio.TimeoutError):
            return None
        peer = peer_of(writer.get_extra_info("socket"))
        if peer is None:  # the process died after it began to listen
            writer.close()
            return None
        return cls(reader, writer, peer)

    async def call(self, op: str, *, timeout_s: float, **fields: Any) -> BrokerStatus:
        """Send one command, and return the broker's status after it.

        Raises:
            asyncio.TimeoutError: no response in time; the connection can no longer be used.
            ConnectionError: the broker closed the connection.
            Superseded: a newer generation supervises the broker.
            ClusterError: the broker refused the command.
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
