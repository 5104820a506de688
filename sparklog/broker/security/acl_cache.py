"""A broker's cache of the cluster's ACLs. ZooKeeper stores them.

A change takes effect without a restart: the broker watches the node ``/acls_changes`` and reads the ACLs that have
changed. While ZooKeeper is unreachable, the broker uses the ACLs that it read last.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping

from sparklog.broker.security.authorizer import Authorizer
from sparklog.broker.security.index_follower import IndexFollower
from sparklog.errors import BrokerError, ErrorCode
from sparklog.security.acls import AclBinding
from sparklog.zk.acl_store import AclStore, decode_changes, merge
from sparklog.zk.session import Node, ZkSession
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
        #: The ACLs that the authorizer uses, by the name of their node.
        self._acls: Mapping[str, frozenset[AclBinding]] = {}
        self._unreadable = Unreadable()
        self._follower = IndexFollower("the ACLs", lambda node: decode_changes(node).changed, self._apply)

    def open(self, session: ZkSession) -> None:
        """Start to watch the ACLs in ZooKeeper. ``session`` must stay open until ``close``."""
        self._store = AclStore(session, self._unreadable)
        self._follower.open(session, self._store.watch)

    def close(self) -> None:
        """End the watch of the ACLs."""
        self._follower.close()

    @property
    def store(self) -> AclStore:
        """Return the store of ACLs in ZooKeeper. Raises BrokerError BROKER_NOT_AVAILABLE before ``open``."""
        if self._store is None:
            raise BrokerError(ErrorCode.BROKER_NOT_AVAILABLE, "the broker is still starting")
        return self._store

    async def applied(self, version: int, *, timeout_s: float) -> None:
        """Wait until the authorizer uses this version of the ACLs, for at most ``timeout_s``."""
        await self._follower.applied(version, timeout_s=timeout_s)

    async def _apply(self, node: Node | None, names: set[str] | None) -> None:
        """Read the ACLs of these nodes, or all ACLs if ``names`` is None, and pass all ACLs to the authorizer."""
        if names is None:
            self._acls = merge({}, await self.store.read_all())
        else:
            self._acls = merge(self._acls, await self.store.read(sorted(names)))
        self._counters["acls.nodes.skipped"] = self._unreadable.count
        table = self._authorizer.table.with_acls(acl for found in self._acls.values() for acl in found)
        self._authorizer.set_acls(table)
        _log.info("use version %d of the ACLs from now on: %d ACLs", node.version if node else -1, len(table.acls))
