"""Keeps one broker process registered: the incarnation it has, and a new one after each session expiry, or when
somebody took the registration of the living process away (it looked dead to them, or was deleted by hand).

Registration is one multi: create ``/brokers/ids/<id>`` (ephemeral) and set ``/brokers/incarnations/<id>``, whose
version afterwards is the incarnation. So two registrations can never share one, and others can bind a write to it.
The caller holds the lock of the log directory the broker id lives in: whatever else calls itself this broker on
this host is a dead process's leftover.

A log directory that has not heard of the last incarnation is not the one that incarnation wrote in (emptied while its
broker was down, or an older copy): what is missing in it may have been acknowledged, so the registration is untrusted.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Protocol

import msgspec

from sparklog.errors import ClusterError
from sparklog.model import NO_EPOCH, BrokerRegistration
from sparklog.zk import codecs, paths
from sparklog.zk.errors import BrokerIdTaken, ZkError, ZkMultiFailed, ZkNodeExists, ZkNoNode, ZkUnreachable
from sparklog.zk.session import PAUSE_S, Create, Delete, Node, Op, SessionState, SetData, ZkSession

log = logging.getLogger(__name__)


class LastIncarnation(Protocol):
    """What a log directory knows of its broker's registrations."""

    @property
    def incarnation(self) -> int | None:
        """None: it cannot say."""

    def note_incarnation(self, incarnation: int) -> None:
        """Durable on return; called in a thread. Raises OSError."""


class BrokerRegistry:
    """Owner: the broker process's loop. ``start`` registers; ``close`` ends the care, not the session.

    ``on_registered`` is called with each incarnation after the first, when a new session has been registered.
    """

    def __init__(
        self,
        session: ZkSession,
        registration: BrokerRegistration,
        *,
        directory: LastIncarnation | None = None,
        on_registered: Callable[[int], None] | None = None,
        on_failed: Callable[[Exception], None] | None = None,
    ) -> None:
        self._session = session
        self._registration = msgspec.structs.replace(registration, pid=os.getpid(), pid_namespace=pid_namespace())
        self._directory = directory
        self._on_registered = on_registered
        self._on_failed = on_failed
        self._generation = 0
        self._stopping = False
        self._telling_stopping = asyncio.Lock()
        self._task: asyncio.Task[None] | None = None
        self._undo: list[Callable[[], None]] = []
        #: Somebody deleted the node, though the session goes on.
        self._taken_away = False
        #: The current incarnation. After an expiry it stays the old one until the new registration is through.
        self.incarnation = NO_EPOCH

    @property
    def registration(self) -> BrokerRegistration:
        return msgspec.structs.replace(self._registration, incarnation=self.incarnation)

    async def start(self, *, timeout_ms: int = 30_000) -> int:
        """Register and stay registered. Returns the incarnation.

        Raises:
            BrokerIdTaken: the id is held by a broker elsewhere that does not go away within ``timeout_ms``.
            ClusterError: ZooKeeper does not carry it out within twice that.
        """
        try:
            self.incarnation = await asyncio.wait_for(self._register(timeout_ms=timeout_ms), timeout_ms * 2 / 1000)
        except asyncio.TimeoutError:
            mine = self._registration.broker_id
            raise ClusterError(f"broker id {mine} could not be registered within {timeout_ms * 2} ms") from None
        self._undo.append(self._session.add_listener(self._session_moved))
        self._undo.append(self._session.watch_data(paths.broker(self._registration.broker_id), self._seen))
        self._session_moved(self._session.state)  # it may have expired between the multi and here
        return self.incarnation

    async def close(self) -> None:
        while self._undo:
            self._undo.pop()()
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def announce_stopping(self) -> None:
        """Ask the controller to move this broker's leaderships away. Lasts as long as the session, and is said
        again under a new one. Returns when it is said, or was taken back meanwhile."""
        self._stopping = True
        await self._tell_stopping()

    async def withdraw_stopping(self) -> None:
        """Take ``announce_stopping`` back: this broker stays. Returns when nothing of it stands, or it was announced
        again meanwhile."""
        self._stopping = False
        await self._tell_stopping()

    async def _tell_stopping(self) -> None:
        """Make ZooKeeper show what is wanted, whatever an earlier session or a request with a lost answer left there.
        One at a time: who looks after a lost answer would create again what another has just taken away."""
        path = paths.stopping(self._registration.broker_id)
        async with self._telling_stopping:
            told: bool | None = None
            while told is not self._stopping:
                await self._session.connected()
                wanted = self._stopping
                try:
                    await (self._put_stopping(path) if wanted else self._remove(path))
                    told = wanted
                except (ZkNodeExists, ZkNoNode, ZkUnreachable):
                    continue
                except ZkError as error:
                    log.warning("broker %d: saying again whether it stops: %s", self._registration.broker_id, error)
                    await asyncio.sleep(PAUSE_S)

    async def _put_stopping(self, path: str) -> None:
        """Raises ZkNoNode or ZkNodeExists where the node comes or goes meanwhile."""
        value = codecs.encode(codecs.StoppingNode(self.incarnation))
        with suppress(ZkNodeExists):
            await self._session.create(path, value, ephemeral=True)
            return
        node = await self._session.get(path)
        if node.ephemeral_owner != self._session.session_id or node.data != value:
            await self._session.delete(path)  # of an earlier session of this broker
            await self._session.create(path, value, ephemeral=True)

    async def _remove(self, path: str) -> None:
        with suppress(ZkNoNode):
            await self._session.delete(path)

    def vouch(self) -> None:
        """A controller has taken this incarnation in: what is in the log from now on survives a session expiry, so
        later registrations are trusted (unless the mark says that it has not finished)."""
        self._registration = msgspec.structs.replace(self._registration, trusted=True)

    def distrust(self) -> None:
        """Before ``start``: the log directory has lost what it held."""
        self._registration = msgspec.structs.replace(self._registration, trusted=False)

    def _session_moved(self, state: SessionState) -> None:
        if state is SessionState.CONNECTED and self._session.generation != self._generation:
            self._start_again()

    def _seen(self, node: Node | None) -> None:
        """What stands where this broker is registered."""
        if self._session.generation != self._generation:
            return  # registered again in any case
        if node is None or node.ephemeral_owner != self._session.session_id:
            self._taken_away = True
            self._start_again()

    def _start_again(self) -> None:
        if self._task is None or self._task.done():
            self._task = asyncio.get_running_loop().create_task(self._register_again(), name="register broker")

    async def _register_again(self) -> None:
        """Until it is done: nothing else would try again, and an unregistered broker hears of nothing any more. Unless
        another broker has the id for two session timeouts: a dead one's registration would be gone by then. Source:
        Kafka, which ends a broker whose id is registered (NodeExists, DUPLICATE_BROKER_REGISTRATION)."""
        while self._taken_away or self._session.generation != self._generation:
            taken, self._taken_away = self._taken_away, False
            try:
                incarnation = await self._register(timeout_ms=2 * self._session.session_timeout_ms)
                if incarnation == self.incarnation:  # seen missing just before it was made
                    continue
                self.incarnation = incarnation
                why = "its registration was taken away" if taken else "a session expiry"
                log.warning("registered again as incarnation %d after %s", self.incarnation, why)
                if self._on_registered is not None:
                    self._on_registered(self.incarnation)
                if self._stopping:
                    await self._tell_stopping()
            except ZkUnreachable:
                return  # only once the session is closed
            except BrokerIdTaken as error:
                log.critical("cannot register again: %s", error)
                if self._on_failed is not None:
                    self._on_failed(error)
                return
            except ClusterError as error:
                log.error("cannot register again, trying on: %s", error)
                if self._on_failed is not None:
                    self._on_failed(error)
                self._taken_away = self._taken_away or taken
                await asyncio.sleep(PAUSE_S)

    async def _register(self, *, timeout_ms: int) -> int:
        """Register in the current session, whatever state an earlier attempt left behind."""
        deadline = asyncio.get_running_loop().time() + timeout_ms / 1000
        while True:
            generation = self._session.generation
            try:
                incarnation = await self._try_register()
            except ZkUnreachable:
                await self._session.connected()
                continue
            except ZkMultiFailed as error:
                log.info("registration of broker %d: %s; looking again", self._registration.broker_id, error)
                if asyncio.get_running_loop().time() > deadline:
                    raise await self._who_holds_it() from None
                continue
            if incarnation is not None and generation == self._session.generation:
                await self._note(incarnation)
                self._generation = generation
                return incarnation
            if asyncio.get_running_loop().time() > deadline:
                raise await self._who_holds_it()
            if incarnation is None:
                await self._changed(paths.broker(self._registration.broker_id), deadline)

    async def _try_register(self) -> int | None:
        """One attempt. None: another process's registration is in the way, which may expire.

        Raises:
            ZkMultiFailed: what was read first changed meanwhile.
        """
        mine, session = self._registration, self._session
        ids, counter, untrusted = (
            paths.broker(mine.broker_id),
            paths.incarnation(mine.broker_id),
            paths.untrusted(mine.broker_id),
        )
        await session.ensure(counter)
        version = (await session.get(counter)).version
        ops: list[Op] = []
        try:
            node = await session.get(ids)
        except ZkNoNode:
            pass
        else:
            held = codecs.decode_broker(ids, node.data, mine.broker_id)
            if node.ephemeral_owner == session.session_id and held.incarnation == version:
                return version  # our own, whose answer was lost with the connection
            if node.ephemeral_owner != session.session_id and not _same_place(held, mine):
                return None
            # A registration of this log directory's previous session or process: its lock is ours now, so it is
            # dead. Waiting for ZooKeeper to notice would cost a session timeout.
            ops.append(Delete(ids, node.version))
        # A process that could not vouch for its log may have come and gone without a controller to act on it.
        mark = await self._mark(untrusted)
        marked = mark is not None
        # This very process was untrusted and a controller has acted on it: its log is whole from then on.
        trusted = mine.trusted or (self.incarnation != NO_EPOCH and not marked)
        if self._behind(version):
            log.error("broker %d: the log directory is not the one of incarnation %d", mine.broker_id, version)
            trusted = False
        if trusted:
            # Before: a process that ends in between must not find its directory behind. An untrusted one notes it
            # after: until the mark stands nobody else knows.
            await self._note(version + 1)
        name = codecs.encode(codecs.CounterNode(version + 1))
        if mark is not None:
            # It is this incarnation's from now on. A controller that has acted on the one before may be about to take
            # it away: then the multi fails, and what stands is looked at again.
            ops.append(SetData(untrusted, name, mark.version))
        elif not trusted:
            ops.append(Create(untrusted, name))
        claim = msgspec.structs.replace(mine, incarnation=version + 1, trusted=trusted and not marked)
        ops.append(Create(ids, codecs.encode_broker(claim), ephemeral=True))
        # It stays when the session ends: a new controller knows where to find those it misses.
        ops.append(SetData(counter, codecs.encode_broker(claim), version))
        return int((await session.multi(ops))[-1])

    async def _mark(self, path: str) -> Node | None:
        try:
            return await self._session.get(path)
        except ZkNoNode:
            return None

    def _behind(self, registered: int) -> bool:
        """Whether an incarnation was registered of which the log directory does not know."""
        known = self._directory.incarnation if self._directory is not None else None
        return known is not None and registered > known

    async def _note(self, incarnation: int) -> None:
        directory = self._directory
        if directory is None or directory.incarnation == incarnation:
            return
        try:
            await asyncio.to_thread(directory.note_incarnation, incarnation)
        except OSError as error:  # a full disk: the next process counts as untrusted
            log.warning("incarnation %d is not noted in the log directory: %s", incarnation, error)

    async def _changed(self, path: str, deadline: float) -> None:
        """Wait for the node to change, at most until ``deadline``."""
        fired = asyncio.Event()
        try:
            if await self._session.exists(path, on_change=fired.set):
                left = deadline - asyncio.get_running_loop().time()
                await asyncio.wait_for(fired.wait(), max(0.01, left))
        except (TimeoutError, asyncio.TimeoutError, ZkUnreachable):
            return

    async def _who_holds_it(self) -> ClusterError:
        mine = self._registration
        try:
            node = await self._session.get(paths.broker(mine.broker_id))
        except (ZkNoNode, ZkUnreachable):
            return ClusterError(f"broker id {mine.broker_id} could not be registered in time")
        held = codecs.decode_broker(paths.broker(mine.broker_id), node.data, mine.broker_id)
        if _same_place(held, mine):
            return ClusterError(
                f"broker id {mine.broker_id} could not be registered over incarnation {held.incarnation}"
            )
        return BrokerIdTaken(
            f"broker id {held.broker_id} is registered by {held.host}:{held.port} (incarnation {held.incarnation}), "
            f"not by this broker at {mine.host}:{mine.port}"
        )


def pid_namespace() -> int:
    """Which processes pids are numbered among here; a container has its own, with the boot id of its host. 0 where the
    system does not say."""
    try:
        return Path("/proc/self/ns/pid").stat().st_ino
    except OSError:
        return 0


def _same_place(one: BrokerRegistration, other: BrokerRegistration) -> bool:
    return (one.host, one.boot_id) == (other.host, other.boot_id)
