"""The supervisor's side of a broker's control socket. Requests and responses are lines of JSON.

A connection on which the supervisor has sent ``hello`` is its *lease* on the broker: while the connection is open, the
broker knows that it is supervised.
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
    """The response of a broker to a command of its supervisor.

    The fields have defaults, because brokers of other releases may omit some.
    """

    ok: bool
    broker_id: int = -1
    incarnation: int = -1
    pid: int = -1
    #: The host and port of the broker's first listener for clients. Brokers of release 0.1.0 do not report the host.
    host: str = ""
    port: int = -1
    #: The addresses for Kafka clients, separated by commas.
    kafka: str = ""
    state: str = ""
    #: The number of partitions that the broker leads and whose in-sync followers have not caught up yet.
    lagging: int = 0
    leading: int = 0
    superseded_by: tuple[int, int] | None = None
    error: str = ""


class Superseded(ClusterError):
    """The error for a command that a broker refuses because a newer supervisor controls the broker."""


class ControlConnection:
    """A connection from a supervisor to a broker's control socket. Not thread-safe: use it only on one event loop.

    ``peer`` is the process at the other end, as the kernel reports it.
    """

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, peer: ProcessIdentity) -> None:
        self._reader = reader
        self._writer = writer
        self.peer = peer
        self._busy = asyncio.Lock()

    @classmethod
    async def open(cls, path: Path, *, timeout_s: float = 2.0) -> ControlConnection | None:
        """Connect to the socket at ``path``. Return None if no process listens there."""
        try:
            reader, writer = await asyncio.wait_for(asyncio.open_unix_connection(path, limit=_LINE_BYTES), timeout_s)
        except (FileNotFoundError, ConnectionRefusedError, asyncio.TimeoutError):
            return None
        peer = peer_of(writer.get_extra_info("socket"))
        if peer is None:  # The process has ended since it began to listen.
            writer.close()
            return None
        return cls(reader, writer, peer)

    async def call(self, op: str, *, timeout_s: float, **fields: Any) -> BrokerStatus:
        """Send one command, and return the broker's status after the command.

        Raises:
            asyncio.TimeoutError: the broker did not respond in time. The connection can no longer be used.
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
    """The supervisor's control of one broker, over one connection at a time. A part of ``BrokerSupervisor``.

    While the connection is open, the broker knows that it is supervised. The supervisor opens the first connection to a
    process and passes it to ``keep``. If that connection is lost, the link opens the next one.
    """

    def __init__(self, slot: Slot, spec: GenerationSpec) -> None:
        self._slot = slot
        self._spec = spec
        self._connection: ControlConnection | None = None
        self._reaching = asyncio.Lock()
        #: The last status of the broker, or None if it does not serve.
        self.status: BrokerStatus | None = None
        #: Whether a command was refused because the broker has a newer supervisor.
        self.superseded = False

    @property
    def hung_after_s(self) -> float:
        """Return the number of seconds without a response after which the broker counts as hung.

        This is over twice ZooKeeper's session time-out. After this time other brokers lead the partitions of the
        broker, and the broker's own watchdog has failed.
        """
        return 2 * self._spec.session_timeout_ms / 1000 + 2

    @property
    def peer(self) -> ProcessIdentity | None:
        """Return the broker's process at the other end of the connection, or None if there is no connection."""
        return self._connection.peer if self._connection is not None else None

    async def open(self) -> ControlConnection | None:
        """Open and return a connection, without sending ``hello``. Return None if the broker does not listen."""
        return await ControlConnection.open(runtime_directory.control_socket(self._slot.path))

    async def hello(self, connection: ControlConnection) -> BrokerStatus:
        """Send ``hello`` over a connection and return the broker's status. Close the connection if that fails.

        By ``hello`` the broker learns which generation supervises it.
        """
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
        """Keep a connection open for further commands, so that the broker knows that it is supervised.

        ``status`` is the last status of the broker, which already serves requests.
        """
        async with self._reaching:
            if self._connection is None:
                self._connection = connection
            else:  # A concurrent stop has opened a connection first.
                await connection.close()
        self.status = status

    async def poll(self) -> None:
        """Request the broker's status and store it in ``status``.

        Raises:
            asyncio.TimeoutError: the broker hangs. The connection is then closed.
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
        """Send a command and return the response. Return None if the broker does not respond or refuses the command."""
        try:
            connection = await self._reach()
            return await connection.call(op, timeout_s=self.hung_after_s) if connection is not None else None
        except (asyncio.TimeoutError, OSError, ClusterError) as error:
            self.superseded = self.superseded or isinstance(error, Superseded)
            log.warning("broker %d: could not send %s: %s", self._slot.broker_id, op, error or type(error).__name__)
            return None

    async def _reach(self) -> ControlConnection | None:
        """Return the connection to the broker, opened again if it was lost, or None if the broker does not listen."""
        async with self._reaching:
            if self._connection is None:
                connection = await self.open()
                if connection is not None:
                    await self.hello(connection)
                self._connection = connection
            return self._connection

    async def close(self) -> None:
        """Close the connection. The next command opens another one."""
        connection, self._connection = self._connection, None
        if connection is not None:
            await connection.close()
