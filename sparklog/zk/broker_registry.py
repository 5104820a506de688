"""The registration of one broker process, which is renewed after each session expiry or deletion of its node.

Each registration has a new incarnation. A supervisor that believes a live process dead may delete the node of the
process.

A registration is one multi (ZooKeeper transaction): it creates ``/brokers/ids/<id>`` (ephemeral) and sets
``/brokers/incarnations/<id>``. The version of the second node is then the incarnation. So two registrations never have
the same incarnation, and other writes can check the incarnation. The caller holds the lock of the log directory that
has the broker id. If the process of an existing registration on this host has ended, the registration is stale and is
replaced at once. If that process is live, it is another broker, and one of the two log directories is a copy of the
other: the broker that tries to register then ends (``registration_holder``).

If a log directory has not recorded the last incarnation, then it is not the directory that this incarnation wrote to.
The directory was emptied while the broker was down, or is an older copy. Its logs may lack acknowledged records, so the
registration is *untrusted*, and the node ``/brokers/untrusted/<id>`` marks it. If only some logs may lack records, the
registration and the mark name their partitions.
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

#: The maximum number of doubtful partitions that a registration names, because a node holds at most one megabyte. With
#: more, all logs are untrusted.
_DOUBTS_NAMED = 1000


#: The interval in seconds of the checks whether the process that holds the broker's id has ended.
_CHECK_AGAIN_S = 1.0
#: The maximum number by which an incarnation is raised if ZooKeeper was restored from an older copy: in total, and in
#: one multi.
_MOST_RAISED = 100_000
_RAISED_AT_ONCE = 1000


class LastIncarnation(Protocol):
    """The part of a log directory that ``BrokerRegistry`` uses: the record of the broker's registrations."""

    @property
    def incarnation(self) -> int | None:
        """Return the last incarnation of the broker that used this directory, or None if it is unknown."""

    def note_incarnation(self, incarnation: int) -> None:
        """Store durably that this incarnation uses the directory. Call it in a worker thread. Raises OSError."""

    @property
    def counted(self) -> int:
        """Return the broker's last registered incarnation, or -1 if it is unknown."""

    def note_counted(self, incarnation: int) -> None:
        """Store the last registered incarnation durably. Call it in a worker thread. Raises OSError."""

    def seen(self) -> SeenNumbers:
        """Return the highest epochs and ids of the cluster that are recorded in this directory."""


class BrokerRegistry:
    """A component that keeps one broker registered in ZooKeeper.

    ``start`` registers the broker. When its session has expired or its node was deleted, the broker registers again,
    and ``on_registered`` is called with the new incarnation. ``close`` stops the renewal of the registration, but does
    not end the session.

    Not thread-safe: use it only on the broker's event loop.
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
        self._stopping_lock = asyncio.Lock()
        self._task: asyncio.Task[None] | None = None
        self._undo: list[Callable[[], None]] = []
        #: Whether the node was deleted or replaced while the session continued.
        self._taken_away = False
        #: The current incarnation. After a session expiry it stays the old one until the new registration succeeds.
        self.incarnation = NO_EPOCH

    @property
    def registration(self) -> BrokerRegistration:
        return msgspec.structs.replace(self._registration, incarnation=self.incarnation)

    async def start(self, *, timeout_ms: int = 30_000) -> int:
        """Register the broker, and keep it registered until ``close``. Return the incarnation.

        Raises:
          BrokerIdTaken: another broker has been registered with this id for longer than ``timeout_ms``.
          ClusterError: the registration has not succeeded within twice that time.
        """
        try:
            self.incarnation = await asyncio.wait_for(self._register(timeout_ms=timeout_ms), timeout_ms * 2 / 1000)
        except asyncio.TimeoutError:
            mine = self._registration.broker_id
            raise ClusterError(f"broker id {mine} could not be registered within {timeout_ms * 2} ms") from None
        self._undo.append(self._session.add_listener(self._session_moved))
        self._undo.append(self._session.watch_data(paths.broker(self._registration.broker_id), self._on_node))
        self._session_moved(self._session.state)  # The session may have expired since the registration.
        return self.incarnation

    async def close(self) -> None:
        while self._undo:
            self._undo.pop()()
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def announce_stopping(self) -> None:
        """Request that the controller move this broker's leaderships away.

        The request disappears with the session, and is stored again in a new session. The method returns when the
        request is stored, or when ``withdraw_stopping`` was called meanwhile and no request is stored.
        """
        self._stopping = True
        await self._write_stopping()

    async def withdraw_stopping(self) -> None:
        """Withdraw the request of ``announce_stopping``, because this broker does not stop.

        The method returns when no request is stored, or when ``announce_stopping`` was called meanwhile and a request
        is stored again.
        """
        self._stopping = False
        await self._write_stopping()

    async def _write_stopping(self) -> None:
        """Write or delete the node until it has the wanted state.

        An earlier session or a request without a response may have left another state. Only one call runs at a time:
        otherwise a retry of one call could create the node that another call has just deleted.
        """
        path = paths.stopping(self._registration.broker_id)
        async with self._stopping_lock:
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
                    log.warning(
                        "broker %d: retrying the write of its stopping state: %s", self._registration.broker_id, error
                    )
                    await asyncio.sleep(PAUSE_S)

    async def _put_stopping(self, path: str) -> None:
        """Create or replace the node. Raises ZkNoNode or ZkNodeExists if another client changes it at the same time."""
        value = codecs.encode(codecs.StoppingNode(self.incarnation))
        with suppress(ZkNodeExists):
            await self._session.create(path, value, ephemeral=True)
            return
        node = await self._session.get(path)
        if node.ephemeral_owner != self._session.session_id or node.data != value:
            await self._session.delete(path)  # The node belongs to an earlier session of this broker.
            await self._session.create(path, value, ephemeral=True)

    async def _remove(self, path: str) -> None:
        with suppress(ZkNoNode):
            await self._session.delete(path)

    def mark_trusted(self) -> None:
        """Record that a controller trusts this incarnation, so that this process registers as trusted from now on.

        That is safe, because the logs of a running process lose no records when its session expires. While the node
        ``/brokers/untrusted/<id>`` exists, a registration is untrusted in any case.
        """
        self._registration = msgspec.structs.replace(self._registration, trusted=True, doubted=())

    async def doubt_directory(self) -> None:
        """Make the next process on this log directory register as untrusted, because the directory's disk has failed.

        A failed disk may be unable to record anything. So this method raises the broker's incarnation in ZooKeeper
        above the one that the directory has recorded. From now on no leader can add this broker to an ISR, because the
        write of the ISR checks the incarnation.

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
        """Make ``start`` register the broker as untrusted for these partitions.

        The logs of these partitions may lack acknowledged records. If there are too many partitions for one node, the
        broker registers as untrusted for all its partitions.
        """
        mine = self._registration
        if partitions and mine.trusted:
            named = tuple(partitions) if len(partitions) <= _DOUBTS_NAMED else ()
            self._registration = msgspec.structs.replace(mine, trusted=False, doubted=named)

    def _session_moved(self, state: SessionState) -> None:
        if state is SessionState.CONNECTED and self._session.generation != self._generation:
            self._start_again()

    def _on_node(self, node: Node | None) -> None:
        """Check the node at this broker's registration path."""
        if self._session.generation != self._generation:
            return  # The broker registers again in any case.
        if node is None or node.ephemeral_owner != self._session.session_id:
            self._taken_away = True
            self._start_again()

    def _start_again(self) -> None:
        if self._task is None or self._task.done():
            self._task = asyncio.get_running_loop().create_task(self._register_again(), name="register broker")

    async def _register_again(self) -> None:
        """Register again. Retry until it succeeds, because an unregistered broker receives no updates.

        Give up if another broker has had the id for two session timeouts, because the registration of a dead broker
        would be gone by then. Source: Kafka, where a broker ends if its id is already registered (NodeExists,
        DUPLICATE_BROKER_REGISTRATION).
        """
        while self._taken_away or self._session.generation != self._generation:
            taken, self._taken_away = self._taken_away, False
            try:
                incarnation = await self._register(timeout_ms=2 * self._session.session_timeout_ms)
                if incarnation == self.incarnation:  # The node exists after all.
                    continue
                self.incarnation = incarnation
                why = "its registration was deleted" if taken else "a session expiry"
                log.warning("re-registered as incarnation %d after %s", self.incarnation, why)
                if self._on_registered is not None:
                    self._on_registered(self.incarnation)
                if self._stopping:
                    await self._write_stopping()
            except ZkUnreachable:
                return  # This happens only after the session is closed.
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
        """Register in the current session, even if an earlier attempt got no response."""
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
                    raise await self._taken_error() from None
                continue
            if incarnation is not None and generation == self._session.generation:
                await self._note(incarnation)
                await self._note_counted(incarnation)
                self._generation = generation
                return incarnation
            if asyncio.get_running_loop().time() > deadline:
                raise await self._taken_error()
            if incarnation is None:
                # Check again after a pause even without a change: the process that holds the id may end, and its node
                # stays until its session ends.
                check_again = min(deadline, asyncio.get_running_loop().time() + _CHECK_AGAIN_S)
                await self._changed(paths.broker(self._registration.broker_id), check_again)

    async def _try_register(self) -> int | None:
        """Try once to register. Return None if another process holds a registration, which may expire.

        Raises:
          ZkMultiFailed: a node that was read changed meanwhile.
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
            held = self._read_registration(ids, node)
            own = node.ephemeral_owner == session.session_id
            if own and held is not None and held.incarnation == version:
                return version  # This process has registered already, but the response was lost.
            # A node without a session is no broker's and would never disappear, so it is replaced.
            if node.ephemeral_owner and not own and (held is None or not is_over(held, mine)):
                return None
            # The registration is of this broker's previous session or process. Delete it, because waiting until
            # ZooKeeper deletes it would take a session timeout.
            ops.append(Delete(ids, node.version))
        # An earlier untrusted process may have ended before a controller handled its mark.
        mark = await self._mark(untrusted)
        marked = mark is not None
        # If this process was untrusted before and the mark is gone, a controller has handled it, and the logs have been
        # complete since then.
        trusted = mine.trusted or (self.incarnation != NO_EPOCH and not marked)
        doubted = () if trusted else mine.doubted
        if self._is_outdated(version):
            log.error("broker %d: the log directory does not belong to incarnation %d", mine.broker_id, version)
            trusted, doubted = False, ()
        if trusted:
            # A trusted process records the incarnation before it registers: if it ends in between, its directory must
            # not seem outdated. An untrusted process records it after it has registered, because until the mark exists
            # nothing else records the doubt.
            await self._note(version + 1)
        if mark is not None:
            doubted = _doubted(untrusted, mark, doubted, trusted=trusted)
        name = codecs.encode(codecs.UntrustedNode(version + 1, partitions=tuple((t, p) for t, p in doubted)))
        if mark is not None:
            # Bind the mark to the new incarnation. If a controller, which has handled the previous incarnation, deletes
            # the mark at the same time, this multi fails, and the next attempt reads the mark again.
            ops.append(SetData(untrusted, name, mark.version))
        elif not trusted:
            ops.append(Create(untrusted, name))
        claim = msgspec.structs.replace(mine, incarnation=version + 1, trusted=trusted and not marked, doubted=doubted)
        if self._directory is not None:
            claim = msgspec.structs.replace(claim, seen=self._directory.seen())
        ops.append(Create(ids, codecs.encode_broker(claim), ephemeral=True))
        # This node remains after the session, so that a new controller knows absent brokers.
        ops.append(SetData(counter, codecs.encode_broker(claim), version))
        return int((await session.multi(ops))[-1])

    async def _raised(self, path: str, node: Node) -> int:
        """Return the version of the incarnation node, after raising it to the last incarnation of the log directory.

        If the version is lower, ZooKeeper was restored from an older copy and would assign the same incarnations a
        second time.

        Raises:
          ClusterError: the version is lower by more than ``_MOST_RAISED``. ZkMultiFailed: a node that was read changed
          meanwhile.
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

    def _read_registration(self, path: str, node: Node) -> BrokerRegistration | None:
        """Return the registration at this path, or None if it is unreadable."""
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

    def _is_outdated(self, registered: int) -> bool:
        """Return whether a later incarnation was registered than the log directory has recorded."""
        known = self._directory.incarnation if self._directory is not None else None
        return known is not None and registered > known

    async def _note(self, incarnation: int) -> None:
        directory = self._directory
        if directory is None or directory.incarnation == incarnation:
            return
        try:
            await asyncio.to_thread(directory.note_incarnation, incarnation)
        except OSError as error:  # The disk may be full. The next process will count as untrusted.
            log.warning("could not record incarnation %d in the log directory: %s", incarnation, error)

    async def _note_counted(self, incarnation: int) -> None:
        if self._directory is None or self._directory.counted >= incarnation:
            return
        try:
            await asyncio.to_thread(self._directory.note_counted, incarnation)
        except OSError as error:  # The disk may be full. An older copy of ZooKeeper may then not be detected.
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

    async def _taken_error(self) -> ClusterError:
        mine = self._registration
        try:
            node = await self._session.get(paths.broker(mine.broker_id))
        except (ZkNoNode, ZkUnreachable):
            return ClusterError(f"broker id {mine.broker_id} could not be registered in time")
        held = self._read_registration(paths.broker(mine.broker_id), node)
        if held is None or is_over(held, mine):
            what = "an unreadable registration" if held is None else f"incarnation {held.incarnation}"
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


def _doubted(
    path: str, mark: Node, doubted: tuple[TopicPartition, ...], *, trusted: bool
) -> tuple[TopicPartition, ...]:
    """Return the partitions whose logs may lack records, by the mark or by this process. Empty means all partitions."""
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
