"""A broker's cache of the cluster's ACLs. ZooKeeper stores them.

A change takes effect without a restart: the broker watches the node ``/acls_changes`` and reads the ACLs that have
changed. While ZooKeeper is unreachable, the broker uses the ACLs that it read last.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Mapping

from sparklog.broker.security.authorizer import Authorizer
from sparklog.errors import BrokerError, ErrorCode
from sparklog.security.acls import AclBinding
from sparklog.zk.acl_store import AclStore, decode_changes, merge
from sparklog.zk.codecs import ZkFormatError
from sparklog.zk.errors import ZkError, ZkUnreachable
from sparklog.zk.session import PAUSE_S, Node, ZkSession
from sparklog.zk.unreadable import Unreadable

_log = logging.getLogger(__name__)


class AclCache:
    """A cache of the cluster's ACLs, which it reads from ZooKeeper and passes to the authorizer.

    Not thread-safe: use it on the broker's event loop, from ``open`` to ``close``.
    """

    def __init__(self, authorizer: Authorizer, counters: Counter[str]) -> None:
        self._authorizer = authorizer
        self._counters = counters
        self._store: AclStore | None = None
        self._session: ZkSession | None = None
        #: The ACLs that the authorizer uses, by the name of their node, and the version of ``/acls_changes`` with them.
        self._acls: Mapping[str, frozenset[AclBinding]] = {}
        self._version = -2
        #: The number of the ZooKeeper session that read ``_acls``. A new session reads all ACLs again.
        self._generation = -1
        self._node: Node | None = None
        self._changed = asyncio.Event()
        self._applied: list[asyncio.Future[None]] = []
        self._stop_watch: Callable[[], None] | None = None
        self._task: asyncio.Task[None] | None = None
        self._unreadable = Unreadable()

    def open(self, session: ZkSession) -> None:
        """Start to watch the ACLs in ZooKeeper. ``session`` must stay open until ``close``."""
        self._session = session
        self._store = AclStore(session, self._unreadable)
        self._task = asyncio.get_running_loop().create_task(self._follow(), name="follow ACLs")
        self._stop_watch = self._store.watch(self._on_changes)

    def close(self) -> None:
        """End the watch of the ACLs."""
        if self._stop_watch is not None and self._task is not None:
            self._stop_watch()
            self._task.cancel()

    @property
    def store(self) -> AclStore:
        """Return the store of ACLs in ZooKeeper. Raises BrokerError BROKER_NOT_AVAILABLE before ``open``."""
        if self._store is None:
            raise BrokerError(ErrorCode.BROKER_NOT_AVAILABLE, "the broker is still starting")
        return self._store

    async def applied(self, version: int, *, timeout_s: float) -> None:
        """Wait until the authorizer uses this version of the ACLs, for at most ``timeout_s``."""
        end = asyncio.get_running_loop().time() + timeout_s
        while self._version < version and (left_s := end - asyncio.get_running_loop().time()) > 0:
            future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._applied.append(future)
            await asyncio.wait({future}, timeout=left_s)

    def _on_changes(self, node: Node | None) -> None:
        self._node = node
        self._changed.set()

    async def _follow(self) -> None:
        while True:
            await self._changed.wait()
            self._changed.clear()
            try:
                await self._apply(self._node)
            except ZkUnreachable:
                continue  # After a reconnection the watch reports the node again.
            except (ZkError, ZkFormatError) as error:
                _log.error("the ACLs cannot be read from ZooKeeper, so changes have no effect: %s", error)
                await asyncio.sleep(PAUSE_S)
                self._changed.set()

    async def _apply(self, node: Node | None) -> None:
        """Read the ACLs that have changed since the last version, or all of them."""
        assert self._session is not None
        version = node.version if node is not None else -1
        changed = decode_changes(node).changed
        generation, missed = self._session.generation, version - self._version
        if generation == self._generation and 0 <= missed <= len(changed):
            read = await self.store.read(changed[len(changed) - missed :])
            acls = merge(self._acls, read)
        else:
            acls = merge({}, await self.store.read_all())
        self._counters["acls.nodes.skipped"] = self._unreadable.count
        self._acls, self._version, self._generation = acls, version, generation
        table = self._authorizer.table.with_acls(acl for found in acls.values() for acl in found)
        self._authorizer.set_acls(table)
        _log.info("use version %d of the ACLs from now on: %d ACLs", version, len(table.acls))
        waiting, self._applied = self._applied, []
        for future in waiting:
            if not future.done():
                future.set_result(None)
