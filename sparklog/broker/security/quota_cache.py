"""A broker's cache of the cluster's quotas. ZooKeeper stores them.

A change takes effect without a restart: the broker watches the index of the quotas and reads the ones that have
changed. While ZooKeeper is unreachable, the broker uses the quotas that it read last.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping

from sparklog.broker.security.index_follower import IndexFollower
from sparklog.broker.security.quota_manager import QuotaManager
from sparklog.errors import BrokerError, ErrorCode
from sparklog.security.quotas import QuotaEntity, QuotaTable, QuotaValues
from sparklog.zk.quota_store import QuotaStore, decode_index
from sparklog.zk.session import Node, ZkSession
from sparklog.zk.unreadable import Unreadable

_log = logging.getLogger(__name__)


class QuotaCache:
    """A cache of the cluster's quotas, which it reads from ZooKeeper and passes to the quota manager.

    Not thread-safe: use it on the broker's event loop, from ``open`` to ``close``.
    """

    def __init__(self, manager: QuotaManager) -> None:
        self._manager = manager
        self._store: QuotaStore | None = None
        #: The quotas that the manager enforces.
        self._values: Mapping[QuotaEntity, QuotaValues] = {}
        self._follower = IndexFollower[QuotaEntity]("quotas", lambda node: decode_index(node).changed, self._apply)

    def open(self, session: ZkSession) -> None:
        """Start to watch the quotas in ZooKeeper. ``session`` must stay open until ``close``."""
        self._store = QuotaStore(session, Unreadable())
        self._follower.open(session, self._store.watch)

    def close(self) -> None:
        """End the watch of the quotas."""
        self._follower.close()

    @property
    def store(self) -> QuotaStore:
        """Return the store of quotas in ZooKeeper. Raises BrokerError BROKER_NOT_AVAILABLE before ``open``."""
        if self._store is None:
            raise BrokerError(ErrorCode.BROKER_NOT_AVAILABLE, "the broker is still starting")
        return self._store

    @property
    def values(self) -> Mapping[QuotaEntity, QuotaValues]:
        """Return the quotas that this broker enforces."""
        return self._values

    async def applied(self, version: int, *, timeout_s: float) -> bool:
        """Wait until this broker enforces this version of the quotas, for at most ``timeout_s``.

        Return whether it does.
        """
        return await self._follower.applied(version, timeout_s=timeout_s)

    async def _apply(self, node: Node | None, changed: set[QuotaEntity] | None) -> None:
        """Read the quotas of these entities, or all quotas if ``changed`` is None, and enforce them."""
        found = await self.store.read(node, self._values, changed)
        if found != self._values:
            self._manager.apply(QuotaTable(found))
            _log.info("enforce the quotas of %d entities (version %d)", len(found), node.version if node else -1)
        self._values = found
