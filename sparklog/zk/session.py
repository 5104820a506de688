"""One ZooKeeper session for one asyncio loop.

Only this module and ``kazoo_patches`` know kazoo.

kazoo uses its own threads. Its callbacks only pass a result to the event loop (``call_soon_threadsafe``; one wake-up
may pass several results). Every request returns a future at once, so callers can start many requests and then await
them.

Invariants: at most ``WINDOW`` requests are in kazoo at a time. While the session is not connected, a request fails at
once with ``sent`` false, instead of waiting in an unbounded queue. If the connection breaks, a request in flight fails
with ``sent`` true. A new session after an expiry has a new ``generation``.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import suppress
from enum import Enum
from functools import partial
from typing import Any, NamedTuple, TypeVar

from kazoo import exceptions as kazoo_errors
from kazoo.client import KazooClient, KazooRetry
from kazoo.handlers.threading import KazooTimeoutError
from kazoo.protocol.states import KazooState

from sparklog.errors import ClusterError
from sparklog.protocol.proof import KeyRing
from sparklog.zk import paths
from sparklog.zk.errors import (
    ZkBadVersion,
    ZkError,
    ZkMultiFailed,
    ZkNoAuth,
    ZkNodeExists,
    ZkNoNode,
    ZkNotEmpty,
    ZkUnreachable,
)
from sparklog.zk.kazoo_patches import (
    CLOSED,
    OPEN_TO_ALL,
    SECRET,
    AclEntry,
    Connections,
    KazooHandler,
    Multi,
    acl_bytes,
    acl_entries,
    kazoo_acl,
)
from sparklog.zk.multi_batcher import MultiBatcher
from sparklog.zk.ops import Check, Create, Delete, Op, SetData
from sparklog.zk.security import Masked, ZooKeeperSecurity

#: The maximum number of requests in kazoo at a time. For each request kazoo writes one byte to a blocking socket pair,
#: to wake its thread, and the socket pair holds a few hundred bytes. More requests would block the event loop until
#: ZooKeeper responds, or forever if it does not.
WINDOW = 128
#: The pause before a retry of a request that ZooKeeper refused for an unknown reason.
PAUSE_S = 0.2

_T = TypeVar("_T")
log = logging.getLogger(__name__)
_kazoo_log = logging.getLogger("sparklog.zk.kazoo")


class SessionState(Enum):
    """The state of a ZooKeeper session.

    In the state ``DISCONNECTED`` the session may still exist in ZooKeeper. Only ZooKeeper decides that it is
    ``EXPIRED``.
    """

    CONNECTING = "connecting"
    CONNECTED = "connected"
    DISCONNECTED = "disconnected"
    EXPIRED = "expired"
    CLOSED = "closed"


class Node(NamedTuple):
    """A ZooKeeper node as read: its value and version.

    ``ephemeral_owner`` is the id of the session that created an ephemeral node, or 0 for a persistent node.
    """

    data: bytes
    version: int
    ephemeral_owner: int


__all__ = ["PAUSE_S", "WINDOW", "Check", "Create", "Delete", "Node", "Op", "SessionState", "SetData", "ZkSession"]

_STATES = {
    KazooState.CONNECTED: SessionState.CONNECTED,
    KazooState.SUSPENDED: SessionState.DISCONNECTED,
    KazooState.LOST: SessionState.EXPIRED,
}


class ZkSession:
    """A ZooKeeper session. Create it with ``open``, and end it with ``close``.

    Not thread-safe: call every method on the event loop on which ``open`` was called.
    """

    def __init__(
        self,
        connect: str,
        *,
        session_timeout_ms: int,
        client_id: tuple[int, bytes] | None = None,
        keys: KeyRing | None = None,
        security: ZooKeeperSecurity | None = None,
    ) -> None:
        hosts, _, chroot = connect.partition("/")
        self._root = f"/{chroot.strip('/')}" if chroot.strip("/") else ""
        self.connect_string = connect
        self.session_timeout_ms = session_timeout_ms
        self.state = SessionState.CONNECTING
        #: The number of sessions so far; each expiry leads to a new one.
        self.generation = 0
        self.session_id = 0
        self._keys = KeyRing() if keys is None else keys
        self.security = ZooKeeperSecurity() if security is None else security
        credentials = self.security.credentials()
        if self.security.tls:
            self.security.context()  # A file that cannot be used fails here, and not in kazoo's thread.
        self._use_acls(
            CLOSED if self.security.has_identity and self.security.set_acl else OPEN_TO_ALL,
            SECRET if self.security.has_identity else OPEN_TO_ALL,
        )
        self._loop = asyncio.get_running_loop()
        self._inbox: deque[Callable[[], None]] = deque()
        self._inbox_scheduled = False
        self._waiting: deque[tuple[Callable[[], Any], asyncio.Future[Any]]] = deque()
        self._in_flight = 0
        self._listeners: list[Callable[[SessionState], None]] = []
        self._connected = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        self._batcher = MultiBatcher(self.multi)
        self._handler = handler = KazooHandler(self.security.context if self.security.tls else None)
        # kazoo's default back-off rises to a minute, so that sessions expired although ZooKeeper was available again.
        delay_s = session_timeout_ms / 10_000
        retry = KazooRetry(
            max_tries=-1, delay=min(0.05, delay_s), backoff=2, max_delay=delay_s, sleep_func=handler.sleep_func
        )
        self._client = KazooClient(
            hosts=hosts,
            timeout=session_timeout_ms / 1000,
            client_id=client_id,
            handler=handler,
            connection_retry=retry,
            logger=_kazoo_log,
            use_ssl=self.security.tls,
            # kazoo proves them on each new connection, before the first request.
            auth_data=[("digest", credential) for credential in credentials],
        )
        self._client._connection = Connections(self._client, self._client._conn_retry.copy(), logger=_kazoo_log)
        self._client.add_listener(self._state_changed)

    @classmethod
    async def open(
        cls,
        connect: str,
        *,
        session_timeout_ms: int = 6000,
        connect_timeout_ms: int = 15_000,
        client_id: tuple[int, bytes] | None = None,
        keys: KeyRing | None = None,
        security: ZooKeeperSecurity | None = None,
    ) -> ZkSession:
        """Connect to ZooKeeper, and create the chroot if it is missing. Return the session.

        ``keys`` are the cluster's secrets, which a protected ZooKeeper requires (see ``protection``). ``security`` has
        the credentials for a ZooKeeper that the operator secures.

        Raises:
          ClusterError: no ZooKeeper responded within ``connect_timeout_ms``, or TLS failed.
          ConfigError: a file that ``security`` names cannot be used.
        """
        session = cls(connect, session_timeout_ms=session_timeout_ms, client_id=client_id, keys=keys, security=security)
        try:
            session._client.start_async()
            await session.connected(timeout_ms=connect_timeout_ms)
            parts = [part for part in session._root.split("/") if part]
            for depth in range(1, len(parts) + 1):
                # Other systems may use the nodes above the chroot.
                acl = session._acl if depth == len(parts) else OPEN_TO_ALL
                await session._ensure("/" + "/".join(parts[:depth]), acl)
            if session._keys:
                await session._begin_protection(timeout_ms=connect_timeout_ms)
        except ZkUnreachable:
            await session.close()
            raise ClusterError(
                f"no ZooKeeper responded at {connect} within {connect_timeout_ms} ms{session._hint()}"
            ) from None
        except BaseException:
            await session.close()
            raise
        return session

    def _hint(self) -> str:
        """Return a part of an error message that says why no connection was possible."""
        if self._handler.tls_failure:
            return f": TLS failed: {self._handler.tls_failure}"
        return ""

    async def close(self) -> None:
        """End the session, which deletes its ephemeral nodes, and wait until kazoo's threads have ended."""
        if self.state is SessionState.CLOSED:
            return
        self._move(SessionState.CLOSED)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await asyncio.to_thread(self._stop_client)
        self._drain()

    def _stop_client(self) -> None:
        """Stop kazoo.

        Called in a thread, because kazoo waits for its own threads, about ten seconds at most if ZooKeeper does not
        respond.
        """
        try:
            self._client.stop()
            self._client.close()
        except Exception as error:
            # kazoo's thread hangs on a dead connection. It is a daemon thread, and the session expires on its own.
            log.warning("could not close kazoo: %s", error)

    @property
    def client_id(self) -> tuple[int, bytes] | None:
        """Return the session id and password. With them another client can take over or end this session."""
        found: tuple[int, bytes] | None = self._client.client_id
        return found

    async def connected(self, *, timeout_ms: int | None = None) -> None:
        """Wait until the session is connected.

        Raises ZkUnreachable if the session is closed, or after ``timeout_ms``.
        """
        if timeout_ms is not None:
            try:
                await asyncio.wait_for(self.connected(), timeout_ms / 1000)
            except asyncio.TimeoutError:
                raise ZkUnreachable(f"the ZooKeeper session was not connected within {timeout_ms} ms") from None
            return
        while self.state is not SessionState.CONNECTED:
            if self.state is SessionState.CLOSED:
                raise ZkUnreachable("the ZooKeeper session is closed")
            await self._connected.wait()

    def add_listener(self, listener: Callable[[SessionState], None]) -> Callable[[], None]:
        """Call ``listener`` on the event loop after each change of ``state``.

        Return a function that removes the listener.
        """
        self._listeners.append(listener)

        def remove() -> None:
            with suppress(ValueError):
                self._listeners.remove(listener)

        return remove

    # --- protection ----------------------------------------------------------------------------------------------

    async def authenticate(self) -> None:
        """Prove to ZooKeeper that this session knows the cluster's secrets, on this and every later connection.

        From then on, the nodes that this session creates cannot be changed by sessions without the secrets. Raises
        ZkUnreachable.
        """
        for secret in self._keys.secrets:
            credential = Masked(f"sparklog:{secret.derive('zookeeper').hex()}")
            await self._submit(partial(self._client.add_auth_async, "digest", credential), lambda _: None)
        self._use_acls(CLOSED, SECRET)

    def _use_acls(self, plain: Sequence[Any], secret: Sequence[Any]) -> None:
        """Create nodes with the ACL ``plain`` from now on, and secret nodes with the ACL ``secret``."""
        self._acl, self._secret_acl = plain, secret
        self._acl_bytes, self._secret_acl_bytes = acl_bytes(plain), acl_bytes(secret)

    @property
    def has_chroot(self) -> bool:
        """Return whether all paths of this session are below a chroot, so that it sees only a part of the tree."""
        return bool(self._root)

    @property
    def keeps_secrets(self) -> bool:
        """Return whether only sessions with this session's credentials can read the secret nodes that it creates."""
        return self._secret_acl is SECRET

    @property
    def closes_nodes(self) -> bool:
        """Return whether only sessions with this session's credentials can change the nodes that it creates."""
        return self._acl is CLOSED

    def _acl_of(self, path: str) -> Sequence[Any]:
        """Return the ACL with which this session creates a node; ``path`` is below the chroot."""
        return self._secret_acl if paths.is_secret(path) else self._acl

    async def _begin_protection(self, *, timeout_ms: int) -> None:
        """Authenticate now if this ZooKeeper is protected, otherwise as soon as it is. Raises ZkUnreachable."""
        looked = asyncio.Event()
        task = self._loop.create_task(self._follow_protection(looked), name="watch for protection")
        self._tasks.add(task)
        task.add_done_callback(self._watch_ended)
        try:
            await asyncio.wait_for(looked.wait(), timeout_ms / 1000)
        except asyncio.TimeoutError:
            raise ZkUnreachable(f"ZooKeeper did not respond within {timeout_ms} ms") from None

    async def _follow_protection(self, looked: asyncio.Event) -> None:
        while True:
            changed = asyncio.Event()
            try:
                await self.connected()
                if await self.exists(paths.PROTECTED, on_change=changed.set):
                    await self.authenticate()
                    looked.set()
                    return  # The protection is never removed.
            except ZkUnreachable:
                if self.state is SessionState.CLOSED:
                    return
                continue
            except ZkError as error:
                log.warning("checking again whether ZooKeeper is protected, after %s", error)
                await asyncio.sleep(PAUSE_S)
                continue
            looked.set()
            await changed.wait()

    # --- requests: each returns a future at once -----------------------------------------------------------------

    def get(self, path: str, *, on_change: Callable[[], None] | None = None) -> asyncio.Future[Node]:
        """Read a node. ``on_change`` is called once: when the node changes or the connection breaks."""
        path, watch = self._root + path, self._watcher(on_change)
        return self._submit(
            lambda: self._client.get_async(path, watch=watch),
            lambda found: Node(found[0] or b"", found[1].version, found[1].ephemeralOwner),
        )

    def exists(self, path: str, *, on_change: Callable[[], None] | None = None) -> asyncio.Future[bool]:
        """Return whether a node exists.

        ``on_change`` is called once: when the node is created, changed or deleted, or the connection breaks.
        """
        path, watch = self._root + path, self._watcher(on_change)
        return self._submit(lambda: self._client.exists_async(path, watch=watch), lambda stat: stat is not None)

    def children(self, path: str, *, on_change: Callable[[], None] | None = None) -> asyncio.Future[tuple[str, ...]]:
        """Return the sorted names of a node's children.

        ``on_change`` is called once: when a child is created or deleted, or the connection breaks.
        """
        path, watch = self._root + path, self._watcher(on_change)
        return self._submit(
            lambda: self._client.get_children_async(path, watch=watch), lambda names: tuple(sorted(names))
        )

    def create(
        self, path: str, data: bytes = b"", *, ephemeral: bool = False, sequence: bool = False
    ) -> asyncio.Future[str]:
        """Create a node. The result is its path, which ends in a number if ``sequence`` is set."""
        acl, path = self._acl_of(path), self._root + path
        return self._submit(
            lambda: self._client.create_async(path, data, acl=acl, ephemeral=ephemeral, sequence=sequence),
            lambda created: str(created)[len(self._root) :],
        )

    def set(self, path: str, data: bytes, version: int = -1) -> asyncio.Future[int]:
        """Write the value of a node that has this version; -1 means any version.

        The result is the node's new version.
        """
        path = self._root + path
        return self._submit(lambda: self._client.set_async(path, data, version), lambda stat: int(stat.version))

    def acl(self, path: str) -> asyncio.Future[frozenset[AclEntry]]:
        """Read a node's ACL."""
        path = self._root + path
        return self._submit(lambda: self._client.get_acls_async(path), lambda found: acl_entries(found[0]))

    def set_acl(self, path: str) -> asyncio.Future[None]:
        """Set a node's ACL to the ACL that this session gives to new nodes."""
        return self._set_acl(path, self._acl_of(path))

    def set_entries(self, path: str, entries: Iterable[AclEntry]) -> asyncio.Future[None]:
        """Set a node's ACL to ``entries``."""
        return self._set_acl(path, kazoo_acl(entries))

    def _set_acl(self, path: str, acl: Sequence[Any]) -> asyncio.Future[None]:
        path = self._root + path
        return self._submit(lambda: self._client.set_acls_async(path, list(acl)), lambda _: None)

    def delete(self, path: str, version: int = -1) -> asyncio.Future[None]:
        path = self._root + path
        return self._submit(lambda: self._client.delete_async(path, version), lambda _: None)

    def sync(self, path: str) -> asyncio.Future[None]:
        """Wait until the server has caught up with the ensemble's leader. Later reads then see all earlier writes."""
        path = self._root + path
        return self._submit(lambda: self._client.sync_async(path), lambda _: None)

    def multi(self, ops: Sequence[Op]) -> asyncio.Future[tuple[Any, ...]]:
        """Perform all of ``ops`` or none, in one ZooKeeper transaction.

        The results are in the order of ``ops``: the path of a Create, the new version of a SetData, None for others.

        The future fails with ZkMultiFailed if an operation failed, and nothing was written. The error has the index of
        the operation and the cause.
        """
        skip = len(self._root)
        return self._submit(lambda: self._commit(ops), lambda results: _multi_results(ops, results, skip))

    def multi_batched(self, ops: Sequence[Op]) -> asyncio.Future[tuple[Any, ...]]:
        """Perform all of ``ops`` or none, with the same results as ``multi``. Use this for many small transactions.

        Several transactions are sent in one request, but each has its own result. The transactions are sent in the
        order of the calls, but other requests may overtake them. See ``MultiBatcher``.
        """
        return self._batcher.multi(ops)

    def _commit(self, ops: Sequence[Op]) -> Any:
        result = self._client.handler.async_result()
        self._client._call(Multi(ops, self._root, self._acl_bytes, self._secret_acl_bytes), result)
        return result

    async def ensure(self, path: str) -> None:
        """Create a persistent node if it does not exist. Its parent must exist."""
        await self._ensure(self._root + path, self._acl_of(path))

    async def _ensure(self, absolute: str, acl: Sequence[Any]) -> None:
        with suppress(ZkNodeExists):
            await self._submit(lambda: self._client.create_async(absolute, b"", acl=acl), lambda _: None)

    async def patiently(self, ask: Callable[[], Awaitable[_T]]) -> _T:
        """Call ``ask``, an idempotent request, until ZooKeeper responds, without a time limit. Return its result.

        Raise errors about nodes and versions (such as ZkNoNode or ZkBadVersion). Repeat the request after other errors.

        Raises:
          ZkUnreachable: the session was closed.
        """
        while True:
            await self.connected()
            try:
                return await ask()
            except ZkUnreachable:
                continue
            except (ZkNoNode, ZkNodeExists, ZkBadVersion, ZkMultiFailed):
                raise
            except ZkError as error:
                log.warning("retrying a ZooKeeper request after %s", error)
                await asyncio.sleep(PAUSE_S)

    # --- watches -------------------------------------------------------------------------------------------------

    def watch_children(self, path: str, on_children: Callable[[tuple[str, ...] | None], None]) -> Callable[[], None]:
        """Call ``on_children`` with the children of ``path``, now and after every change and every reconnection.

        The argument is None if ``path`` does not exist. Several quick changes may cause only one call. Return a
        function that ends the watch.
        """
        return self._follow(lambda fired: self.children(path, on_change=fired), path, on_children)

    def watch_data(
        self, path: str, on_node: Callable[[Node | None], None], *, until_gone: bool = False
    ) -> Callable[[], None]:
        """Call ``on_node`` with the node at ``path``, now and after every change and every reconnection.

        The argument is None if the node does not exist. Several quick changes may cause only one call. Return a
        function that ends the watch.

        With ``until_gone``, the watch also ends after a call with None. Set ``until_gone`` for nodes that never appear
        again, because otherwise ZooKeeper keeps a watch for their creation until the connection ends.
        """
        return self._follow(lambda fired: self.get(path, on_change=fired), path, on_node, until_gone=until_gone)

    def _follow(
        self,
        read: Callable[[Callable[[], None]], asyncio.Future[Any]],
        path: str,
        report: Callable[[Any], None],
        *,
        until_gone: bool = False,
    ) -> Callable[[], None]:
        async def follow() -> None:
            while True:
                fired = asyncio.Event()
                try:
                    await self.connected()
                    try:
                        value = await read(fired.set)
                    except ZkNoNode:
                        if until_gone:
                            report(None)
                            return
                        # A read of a missing node sets no watch, but an exists request does. If the node has appeared,
                        # read it again.
                        if await self.exists(path, on_change=fired.set):
                            continue
                        value = None
                except ZkUnreachable:
                    continue
                except ZkError as error:
                    log.warning("watching %s: retrying a ZooKeeper request after %s", path, error)
                    await asyncio.sleep(PAUSE_S)
                    continue
                report(value)
                await fired.wait()

        task = self._loop.create_task(follow(), name=f"watch {path}")
        self._tasks.add(task)
        task.add_done_callback(self._watch_ended)

        def stop() -> None:
            task.cancel()

        return stop

    def _watch_ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            self._loop.call_exception_handler(
                {"message": f"{task.get_name()} of ZooKeeper ended", "exception": task.exception(), "task": task}
            )

    def _watcher(self, on_change: Callable[[], None] | None) -> Callable[[Any], None] | None:
        if on_change is None:
            return None
        return lambda _event: self._from_kazoo(on_change)

    # --- kazoo's threads to the loop ------------------------------------------------------------------------------

    def _from_kazoo(self, fact: Callable[[], None]) -> None:
        """Run ``fact`` in the event loop, in the order of the calls. Any thread may call this."""
        self._inbox.append(fact)
        if not self._inbox_scheduled:
            self._inbox_scheduled = True
            try:
                self._loop.call_soon_threadsafe(self._drain)
            except RuntimeError:
                log.debug("the event loop of a ZooKeeper session ended before the session")

    def _drain(self) -> None:
        self._inbox_scheduled = False
        while self._inbox:
            self._inbox.popleft()()

    def _state_changed(self, state: str) -> None:
        self._from_kazoo(lambda: self._kazoo_state(_STATES[state]))

    def _kazoo_state(self, state: SessionState) -> None:
        if self.state is SessionState.CLOSED:
            return
        if state is SessionState.CONNECTED:
            client_id = self._client.client_id
            if client_id is None:
                return  # The session has ended again. The next state follows.
            if client_id[0] != self.session_id:
                self.session_id = client_id[0]
                self.generation += 1
        self._move(state)

    def _move(self, state: SessionState) -> None:
        if state is self.state:
            return
        log.info("ZooKeeper session %x: %s -> %s", self.session_id, self.state.value, state.value)
        self.state = state
        if state is SessionState.CONNECTED:
            self._connected.set()
        else:
            self._connected.clear()
            while self._waiting:
                _, future = self._waiting.popleft()
                if not future.done():
                    future.set_exception(ZkUnreachable(f"the ZooKeeper session is {state.value}"))
        if state is SessionState.CLOSED:
            self._connected.set()  # Wake the waiting tasks, which check ``state``.
        for listener in list(self._listeners):
            listener(state)

    def _submit(self, start: Callable[[], Any], convert: Callable[[Any], Any]) -> asyncio.Future[Any]:
        future: asyncio.Future[Any] = self._loop.create_future()
        if self.state is not SessionState.CONNECTED:
            future.set_exception(ZkUnreachable(f"the ZooKeeper session is {self.state.value}"))
            return future

        def begin() -> None:
            try:
                started = start()
            # kazoo rejected the path. The request was not started, so it does not count as in flight.
            except Exception as error:
                future.set_exception(ZkError(f"could not send a request to ZooKeeper: {type(error).__name__} {error}"))
                return
            self._in_flight += 1
            started.rawlink(lambda result: self._from_kazoo(lambda: self._finish(result, future, convert)))

        if self._in_flight < WINDOW:
            begin()
        else:
            self._waiting.append((begin, future))
        return future

    def _finish(self, result: Any, future: asyncio.Future[Any], convert: Callable[[Any], Any]) -> None:
        self._in_flight -= 1
        while self._waiting and self._in_flight < WINDOW:
            begin, waiting = self._waiting.popleft()
            if not waiting.done():
                begin()
        if future.done():
            return
        try:
            error = result.exception
            if error is None:
                future.set_result(convert(result.value))
            else:
                future.set_exception(_translate(error))
        except ZkError as failed:
            future.set_exception(failed)
        except Exception as failed:  # If the response has an unexpected form, the caller must receive an error.
            future.set_exception(ZkError(f"unexpected error of ZooKeeper: {type(failed).__name__} {failed}"))


_NAMED: tuple[tuple[type[Exception], type[ZkError]], ...] = (
    (kazoo_errors.NoNodeError, ZkNoNode),
    (kazoo_errors.NodeExistsError, ZkNodeExists),
    (kazoo_errors.BadVersionError, ZkBadVersion),
    (kazoo_errors.NoAuthError, ZkNoAuth),
    (kazoo_errors.NotEmptyError, ZkNotEmpty),
)
#: kazoo's errors for a request that it did not send.
_NOT_SENT = (kazoo_errors.ConnectionClosedError,)
_FATE_UNKNOWN = (
    kazoo_errors.ConnectionLoss,
    kazoo_errors.SessionExpiredError,
    kazoo_errors.OperationTimeoutError,
    kazoo_errors.SessionMovedError,
    KazooTimeoutError,
)


def _translate(error: BaseException) -> ZkError:
    for theirs, ours in _NAMED:
        if isinstance(error, theirs):
            return ours(str(error))
    name = type(error).__name__
    if isinstance(error, _NOT_SENT):
        return ZkUnreachable(f"ZooKeeper: {name}")
    if isinstance(error, _FATE_UNKNOWN):
        return ZkUnreachable(f"ZooKeeper: {name}", sent=True)
    return ZkError(f"ZooKeeper: {name} {error}".strip())


def _multi_results(ops: Sequence[Op], results: Sequence[Any], root: int) -> tuple[Any, ...]:
    for index, result in enumerate(results):
        if isinstance(result, (kazoo_errors.RolledBackError, kazoo_errors.RuntimeInconsistency)):
            continue  # This operation is not the cause: it comes before or after the failed one.
        if isinstance(result, Exception):
            cause = _translate(result)
            path = ops[index].path if index < len(ops) else "?"
            raise ZkMultiFailed(index, type(cause)(path))
    if any(isinstance(result, Exception) for result in results):
        raise ZkError(f"multi of {len(ops)} operations was rolled back without a cause: {results!r}"[:500])
    if len(results) != len(ops):
        raise ZkError(f"multi of {len(ops)} operations got {len(results)} results")
    return tuple(result[root:] if isinstance(result, str) else result for result in results)
