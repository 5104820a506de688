"""Tests of the supervisor's socket: leases, commands, and responses to a stranger."""

from __future__ import annotations

import asyncio
import json
import tempfile
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import pytest

from sparklog.broker.lifecycle.control_socket import MAX_PATH_BYTES, ControlSocket
from sparklog.broker.lifecycle.supervisor_lease import LeaseName, SupervisorLease
from sparklog.errors import ConfigError
from sparklog.protocol.proof import Secret


class Steered:
    """Broker actions that record the commands."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    def status(self) -> dict[str, Any]:
        return {"broker_id": 7, "state": "running"}

    def stop(self, *, controlled: bool) -> None:
        self.asked.append(f"stop controlled={controlled}")

    def learn(self, secrets: tuple[Secret, ...]) -> None:
        self.asked += [f"learn {secret.key_id}" for secret in secrets]

    def adopted(self) -> None:
        self.asked.append("adopted")

    def quiesce(self) -> None:
        self.asked.append("quiesce")

    def finish(self) -> None:
        self.asked.append("finish")


class Supervisor:
    """One connection."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    async def ask(self, **command: Any) -> dict[str, Any]:
        return await self.ask_raw(json.dumps(command).encode())

    async def ask_raw(self, line: bytes) -> dict[str, Any]:
        self.writer.write(line + b"\n")
        answer: dict[str, Any] = json.loads(await asyncio.wait_for(self.reader.readline(), 5))
        return answer

    async def close(self) -> None:
        self.writer.close()
        await self.writer.wait_closed()


@pytest.fixture
def directory() -> Iterator[Path]:
    # pytest's directories have names that are too long for a Unix socket.
    with tempfile.TemporaryDirectory(prefix="slk-") as path:
        yield Path(path)


Scenario = Callable[
    [Callable[[], Coroutine[Any, Any, Supervisor]], SupervisorLease, Steered], Coroutine[Any, Any, None]
]


def play(directory: Path, scenario: Scenario) -> None:
    async def run() -> None:
        lease = SupervisorLease(LeaseName(1, 1), supervised=True, orphan_timeout_ms=1000, orphan_max_ms=-1)
        steered = Steered()
        subject = ControlSocket(str(directory / "s"), lease, steered)
        await subject.open()
        opened: list[Supervisor] = []

        async def connect() -> Supervisor:
            opened.append(Supervisor(*await asyncio.open_unix_connection(str(directory / "s"))))
            return opened[-1]

        try:
            await scenario(connect, lease, steered)
        finally:
            for supervisor in opened:
                await supervisor.close()
            await subject.close()
        assert not (directory / "s").exists()

    asyncio.run(run())


def test_the_connection_that_sent_hello_holds_the_lease(directory: Path) -> None:
    async def scenario(connect: Any, lease: SupervisorLease, steered: Steered) -> None:
        supervisor = await connect()
        answer = await supervisor.ask(op="hello", driver_epoch=1, generation=2)
        assert answer == {"ok": True, "broker_id": 7, "state": "running"}
        assert lease.held and lease.highest == LeaseName(1, 2)
        await supervisor.close()
        for _ in range(500):
            if not lease.held:
                return
            await asyncio.sleep(0.01)
        pytest.fail("the lease outlived its connection")

    play(directory, scenario)


def test_a_superseded_supervisor_learns_its_successor_and_has_no_power(directory: Path) -> None:
    async def scenario(connect: Any, lease: SupervisorLease, steered: Steered) -> None:
        older, newer = await connect(), await connect()
        await older.ask(op="hello", driver_epoch=1, generation=2)
        await newer.ask(op="hello", driver_epoch=2, generation=1)
        expected = {"ok": False, "superseded_by": [2, 1]}
        assert await older.ask(op="stop") == expected
        assert await older.ask(op="hello", driver_epoch=1, generation=3) == expected
        assert (await newer.ask(op="quiesce"))["ok"]
        assert (await newer.ask(op="finish"))["ok"]
        assert steered.asked == ["adopted", "adopted", "quiesce", "finish"]

    play(directory, scenario)


def test_commands_reach_the_broker_and_other_input_gets_a_response(directory: Path) -> None:
    async def scenario(connect: Any, lease: SupervisorLease, steered: Steered) -> None:
        supervisor = await connect()
        assert "not a command" in (await supervisor.ask_raw(b"\x00garbage"))["error"]
        assert "expected hello" in (await supervisor.ask(op="dance"))["error"]
        assert (await supervisor.ask(op="status"))["broker_id"] == 7
        await supervisor.ask(op="stop", controlled=False)
        assert steered.asked == ["stop controlled=False"]

    play(directory, scenario)


def test_a_path_too_long_for_a_socket_is_refused(directory: Path) -> None:
    async def run() -> None:
        lease = SupervisorLease(LeaseName(0, 0), supervised=False, orphan_timeout_ms=1000, orphan_max_ms=-1)
        path = str(directory / ("x" * MAX_PATH_BYTES))
        with pytest.raises(ConfigError, match=f"{len(path)} bytes, at most {MAX_PATH_BYTES}"):
            await ControlSocket(path, lease, Steered()).open()

    asyncio.run(run())


def test_only_the_newest_supervisor_may_set_the_secrets(directory: Path) -> None:
    first, second = Secret(b"1" * 32), Secret(b"2" * 32)

    async def scenario(
        connect: Callable[[], Coroutine[Any, Any, Supervisor]], lease: SupervisorLease, steered: Steered
    ) -> None:
        supervisor = await connect()
        told = [second.hex(), first.hex()]
        assert (await supervisor.ask(op="hello", driver_epoch=2, generation=1, secrets=told))["ok"]
        assert steered.asked == [f"learn {second.key_id}", f"learn {first.key_id}", "adopted"]
        late = await connect()
        answer = await late.ask(op="hello", driver_epoch=1, generation=9, secrets=["3" * 64])
        assert not answer["ok"] and len(steered.asked) == 3
        answer = await late.ask(op="hello", driver_epoch=3, generation=1, secrets=["no secret"])
        assert not answer["ok"] and "no secret" not in answer["error"] and len(steered.asked) == 3

    play(directory, scenario)
