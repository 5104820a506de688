"""The watch of the cluster's quotas in ZooKeeper, and the handlers of the requests that change and describe them."""

from __future__ import annotations

import asyncio
import logging
from contextlib import suppress

from sparklog.broker.context import BrokerContext
from sparklog.broker.lifecycle.zk_registration import ZkRegistration
from sparklog.broker.requests.delayed_replies import limit_s, reply_later
from sparklog.broker.security.quota_manager import QuotaManager
from sparklog.errors import BrokerError, ErrorCode
from sparklog.net.server_connection import ServerConnection
from sparklog.protocol.messages import (
    AlterClientQuotas,
    AlterClientQuotasReply,
    DescribeClientQuotas,
    DescribeClientQuotasReply,
    DescribedQuotas,
    QuotaAlteration,
    QuotaKey,
    QuotaResult,
    Reply,
)
from sparklog.security.quotas import PARTS, QuotaEntity, QuotaTable, check_entity, check_quota
from sparklog.zk.codecs import ZkFormatError
from sparklog.zk.errors import ZkError, ZkUnreachable
from sparklog.zk.quota_store import NO_QUOTAS, Quotas
from sparklog.zk.session import PAUSE_S, Node

_log = logging.getLogger(__name__)


class QuotaUpdates:
    """The component that watches the quotas in ZooKeeper and handles requests about them.

    Not thread-safe: use it only on the broker's event loop.
    """

    def __init__(self, context: BrokerContext, registry: ZkRegistration, manager: QuotaManager) -> None:
        self._context = context
        self._registry = registry
        self._manager = manager
        #: The quotas that the manager enforces.
        self._known = NO_QUOTAS
        self._newest: Node | None = None
        self._is_reading = False
        #: The tasks that wait for a version of the quotas.
        self._changed = asyncio.Event()

    def start(self) -> None:
        """Start to watch the quotas. Call this after the broker has registered in ZooKeeper."""
        self._registry.quotas.watch(self._on_index)

    def _on_index(self, node: Node | None) -> None:
        self._newest = node
        if not self._is_reading:
            self._is_reading = True
            self._context.spawn(self._read(), "read the quotas")

    async def _read(self) -> None:
        """Read and enforce the quotas of the newest index."""
        try:
            while True:
                node = self._newest
                if node is None and self._known == NO_QUOTAS:
                    return
                await self._read_index(node)
                if self._newest is node:
                    return
        finally:
            self._is_reading = False

    async def _read_index(self, node: Node | None) -> None:
        """Read and enforce the quotas of this index. If they cannot be read, the present ones stay."""
        while self._newest is node:
            try:
                self._apply(await self._registry.quotas.read(node, self._known))
            except ZkFormatError as error:
                _log.error("the quotas in ZooKeeper cannot be read, so changes of them have no effect: %s", error)
            except ZkError as error:
                _log.warning("reading the quotas again, after %s", error)
                await asyncio.sleep(PAUSE_S)
                continue
            return

    def _apply(self, found: Quotas) -> None:
        if found.values != self._known.values:
            self._manager.apply(QuotaTable(found.values))
            _log.info("now enforcing the quotas of %d entities (version %d)", len(found.values), found.version)
        self._known = found
        self._changed.set()
        self._changed = asyncio.Event()

    # --- requests ---

    def alter(self, connection: ServerConnection, request: AlterClientQuotas, body: memoryview) -> None:
        reply_later(self._context, connection, request, self._alter(request))

    async def _alter(self, request: AlterClientQuotas) -> Reply:
        altered = [await self._alter_one(one, validate_only=request.validate_only) for one in request.alterations]
        version = max((version for version, _ in altered), default=-1)
        try:
            await asyncio.wait_for(self._applied(version), limit_s(request.timeout_ms))
        except asyncio.TimeoutError:
            detail = "the quotas are stored, but this broker does not enforce them yet"
            raise BrokerError(ErrorCode.REQUEST_TIMED_OUT, detail) from None
        return AlterClientQuotasReply(request.cid, tuple(result for _, result in altered))

    async def _alter_one(self, alteration: QuotaAlteration, *, validate_only: bool) -> tuple[int, QuotaResult]:
        """Check and write one alteration. Return the version of the index, or -1, and the result."""
        version = -1
        try:
            _check(alteration)
            if not validate_only:
                version = await self._write(alteration)
        except BrokerError as error:
            return -1, QuotaResult(error.code, error.detail)
        return version, QuotaResult(ErrorCode.NONE)

    async def _write(self, alteration: QuotaAlteration) -> int:
        """Write one alteration. Repeat it after a lost response. Raise BrokerError, or ZkUnreachable."""
        while True:
            with suppress(ZkUnreachable):
                return await self._registry.quotas.alter(_entity(alteration.key), alteration.quotas)
            await self._registry.connected()

    async def _applied(self, version: int) -> None:
        """Wait until this broker enforces this version."""
        while self._known.version < version:
            await self._changed.wait()

    def describe(self, connection: ServerConnection, request: DescribeClientQuotas, body: memoryview) -> None:
        reply_later(self._context, connection, request, self._describe(request))

    async def _describe(self, request: DescribeClientQuotas) -> Reply:
        unknown = [part for part in request.any_of if part not in PARTS]
        if unknown:
            detail = f"part {unknown[0]!r} of a quota: expected one of {', '.join(PARTS)}"
            raise BrokerError(ErrorCode.INVALID_REQUEST, detail)
        found = await self._registry.quotas.current(self._known)
        entries = [
            DescribedQuotas(QuotaKey(*entity), dict(values))
            for entity, values in sorted(found.values.items(), key=lambda item: str(item[0]))
            if entity.matches(_entity(request.key), any_of=request.any_of, strict=request.strict)
        ]
        return DescribeClientQuotasReply(request.cid, tuple(entries))


def _entity(key: QuotaKey) -> QuotaEntity:
    return QuotaEntity(key.user, key.client_id, key.ip)


def _check(alteration: QuotaAlteration) -> None:
    """Raise BrokerError unless the entity may have these quotas."""
    entity = _entity(alteration.key)
    check_entity(entity)
    if not alteration.quotas:
        raise BrokerError(ErrorCode.INVALID_REQUEST, f"no quota of {entity} is named")
    for name, value in alteration.quotas.items():
        check_quota(entity, name, value)
