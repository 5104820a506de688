"""A real cluster without Spark: ZooKeeper, a controller, and broker processes that tests can kill, pause and isolate.

It is for tests of behavior that only real processes have. All files are below one directory. A restarted broker has
the same port as before. ``stop`` ends all processes, even paused or hanging ones.

The controller is a thread of this process. For tests of controller faults, it is two processes, one active and one
standby.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

import msgspec

from sparklog.broker.lifecycle.secret_file import new_secret, write_secret_file
from sparklog.cluster.controller_loop import ControllerLoop
from sparklog.cluster.embedded_zookeeper import EmbeddedZookeeper
from sparklog.cluster.process import boot_id, send_signal
from sparklog.errors import BrokerError, ClusterError, ErrorCode
from sparklog.model import host_and_port
from sparklog.net.blocking import BlockingConnection
from sparklog.net.client_security import ClientSecurity
from sparklog.net.greeting import Credentials
from sparklog.protocol.messages import DescribeBroker, DescribeBrokerReply, Metadata, MetadataReply
from sparklog.protocol.proof import Identity, KeyRing
from sparklog.protocol.senders import SenderKind
from sparklog.security.listeners import is_loopback
from sparklog.testing.network import CONTROLLER, ZOOKEEPER, Network, broker_party
from sparklog.testing.reserved_ports import ReservedPorts
from sparklog.zk import paths
from sparklog.zk.cluster_store import ClusterStore
from sparklog.zk.errors import ZkNoNode
from sparklog.zk.protection import protect
from sparklog.zk.security import security_of
from sparklog.zk.session import ZkSession

#: The timeout of a start, long enough for a very busy machine.
_START_TIMEOUT_S = 60.0
_STOP_TIMEOUT_S = 30.0
_T = TypeVar("_T")
Process = subprocess.Popen[bytes]


class BrokerSlot:
    """A place for one broker: its directory, its port, and the process that is the broker now, if it runs."""

    def __init__(self, broker_id: int, directory: Path, control_socket: Path) -> None:
        self.broker_id = broker_id
        self.log_dir = directory / f"broker-{broker_id}"
        self.log_file = directory / f"broker-{broker_id}.log"
        self.config_file = directory / f"broker-{broker_id}.json"
        self.control_socket = control_socket
        #: The module to run, and the arguments that precede the broker's own arguments.
        self.program: tuple[str, ...] = ("sparklog.broker",)
        #: The advertised host; ``bind_host`` is the host on which the broker listens.
        self.host = "127.0.0.1"
        self.bind_host = ""
        self.port = 0
        #: The address for Kafka clients; empty until the broker has started, and if it has no listener for them.
        self.kafka_address = ""
        #: The port of the first Kafka listener whose setting has port 0; 0 before the first start.
        self.kafka_port = 0
        #: The ZooKeeper address of this broker; if empty, the address of the cluster is used.
        self.zookeeper = ""
        #: The directory with the source code that this broker runs; if empty, the source code of this process.
        self.sources = ""
        #: Whether the broker gets the cluster secret. Brokers of other releases may not support secrets; release 0.1.0
        #: does not.
        self.has_secret = True
        self.process: Process | None = None
        #: Whether SIGSTOP has paused the broker: its process exists, but does not respond.
        self.paused = False

    @property
    def running(self) -> bool:
        return self.process is not None and self.process.poll() is None

    def last_words(self, lines: int = 15) -> str:
        if not self.log_file.exists():
            return "no log"
        return "\n".join(self.log_file.read_text(errors="replace").splitlines()[-lines:])

    def command(self, op: str, **fields: Any) -> dict[str, Any]:
        """Send one command over the broker's control socket, as a supervisor does; return the response."""
        with socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(5)
            connection.connect(str(self.control_socket))
            connection.sendall(msgspec.json.encode({"op": op, **fields}) + b"\n")
            with connection.makefile("rb") as lines:
                answer: dict[str, Any] = msgspec.json.decode(lines.readline())
                return answer


class ControllerSlot:
    """A place for one of two controller processes: its ZooKeeper address, its log file, and its process, if it runs."""

    def __init__(self, number: int, directory: Path) -> None:
        self.number = number
        self.log_file = directory / f"controller-{number}.log"
        self.zookeeper = ""
        self.process: Process | None = None

    @property
    def running(self) -> bool:
        return self.process is not None and self.process.poll() is None


class ProcessCluster:
    """A cluster of real processes. Use it as a context manager, or call ``start`` and ``stop``.

    Not thread-safe: use it from one test thread. ``settings`` apply to every broker. Without ``base_dir``, the cluster
    creates a temporary directory, and removes it at the end. All connections use ``network``, which is closed with the
    cluster. ``controller_processes`` starts two controller processes instead of a thread of this process. Without
    ``with_secret``, the cluster has no secret, and brokers do not check that a connection from a broker or controller
    is genuine. With ``kafka``, each broker has a listener for Kafka clients, whose addresses are ``kafka_bootstrap``.
    """

    def __init__(
        self,
        brokers: int = 3,
        *,
        base_dir: Path | None = None,
        settings: Mapping[str, str] | None = None,
        network: Network | None = None,
        controller_processes: bool = False,
        with_secret: bool = True,
        kafka: bool = False,
    ) -> None:
        self._temporary = tempfile.mkdtemp(prefix="sparklog-")
        self.base_dir = base_dir or Path(self._temporary) / "data"
        # Test records have arbitrary timestamps. So only topics with their own retention setting delete records.
        kept = {"internal.topic.replication.factor": str(min(3, brokers)), "retention.ms": "-1"}
        self.settings = {**kept, **(settings or {})}
        if kafka:
            self.settings.setdefault("kafka.listeners", "PLAINTEXT://127.0.0.1:0")
        self.cluster_id = ""
        #: The security of connections of clients.
        self.client_security = ClientSecurity()
        self.keys = KeyRing([new_secret()] if with_secret else [])
        self.slots = {
            number: BrokerSlot(number, self.base_dir, Path(self._temporary) / f"{number}.sock")
            for number in range(brokers)
        }
        self.network = network
        self.controllers = [ControllerSlot(number, self.base_dir) for number in range(2 if controller_processes else 0)]
        self._zookeeper: EmbeddedZookeeper | None = None
        self._controller: ControllerLoop | None = None
        self._ports = ReservedPorts()
        #: The port of ZooKeeper; 0 before its first start.
        self._zookeeper_port = 0

    def __enter__(self) -> ProcessCluster:
        try:
            self.start()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    # --- the whole cluster ---

    @property
    def zookeeper(self) -> str:
        assert self._zookeeper is not None, "the cluster has not been started"
        return self._zookeeper.connect

    @property
    def secret_file(self) -> Path:
        return self.base_dir / "cluster.secret"

    @property
    def bootstrap(self) -> str:
        return ",".join(f"{slot.host}:{slot.port}" for slot in self.slots.values() if slot.port)

    @property
    def kafka_bootstrap(self) -> str:
        """Return the addresses of the brokers for Kafka clients. They stay the same when a broker starts again."""
        return ",".join(slot.kafka_address for slot in self.slots.values() if slot.kafka_address)

    def start(self) -> None:
        """Start ZooKeeper, the controller and all brokers; return when every broker has the cluster's metadata."""
        self.base_dir.mkdir(parents=True, exist_ok=True)
        if self.keys:
            write_secret_file(self.secret_file, self.keys)
        self.start_zookeeper()
        if self.keys and all(slot.has_secret and not slot.sources for slot in self.slots.values()):
            self.ask_zookeeper(lambda store: protect(store.session, self.keys))
        self.cluster_id = self.ask_zookeeper(_prepare)
        if self.network is not None:
            self._put_between(self.network)
        self.secure()
        self.start_controller()
        self.start_brokers()

    def secure(self) -> None:
        """Prepare the security of the cluster. A subclass overrides this; here it does nothing.

        ``start`` calls it when the cluster has an id and ZooKeeper is the only running process.
        """

    def _put_between(self, network: Network) -> None:
        for slot in self.slots.values():
            slot.host, slot.bind_host, slot.port = network.add_broker(slot.broker_id)
            slot.zookeeper = network.add_zookeeper(broker_party(slot.broker_id), self.zookeeper)
        for controller in self.controllers:
            controller.zookeeper = network.add_zookeeper(CONTROLLER, self.zookeeper)

    def start_brokers(self) -> None:
        """Start the brokers that do not run, in parallel; return when all brokers know each other."""
        down = [slot for slot in self.slots.values() if not slot.running]
        for slot, ready_fd in [(slot, self._launch(slot)) for slot in down]:
            self._await_ready(slot, ready_fd)
        self.wait_ready()
        if self.settings.get("kafka.listeners"):
            self._note_kafka_addresses()

    def _note_kafka_addresses(self) -> None:
        for broker in self.ask_zookeeper(lambda store: store.live_brokers()):
            for endpoint in broker.kafka_endpoints[:1]:
                self.slots[broker.broker_id].kafka_address = host_and_port(endpoint.host, endpoint.port)

    def stop(self) -> None:
        """Stop the whole cluster: cleanly where brokers still respond, and otherwise with SIGKILL."""
        if self.network is not None:
            self.network.heal()
        self.resume()
        try:
            self.stop_brokers()
            self.stop_controller()
        finally:
            for slot in self.slots.values():
                self._reap(slot)
            if self._zookeeper is not None:
                self._zookeeper.stop()
                self._zookeeper = None
            if self.network is not None:
                self.network.close()
            self._ports.close()
            shutil.rmtree(self._temporary, ignore_errors=True)

    def pause(self) -> None:
        """Send SIGSTOP to all processes, so that the cluster uses no processor time until ``resume``."""
        for slot in self.slots.values():
            if slot.running:
                self.kill(slot.broker_id, signal.SIGSTOP)
        for controller in self.controllers:
            if controller.running:
                self.kill_controller(controller.number, signal.SIGSTOP)
        self.signal_zookeeper(signal.SIGSTOP)

    def resume(self) -> None:
        """Resume the processes after ``pause``. Sessions may have expired or may expire now, so leaders may change."""
        if self._zookeeper is not None:
            self.signal_zookeeper(signal.SIGCONT)
        for controller in self.controllers:
            if controller.running:
                self.kill_controller(controller.number, signal.SIGCONT)
        for slot in self.slots.values():
            if slot.running:
                self.kill(slot.broker_id, signal.SIGCONT)

    def stop_brokers(self) -> dict[int, int]:
        """Stop all brokers as ``sparklog cluster stop`` does; return the exit codes by broker id.

        Brokers refuse new writes, followers catch up, all logs are flushed, and the ISRs do not change.
        """
        running = [slot for slot in self.slots.values() if slot.running]
        for slot in running:
            with contextlib.suppress(OSError):
                slot.command("quiesce")
        with contextlib.suppress(ClusterError, OSError):
            wait_until(lambda: not any(slot.command("status")["lagging"] for slot in running), 5.0, "followers")
        self.stop_controller()
        for slot in running:
            with contextlib.suppress(OSError):
                slot.command("finish")
        return {slot.broker_id: self._reap(slot) for slot in running}

    def start_controller(self) -> None:
        for slot in self.controllers:
            if not slot.running:
                self._launch_controller(slot)
        if self._controller is None and not self.controllers:
            self._controller = ControllerLoop(self.zookeeper, self.cluster_id, settings=self.settings, keys=self.keys)
            self._inside(CONTROLLER, self._controller.start)

    def signal_zookeeper(self, number: signal.Signals) -> None:
        """Send a signal to ZooKeeper. After SIGTERM or SIGKILL, ``start_zookeeper`` can start it again."""
        assert self._zookeeper is not None, "the cluster has not been started"
        send_signal(self._zookeeper.process, number)
        if number in {signal.SIGTERM, signal.SIGKILL}:
            self._zookeeper.stop()  # this only waits for the end of the process, which has got the signal

    def start_zookeeper(self) -> None:
        """Start ZooKeeper with its old data and port, or use the server that is already running."""
        host = "127.0.0.1" if self.network is None else self.network.zookeeper_host
        self._zookeeper_port = self._zookeeper_port or self._ports.reserve()
        self._zookeeper = self._inside(
            ZOOKEEPER,
            lambda: EmbeddedZookeeper.start(
                self.base_dir / "zookeeper",
                host=host,
                port=self._zookeeper_port,
                security=security_of(self.settings),
            ),
        )

    def stop_controller(self) -> None:
        for slot in self.controllers:
            if slot.process is not None:
                self.kill_controller(slot.number, signal.SIGCONT)
                self.kill_controller(slot.number, signal.SIGTERM)
        if self._controller is not None:
            self._controller.stop()
            self._controller = None

    def ask_zookeeper(self, question: Callable[[ClusterStore], Coroutine[Any, Any, _T]]) -> _T:
        """Run the coroutine ``question`` with a new ZooKeeper session; return its result."""

        async def ask() -> _T:
            session = await ZkSession.open(self.zookeeper, keys=self.keys, security=security_of(self.settings))
            try:
                return await question(ClusterStore(session))
            finally:
                await session.close()

        return asyncio.run(ask())

    def wait_ready(self, timeout_s: float = _START_TIMEOUT_S) -> None:
        """Wait until every running broker knows all running brokers."""
        running = {slot.broker_id for slot in self.slots.values() if slot.running}

        def known() -> bool:
            return all({b.broker_id for b in self.metadata(broker_id).brokers} == running for broker_id in running)

        wait_until(known, timeout_s, f"brokers {sorted(running)} to know each other")

    # --- the controller processes ---

    def active_controller(self) -> int | None:
        """Return the number of the controller process that holds ``/controller``, or None if none of them holds it."""

        async def holder(store: ClusterStore) -> str:
            try:
                return (await store.session.get(paths.CONTROLLER)).data.decode()
            except ZkNoNode:
                return ""

        text = self.ask_zookeeper(holder)
        for slot in self.controllers:
            if slot.process is not None and f"-{slot.process.pid}-" in text:
                return slot.number
        return None

    def kill_controller(self, number: int, with_signal: signal.Signals = signal.SIGKILL) -> None:
        """Send a signal to one of the controller processes, and wait for its exit if the signal ends it."""
        slot = self.controllers[number]
        assert slot.process is not None, f"controller {number} does not run"
        slot.process.send_signal(with_signal)
        if with_signal in {signal.SIGKILL, signal.SIGTERM}:
            try:
                slot.process.wait(_STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                slot.process.kill()
                slot.process.wait()
            slot.process = None

    # --- one broker ---

    def pid(self, broker_id: int) -> int:
        process = self.slots[broker_id].process
        assert process is not None, f"broker {broker_id} does not run"
        return process.pid

    def connect(self, broker_id: int, *, identity: Identity | None = None, **options: Any) -> BlockingConnection:
        """Open a connection as a client. With ``identity``, authenticate as that broker or controller."""
        slot = self.slots[broker_id]
        credentials = Credentials(self.keys, lambda: identity) if identity is not None and self.keys else None
        options = {"security": self.client_security, **options}
        return BlockingConnection(slot.host, slot.port, client_id="test", credentials=credentials, **options)

    def as_broker(self, broker_id: int) -> Identity:
        """Return the identity of a broker in its current incarnation."""
        return Identity(SenderKind.BROKER, broker_id, self.describe(broker_id).incarnation)

    def metadata(self, broker_id: int, *topics: str) -> MetadataReply:
        """Return the metadata that one broker reports. Wait until the broker has read the users and ACLs."""
        found: list[MetadataReply] = []

        def replies() -> bool:
            try:
                with self.connect(broker_id) as connection:
                    reply, _ = connection.request(Metadata(0, topics or None))
            except BrokerError as error:
                if error.code != ErrorCode.BROKER_NOT_AVAILABLE:
                    raise
                return False
            assert isinstance(reply, MetadataReply)
            found.append(reply)
            return True

        wait_until(replies, _START_TIMEOUT_S, f"metadata of broker {broker_id}")
        return found[0]

    def describe(self, broker_id: int) -> DescribeBrokerReply:
        with self.connect(broker_id) as connection:
            reply, _ = connection.request(DescribeBroker(0))
            assert isinstance(reply, DescribeBrokerReply)
            return reply

    def start_broker(self, broker_id: int) -> None:
        """Start a broker with its directory and port; return when it accepts requests."""
        slot = self.slots[broker_id]
        self._await_ready(slot, self._launch(slot))

    def stop_broker(self, broker_id: int) -> int:
        """Stop a broker by a controlled shutdown; return its exit code."""
        slot = self.slots[broker_id]
        assert slot.process is not None
        slot.process.send_signal(signal.SIGTERM)
        return self._reap(slot)

    def kill(self, broker_id: int, number: signal.Signals = signal.SIGKILL, *, retire: bool = True) -> None:
        """Send a signal to a broker.

        After SIGKILL, this removes the broker's registration, as a supervisor does when it has seen the exit. Without
        ``retire``, the registration stays until the session expires.
        """
        slot = self.slots[broker_id]
        assert slot.process is not None
        slot.process.send_signal(number)
        slot.paused = number == signal.SIGSTOP or (slot.paused and number not in {signal.SIGCONT, signal.SIGKILL})
        if number != signal.SIGKILL:
            return
        pid = slot.process.pid
        self._reap(slot)
        if retire:
            self.retire(broker_id, pid)

    def retire(self, broker_id: int, pid: int) -> None:
        """Remove the broker's registration from ZooKeeper, as a supervisor does when the process ``pid`` has ended."""

        async def retire(store: ClusterStore) -> None:
            await store.retire_broker(broker_id, pid=pid, boot_id=boot_id())

        self.ask_zookeeper(retire)

    def restart(self, broker_id: int) -> None:
        """Stop a broker by a controlled shutdown if it runs, then start it."""
        if self.slots[broker_id].running:
            self.stop_broker(broker_id)
        self.start_broker(broker_id)

    # --- internal ---

    def _inside(self, party: str, work: Callable[[], _T]) -> _T:
        return work() if self.network is None else self.network.inside(party, work)

    def _spawn(
        self,
        party: str,
        command: Sequence[str],
        log_file: Path,
        *,
        pass_fds: Sequence[int] = (),
        cwd: str | None = None,
    ) -> Process:
        with log_file.open("ab") as log:
            return self._inside(
                party,
                lambda: subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    pass_fds=pass_fds,
                    cwd=cwd,
                    start_new_session=True,
                ),
            )

    def _launch(self, slot: BrokerSlot) -> int:
        ready_fd, write_fd = os.pipe()
        slot.port = slot.port or self._ports.reserve()
        config = {
            "cluster_id": self.cluster_id,
            "broker_id": slot.broker_id,
            "log_dir": str(slot.log_dir),
            "host": slot.host,
            "bind_host": slot.bind_host,
            "port": slot.port,
            "zookeeper": slot.zookeeper or self.zookeeper,
            "settings": self._settings_of(slot),
            "control_socket": str(slot.control_socket),
            "ready_fd": write_fd,
            **({"secret_file": str(self.secret_file)} if self.keys and slot.has_secret and not slot.sources else {}),
        }
        slot.config_file.write_bytes(msgspec.json.encode(config))
        command = [sys.executable, "-m", *slot.program, "--config", str(slot.config_file)]
        party = broker_party(slot.broker_id)
        # The working directory, because Python first searches it for the module to run.
        slot.process = self._spawn(party, command, slot.log_file, pass_fds=[write_fd], cwd=slot.sources or None)
        os.close(write_fd)
        return ready_fd

    def _settings_of(self, slot: BrokerSlot) -> dict[str, str]:
        """Return the settings of one broker. A network of the test with other addresses than loopback is trusted."""
        trusted = {} if slot.sources or is_loopback(slot.bind_host or slot.host) else {"network.trusted": "true"}
        listeners = self.settings.get("kafka.listeners", "")
        if ":0" in listeners:
            # A broker that starts again has the address that its clients know.
            slot.kafka_port = slot.kafka_port or self._ports.reserve()
            listeners = listeners.replace(":0", f":{slot.kafka_port}", 1)
        kafka = {"kafka.listeners": listeners} if listeners else {}
        return {**trusted, **self.settings, **kafka}

    def _launch_controller(self, slot: ControllerSlot) -> None:
        command = [sys.executable, "-m", "sparklog.testing.controller_process", slot.zookeeper or self.zookeeper]
        command += [self.cluster_id, msgspec.json.encode(self.settings).decode()]
        command += [str(self.secret_file)] if self.keys else []
        slot.process = self._spawn(CONTROLLER, command, slot.log_file)

    def _await_ready(self, slot: BrokerSlot, ready_fd: int) -> None:
        try:
            readable, _, _ = select.select([ready_fd], [], [], _START_TIMEOUT_S)
            line = os.read(ready_fd, 100) if readable else b""
        finally:
            os.close(ready_fd)
        if not line.startswith(b"ready "):
            raise ClusterError(f"broker {slot.broker_id} did not start:\n{slot.last_words()}")
        slot.port = int(line.split()[1])

    def _reap(self, slot: BrokerSlot) -> int:
        """Wait for the exit, kill the process after a timeout, and return the exit code."""
        process = slot.process
        if process is None:
            return 0
        if slot.paused:
            process.send_signal(signal.SIGCONT)
            slot.paused = False
        if process.poll() is None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_STOP_TIMEOUT_S)
        if process.poll() is None:
            process.kill()
        code = process.wait()
        slot.process = None
        return code


async def _prepare(store: ClusterStore) -> str:
    await store.prepare()
    return await store.cluster_id()


def wait_until(true: Callable[[], object], timeout_s: float, what: str) -> None:
    """Call ``true`` repeatedly until it returns True.

    Raises:
        ClusterError: timeout. The message says ``what`` the caller was waiting for.
    """
    deadline = time.monotonic() + timeout_s
    while not true():
        if time.monotonic() > deadline:
            raise ClusterError(f"waited {timeout_s:g} s in vain for {what}")
        time.sleep(0.02)
