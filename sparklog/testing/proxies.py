"""A network that tests can partition, made of TCP proxies in front of brokers and ZooKeeper. It needs no privileges.

Each broker listens on one loopback address and advertises another one, where a proxy listens on the same port. The
first message of a connection, the Hello, identifies the party that has opened the connection: ``replica-<id>`` is a
broker, ``controller-<epoch>`` is the controller, and any other client id is a client. Each process reaches ZooKeeper
through its own proxy.

A cut has the effect of a cut below TCP: the proxy keeps the bytes of that direction, and connections stay open.
``heal`` delivers the kept bytes. A new connection is accepted but gets no response, as if the response to the Hello was
lost. Needs 127.0.0.0/8 to be local, as on Linux.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from typing import Any

import msgspec

from sparklog.errors import ProtocolError
from sparklog.net.loop import new_event_loop
from sparklog.protocol.frames import PREFIX, PREFIX_BYTES
from sparklog.protocol.messages import Hello
from sparklog.testing.network import CLIENT, CONTROLLER, ZOOKEEPER, PartyAddress, T, broker_party
from sparklog.testing.reserved_ports import ReservedPorts

_CHUNK_BYTES = 256 * 1024
_LONGEST_HELLO = 4096
_CALL_TIMEOUT_S = 10.0


def party_of(client_id: str) -> str:
    """Return the party whose connections have this client id in the Hello."""
    kind, _, number = client_id.partition("-")
    if kind == "replica" and number.isdigit():
        return broker_party(int(number))
    return CONTROLLER if kind == "controller" and number.isdigit() else CLIENT


class ProxyNetwork:
    """A ``Network`` of proxies, which run on an event loop in their own thread.

    Any thread may call the methods. Close the network at the end.
    """

    def __init__(self) -> None:
        self._loop = new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="network", daemon=True)
        self._servers: list[asyncio.Server] = []
        self._pairs: set[asyncio.Task[None]] = set()
        self._cuts: set[tuple[str, str]] = set()
        self._changed = asyncio.Condition()
        self._ports = ReservedPorts()
        self._thread.start()

    @property
    def zookeeper_host(self) -> str:
        return "127.0.0.1"

    def inside(self, party: str, work: Callable[[], T]) -> T:
        """Call ``work``. Nothing else is needed, because each connection names its party in its Hello."""
        return work()

    def add_broker(self, broker_id: int) -> PartyAddress:
        """Open a proxy in front of a broker that is about to start."""
        host, bind_host = f"127.1.0.{broker_id + 1}", f"127.2.0.{broker_id + 1}"
        port = self._ports.reserve(bind_host)
        self._listen(host, port, (bind_host, port), broker_party(broker_id), caller=None)
        return PartyAddress(host, bind_host, port)

    def add_zookeeper(self, caller: str, target: str) -> str:
        """Open a proxy to the ZooKeeper at ``target`` for one process; return the address for that process."""
        host, _, port = target.rpartition(":")
        taken = self._listen("127.0.0.1", 0, (host, int(port)), ZOOKEEPER, caller=caller)
        return f"127.0.0.1:{taken}"

    def cut(self, sender: str, receiver: str, *, one_way: bool = False) -> None:
        """Hold back the bytes that ``sender`` sends to ``receiver``, and the reverse direction unless ``one_way``."""
        self._change(self._cuts | ({(sender, receiver)} if one_way else {(sender, receiver), (receiver, sender)}))

    def heal(self) -> None:
        """End all cuts, and deliver the bytes that were held back."""
        self._change(set())

    def close(self) -> None:
        if self._thread.is_alive():
            self._call(self._end())
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(_CALL_TIMEOUT_S)
            self._loop.close()
            self._ports.close()

    # --- on the loop ---

    def _call(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(_CALL_TIMEOUT_S)

    def _change(self, cuts: set[tuple[str, str]]) -> None:
        async def change() -> None:
            async with self._changed:
                self._cuts = cuts
                self._changed.notify_all()

        self._call(change())

    def _listen(self, host: str, port: int, target: tuple[str, int], party: str, *, caller: str | None) -> int:
        async def listen() -> int:
            def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
                task = self._loop.create_task(self._serve(reader, writer, target, party, caller))
                self._pairs.add(task)
                task.add_done_callback(self._pairs.discard)

            server = await asyncio.start_server(connected, host, port, limit=_CHUNK_BYTES)
            self._servers.append(server)
            taken: int = server.sockets[0].getsockname()[1]
            return taken

        return self._call(listen())

    async def _end(self) -> None:
        for server in self._servers:
            server.close()
        for task in list(self._pairs):
            task.cancel()
        await asyncio.gather(*self._pairs, return_exceptions=True)

    async def _serve(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        target: tuple[str, int],
        party: str,
        caller: str | None,
    ) -> None:
        """Serve one connection, until one end has closed it and the other end sees the close."""
        onward: asyncio.StreamWriter | None = None
        try:
            first = b""
            if caller is None:
                first = await _first_frame(reader)
                caller = party_of(_client_id(first))
            await self._passable(caller, party)
            back, onward = await asyncio.open_connection(*target, limit=_CHUNK_BYTES)
            onward.write(first)
            there = asyncio.ensure_future(self._pump(reader, onward, caller, party))
            here = asyncio.ensure_future(self._pump(back, writer, party, caller))
            try:
                await asyncio.wait({there, here}, return_when=asyncio.FIRST_COMPLETED)
            finally:
                there.cancel()
                here.cancel()
                await asyncio.gather(there, here, return_exceptions=True)
        except (OSError, EOFError, ProtocolError, msgspec.MsgspecError):
            pass  # both ends see a closed connection, as without a proxy
        finally:
            ends = [end for end in (writer, onward) if end is not None]
            for end in ends:
                end.close()
            try:
                await asyncio.gather(*(end.wait_closed() for end in ends), return_exceptions=True)
            except asyncio.CancelledError:  # the network closes, and its loop with it
                for end in ends:
                    end.transport.abort()
                raise

    async def _pump(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter, sender: str, receiver: str) -> None:
        """Forward bytes until the source has closed the connection. A close is forwarded only when no cut exists."""
        while True:
            chunk = await source.read(_CHUNK_BYTES)
            await self._passable(sender, receiver)
            if not chunk:
                await sink.drain()
                return
            sink.write(chunk)
            await sink.drain()

    async def _passable(self, sender: str, receiver: str) -> None:
        if (sender, receiver) in self._cuts:
            async with self._changed:
                await self._changed.wait_for(lambda: (sender, receiver) not in self._cuts)


async def _first_frame(reader: asyncio.StreamReader) -> bytes:
    prefix = await reader.readexactly(PREFIX_BYTES)
    length, _ = PREFIX.unpack(prefix)
    if length > _LONGEST_HELLO:
        return prefix  # the bytes are not a Hello, so the broker will refuse them
    return prefix + await reader.readexactly(length + 4 - PREFIX_BYTES)


def _client_id(frame: bytes) -> str:
    _, header_length = PREFIX.unpack_from(frame)
    try:
        return msgspec.msgpack.decode(frame[PREFIX_BYTES : PREFIX_BYTES + header_length], type=Hello).client_id
    except msgspec.MsgspecError:
        return ""
