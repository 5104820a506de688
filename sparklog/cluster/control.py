"""Supervisor's end of a broker's control socket: one JSON line per request, one per response.

A connection that has sent hello is the supervisor's lease on the broker, which lasts while the connection is open. The
broker's control socket is the other end.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from pathlib import Path
from typing import Any

import msgspec

from sparklog.cluster import runtime_directory
from sparklog.cluster.generation import GenerationSpec
from sparklog.cluster.process import ProcessIdentity, peer_of
from sparklog.cluster.slots import Slot
from sparklog.errors import ClusterError

log = logging.getLogger(__name__)

_LINE_BYTES = 1024 * 1024


class BrokerStatus(msgspec.Struct, frozen=True):
    """Response of a broker to its supervisor. A supervisor also adopts running brokers of other versions, so fields
    that their responses lack get defaults."""

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


class ControlLink:
    """Supervisor's lease on one broker, over one connection at a time. Owner: ``BrokerSupervisor``, on its loop.

    The supervisor opens the first connection of a process and gives it to ``keep``. If that connection is lost, the
    link opens the next one.
    """

    def __init__(self, slot: Slot, spec: GenerationSpec) -> None:
        self._slot = slot
        self._spec = spec
        self._connection: ControlConnection | None = None
        self._reaching = asyncio.Lock()
        #: Last status of the broker while it serves.
        self.status: BrokerStatus | None = None
        #: Whether a command was refused because the broker has a newer supervisor.
        self.superseded = False

    @property
    def hung_after_s(self) -> float:
        """Return twice ZooKeeper's session time-out: by then other brokers lead its partitions, and its watchdog
        failed."""
        return 2 * self._spec.session_timeout_ms / 1000 + 2

    @property
    def peer(self) -> ProcessIdentity | None:
        """Return the process at the other end; None without a connection."""
        return self._connection.peer if self._connection is not None else None

    async def open(self) -> ControlConnection | None:
        """Open a connection without a lease. Return None if the broker does not listen."""
        return await ControlConnection.open(runtime_directory.control_socket(self._slot.path))

    async def hello(self, connection: ControlConnection) -> BrokerStatus:
        """Send hello; close the connection if that fails."""
        try:
            return await connection.call(
                "hello",
                timeout_s=self.hung_after_s,
                driver_epoch=self._spec.driver_epoch,
                generation=self._spec.generation,
                secrets=[secret.hex() for secret in self._spec.secrets],
            )
        except BaseException:
            await connection.close()
            raise

    async def keep(self, connection: ControlConnection, status: BrokerStatus) -> None:
        """Use a connection to a serving broker as the lease."""
        async with self._reaching:
            if self._connection is None:
                self._connection = connection
            else:  # a stop was faster and has its own connection
                await connection.close()
        self.status = status

    async def poll(self) -> None:
        """Ask the broker for its status.

        Raises:
            asyncio.TimeoutError: the broker hangs; the connection is closed.
            Superseded: a newer generation supervises the broker.
            ClusterError: the broker refused the command.
        """
        try:
            connection = await self._reach()
            if connection is not None:
                self.status = await connection.call("status", timeout_s=self.hung_after_s)
        except asyncio.TimeoutError:
            await self.close()
            raise
        except ConnectionError:
            await self.close()

    async def send(self, op: str) -> BrokerStatus | None:
        """Send a command and return the response; None if there is none, or if the broker refuses the command."""
        try:
            connection = await self._reach()
            return await connection.call(op, timeout_s=self.hung_after_s) if connection is not None else None
        except (asyncio.TimeoutError, OSError, ClusterError) as error:
            self.superseded = self.superseded or isinstance(error, Superseded)
            log.warning("broker %d: could not send %s: %s", self._slot.broker_id, op, error or type(error).__name__)
            return None

    async def _reach(self) -> ControlConnection | None:
        """Return the connection to the broker, a new one if the last was lost; None if the broker does not listen."""
        async with self._reaching:
            if self._connection is None:
                connection = await self.open()
                if connection is not None:
                    await self.hello(connection)
                self._connection = connection
            return self._connection

    async def close(self) -> None:
        """Close the connection; the next call opens another one."""
        connection, self._connection = self._connection, None
        if connection is not None:
            await connection.close()
