"""Keeps one broker process registered: the incarnation it has, and a new one after each session expiry, or when
somebody took the registration of the living process away (it looked dead to them, or was deleted by hand).

Registration is one multi: create ``/brokers/ids/<id>`` (ephemeral) and set ``/brokers/incarnations/<id>``, whose
version afterwards is the incarnation. So two registrations can never share one, and others can bind a write to it.
The caller holds the lock of the log directory the broker id lives in. A registration of a process of this host that has
ended is a leftover and is replaced at once; one of a process that lives is another broker's, whose directory and this
one are copies of each other: the broker that registers ends then (``registration_holder``).

A log directory that has not heard of the last incarnation is not the one that incarnation wrote in (emptied while its
broker was down, or an older copy): what is missing in it may have been acknowledged, so the registration is untrusted.
Where only some logs are in doubt the registration names their partitions, and so does the mark.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable, Collection
from contextlib import suppress
from typing import Protocol

import msgspec

from sparklog.errors import ClusterError
from sparklog.model import NO_EPOCH, BrokerRegistration, SeenNumbers, TopicPartition, host_and_port
from sparklog.zk import codecs, paths
from sparklog.zk.errors import (
    BrokerIdTaken,
    ZkBadVersion,
    ZkError,
    ZkMultiFailed,
    ZkNodeExists,
    ZkNoNode,
    ZkUnreachable,
)
from sparklog.zk.registration_holder import is_over, pid_namespace, same_host, start_time
from sparklog.zk.session import PAUSE_S, Create, Delete, Node, Op, SessionState, SetData, ZkSession

log = logging.getLogger(__name__)

#: A registration that doubts more partitions than this doubts all: a node holds a megabyte.
_DOUBTS_NAMED = 1000


#: Seconds after which a process that holds the broker's id is looked for again.
_LOOK_AGAIN_S = 1.0
#: Incarnations by which an older ZooKeeper is raised at most, and in one multi.
_MOST_RAISED = 100_000
_RAISED_AT_ONCE = 1000


class LastIncarnation(Protocol):
    """What a log directory knows of its broker's registrations."""

    @property
    def incarnation(self) -> int | None:
        """None: it cannot say."""

    def note_incarnation(self, incarnation: int) -> None:
        """Durable on return; called in a thread. Raises OSError."""

    @property
    def counted(self) -> int:
        """The broker's last incarnation that ZooKeeper has counted; -1: it cannot say."""

    def note_counted(self, incarnation: int) -> None:
        """Durable on return; called in a thread. Raises OSError."""

    def seen(self) -> SeenNumbers:
        """What a registration says of the numbers seen."""


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
        pid = os.getpid()
        self._registration = msgspec.structs.replace(
            registration, pid=pid, pid_namespace=pid_namespace(), start_time=start_time(pid)
        )
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
            BrokerIdTaken: the id is held by another broker that does not go away within ``timeout_ms``.
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
        self._registration = msgspec.structs.replace(self._registration, trusted=True, doubted=())

    async def doubt_directory(self) -> None:
        """Have the next process on this log directory register as untrusted: count an incarnation that the directory
        has not heard of. For a disk that has failed, and may not take a note of that itself. The addition of this
        broker to an ISR fails from now on, as it is bound to the incarnation.

        Raises:
            ZkUnreachable: the session was closed.
        """
        path = paths.incarnation(self._registration.broker_id)

        async def count() -> bool:
            node = await self._session.get(path)
            with suppress(ZkBadVersion):
                await self._session.set(path, node.data, node.version)
                return True
            return False

        while not await self._session.patiently(count):
            pass

    def doubt(self, partitions: Collection[TopicPartition]) -> None:
        """Before ``start``: the logs of these partitions may lack acknowledged records. Of too many for a node, all
        logs are doubted."""
        mine = self._registration
        if partitions and mine.trusted:
            named = tuple(partitions) if len(partitions) <= _DOUBTS_NAMED else ()
            self._registration = msgspec.structs.replace(mine, trusted=False, doubted=named)

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
                log.warning("re-registered as incarnation %d after %s", self.incarnation, why)
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
                log.error("could not register again, retrying: %s", error)
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
                log.info("registration of broker %d: %s; reading it again", self._registration.broker_id, error)
                if asyncio.get_running_loop().time() > deadline:
                    raise await self._who_holds_it() from None
                continue
            if incarnation is not None and generation == self._session.generation:
                await self._note(incarnation)
                await self._note_counted(incarnation)
                self._generation = generation
                return incarnation
            if asyncio.get_running_loop().time() > deadline:
                raise await self._who_holds_it()
            if incarnation is None:
                # A process that ends meanwhile leaves the node as it is until its session ends.
                look_again = min(deadline, asyncio.get_running_loop().time() + _LOOK_AGAIN_S)
                await self._changed(paths.broker(self._registration.broker_id), look_again)

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
        version = await self._raised(counter, await session.get(counter))
        ops: list[Op] = []
        try:
            node = await session.get(ids)
        except ZkNoNode:
            pass
        else:
            held = self._held(ids, node)
            own = node.ephemeral_owner == session.session_id
            if own and held is not None and held.incarnation == version:
                return version  # our own, whose answer was lost with the connection
            # What no session holds would never go, and is no broker's.
            if node.ephemeral_owner and not own and (held is None or not is_over(held, mine)):
                return None
            # A registration of this broker's previous session or process. Waiting for ZooKeeper to notice its end would
            # cost a session timeout.
            ops.append(Delete(ids, node.version))
        # A process that could not vouch for its log may have come and gone without a controller to act on it.
        mark = await self._mark(untrusted)
        marked = mark is not None
        # This very process was untrusted and a controller has acted on it: its log is whole from then on.
        trusted = mine.trusted or (self.incarnation != NO_EPOCH and not marked)
        doubted = () if trusted else mine.doubted
        if self._behind(version):
            log.error("broker %d: the log directory does not belong to incarnation %d", mine.broker_id, version)
            trusted, doubted = False, ()
        if trusted:
            # Before: a process that ends in between must not find its directory behind. An untrusted one notes it
            # after: until the mark stands nobody else knows.
            await self._note(version + 1)
        if mark is not None:
            doubted = _both(untrusted, mark, doubted, trusted=trusted)
        name = codecs.encode(codecs.UntrustedNode(version + 1, partitions=tuple((t, p) for t, p in doubted)))
        if mark is not None:
            # It is this incarnation's from now on. A controller that has acted on the one before may be about to take
            # it away: then the multi fails, and what stands is looked at again.
            ops.append(SetData(untrusted, name, mark.version))
        elif not trusted:
            ops.append(Create(untrusted, name))
        claim = msgspec.structs.replace(mine, incarnation=version + 1, trusted=trusted and not marked, doubted=doubted)
        if self._directory is not None:
            claim = msgspec.structs.replace(claim, seen=self._directory.seen())
        ops.append(Create(ids, codecs.encode_broker(claim), ephemeral=True))
        # It stays when the session ends: a new controller knows where to find those it misses.
        ops.append(SetData(counter, codecs.encode_broker(claim), version))
        return int((await session.multi(ops))[-1])

    async def _raised(self, path: str, node: Node) -> int:
        """Return the version of the incarnation node, raised to the last incarnation that ZooKeeper has counted before:
        where it is lower, ZooKeeper was put back from an older copy, and would count the same ones a second time.

        Raises:
            ClusterError: it is lower by more than ``_MOST_RAISED``.
            ZkMultiFailed: what was read has changed meanwhile.
        """
        version, counted = node.version, self._directory.counted if self._directory is not None else -1
        if counted <= version:
            return version
        mine = self._registration.broker_id
        older = f"ZooKeeper is older than broker {mine}: it counts incarnation {version}, and {counted} was registered"
        if counted - version > _MOST_RAISED:
            raise ClusterError(
                f"{older}; a gap above {_MOST_RAISED} is not corrected: restore a newer copy of ZooKeeper's data, or"
                " run `sparklog zookeeper rebuild`"
            )
        log.error("%s; raising the number", older)
        while version < counted:
            end = min(counted, version + _RAISED_AT_ONCE)
            await self._session.multi([SetData(path, node.data, at) for at in range(version, end)])
            version = end
        return version

    def _held(self, path: str, node: Node) -> BrokerRegistration | None:
        """Return what is registered there, None where it cannot be read."""
        try:
            return codecs.decode_broker(path, node.data, self._registration.broker_id)
        except codecs.ZkFormatError as error:
            log.error("could not read this broker's registration: %s", error)
            return None

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
            log.warning("could not record incarnation %d in the log directory: %s", incarnation, error)

    async def _note_counted(self, incarnation: int) -> None:
        if self._directory is None or self._directory.counted >= incarnation:
            return
        try:
            await asyncio.to_thread(self._directory.note_counted, incarnation)
        except OSError as error:  # a full disk: an older ZooKeeper may not be noticed
            log.warning("could not record in the log directory that incarnation %d is counted: %s", incarnation, error)

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
        held = self._held(paths.broker(mine.broker_id), node)
        if held is None or is_over(held, mine):
            what = "what cannot be read" if held is None else f"incarnation {held.incarnation}"
            return ClusterError(f"broker id {mine.broker_id} could not be registered over {what}")
        registered = f"broker id {held.broker_id} is registered by {host_and_port(held.host, held.port)}"
        if same_host(held, mine):
            return BrokerIdTaken(
                f"{registered} (incarnation {held.incarnation}, pid {held.pid}), another process of this host, and not"
                f" by this broker with pid {mine.pid}: one of their log directories is a copy of the other. Keep one"
                " of them, and start the other broker on an empty directory"
            )
        return BrokerIdTaken(
            f"{registered} (incarnation {held.incarnation}), not by this broker at"
            f" {host_and_port(mine.host, mine.port)}"
        )


def _both(path: str, mark: Node, doubted: tuple[TopicPartition, ...], *, trusted: bool) -> tuple[TopicPartition, ...]:
    """Return the partitions that the mark doubts or that this process doubts; empty: all of them."""
    try:
        found = codecs.decode(path, mark.data, codecs.UntrustedNode).partitions
    except codecs.ZkFormatError as error:
        log.error("%s; all logs of this broker are untrusted", error)
        return ()
    marked = tuple(TopicPartition(*pair) for pair in found)
    if trusted or not marked:
        return marked
    both = tuple(dict.fromkeys((*marked, *doubted))) if doubted else ()
    return both if len(both) <= _DOUBTS_NAMED else ()
