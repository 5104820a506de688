"""The broker's Unix socket, through which a supervisor watches the broker, adopts it and stops it.

A supervisor is the Spark task that starts and watches a broker. A supervisor that adopts a broker takes over one that
is already running.

Each request and each response is one line with a JSON object. A supervisor's first line is a ``hello`` with the name of
its lease. The supervisor with the newest lease keeps its connection open as long as the supervisor runs. When this
connection ends, the broker knows that the supervisor is gone. A socket is used because a supervisor that adopts a
broker is not the broker's parent process.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import msgspec

from sparklog.broker.asyncio_tasks import end_tasks
from sparklog.broker.lifecycle.supervisor_lease import LeaseName, SupervisorLease
from sparklog.errors import ConfigError
from sparklog.protocol.proof import Secret

_log = logging.getLogger(__name__)

#: The longest path of a Unix socket in bytes, without the terminating zero byte. Source: unix(7), sun_path.
MAX_PATH_BYTES = 107
_LINE_BYTES = 64 * 1024


class Command(msgspec.Struct, frozen=True):
    """A command from a supervisor, which sends it as one line with a JSON object."""

    op: str
    driver_epoch: int = 0
    generation: int = 0
    controlled: bool = True
    #: In a hello: the cluster's secrets in hexadecimal, the newest first.
    secrets: tuple[str, ...] = ()


class SupervisorCommands(Protocol):
    """The part of the broker process that the control socket calls when a supervisor sends a command.

    No method blocks.
    """

    def status(self) -> dict[str, Any]: ...

    def stop(self, *, controlled: bool) -> None: ...

    def learn(self, secrets: tuple[Secret, ...]) -> None:
        """Add these cluster secrets to those that the broker knows. The newest secret is first."""

    def adopted(self) -> None:
        """Continue to serve, because a supervisor with a newer lease than all earlier ones has connected."""

    def quiesce(self) -> None: ...

    def finish(self) -> None: ...


class ControlSocket:
    """The server of the control socket.

    A part of the broker process. Call ``open`` before the broker serves clients, and ``close`` as the last step of the
    stop.
    """

    def __init__(self, path: str, lease: SupervisorLease, commands: SupervisorCommands) -> None:
        self._path = path
        self._lease = lease
        self._commands = commands
        self._server: asyncio.Server | None = None
        self._writers: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[None]] = set()

    async def open(self) -> None:
        """Open the socket.

        Raises:
            ConfigError: the path is too long for a Unix socket.
            OSError: the socket cannot be created.
        """
        if len(os.fsencode(self._path)) > MAX_PATH_BYTES:
            raise ConfigError(
                f"control socket {self._path!r}: {len(os.fsencode(self._path))} bytes, at most {MAX_PATH_BYTES} fit"
            )
        # This process holds the lock of the log directory, so the process that bound this path earlier is dead.
        with contextlib.suppress(FileNotFoundError):
            Path(self._path).unlink()
        self._server = await asyncio.start_unix_server(self._accept, self._path, limit=_LINE_BYTES)
        Path(self._path).chmod(0o700)

    async def close(self) -> None:
        if self._server is None:
            return
        self._server.close()
        for writer in list(self._writers):
            writer.close()
        await end_tasks(self._tasks)
        with contextlib.suppress(OSError):
            Path(self._path).unlink()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        self._writers.add(writer)
        held: LeaseName | None = None
        try:
            while line := await reader.readline():
                answer, held = self._answer(line, held)
                writer.write(msgspec.json.encode(answer) + b"\n")
                await writer.drain()
        except (OSError, ValueError) as error:
            _log.info("control connection closed: %s", error)
        except asyncio.CancelledError:
            pass  # only ``close`` cancels this task, which then ends
        finally:
            if held is not None:
                self._lease.released(held)
            writer.close()
            self._writers.discard(writer)
            self._tasks.discard(task)

    def _answer(self, line: bytes, held: LeaseName | None) -> tuple[dict[str, Any], LeaseName | None]:
        """Return the response to one line, and the name of the lease that this connection holds after it."""
        try:
            command = msgspec.json.decode(line, type=Command)
        except msgspec.MsgspecError as error:
            return {"ok": False, "error": f"not a command: {error}"}, held
        if command.op == "hello":
            return self._hello(command, held)
        if held is not None and held != self._lease.highest:
            return self._superseded(), held
        actions: dict[str, Callable[[], None]] = {
            "status": lambda: None,
            "stop": lambda: self._commands.stop(controlled=command.controlled),
            "quiesce": self._commands.quiesce,
            "finish": self._commands.finish,
        }
        action = actions.get(command.op)
        if action is None:
            return {"ok": False, "error": f"op {command.op!r} found, expected hello, {', '.join(actions)}"}, held
        action()
        return {"ok": True, **self._commands.status()}, held

    def _hello(self, command: Command, held: LeaseName | None) -> tuple[dict[str, Any], LeaseName | None]:
        name = LeaseName(command.driver_epoch, command.generation)
        if held is not None:
            self._lease.released(held)
        before = self._lease.highest
        if not self._lease.admit(name):
            return self._superseded(), None
        try:
            self._commands.learn(tuple(map(Secret.from_hex, command.secrets)))
        except ConfigError as error:
            return {"ok": False, "error": str(error)}, None
        if name > before:
            self._commands.adopted()
        return {"ok": True, **self._commands.status()}, name

    def _superseded(self) -> dict[str, Any]:
        return {"ok": False, "superseded_by": list(self._lease.highest)}
