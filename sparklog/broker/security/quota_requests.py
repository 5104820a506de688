"""The handlers of the requests that change and describe quotas."""

from __future__ import annotations

from contextlib import suppress

from sparklog.broker.context import BrokerContext
from sparklog.broker.lifecycle.zk_registration import ZkRegistration
from sparklog.broker.requests.delayed_replies import limit_s, reply_later
from sparklog.broker.security.quota_cache import QuotaCache
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
from sparklog.security.quotas import PARTS, QuotaEntity, check_entity, check_quota
from sparklog.zk.errors import ZkUnreachable


class QuotaRequests:
    """The handlers of requests that change and describe quotas.

    Not thread-safe: use it only on the broker's event loop.
    """

    def __init__(self, context: BrokerContext, registry: ZkRegistration, cache: QuotaCache) -> None:
        self._context = context
        self._registry = registry
        self._cache = cache

    def alter(self, connection: ServerConnection, request: AlterClientQuotas, body: memoryview) -> None:
        reply_later(self._context, connection, request, self._alter(request))

    async def _alter(self, request: AlterClientQuotas) -> Reply:
        altered = [await self._alter_one(one, validate_only=request.validate_only) for one in request.alterations]
        version = max((version for version, _ in altered), default=-1)
        if not await self._cache.applied(version, timeout_s=limit_s(request.timeout_ms)):
            detail = "the quotas are stored, but this broker does not enforce them yet"
            raise BrokerError(ErrorCode.REQUEST_TIMED_OUT, detail)
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
                return await self._cache.store.alter(_entity(alteration.key), alteration.quotas)
            await self._registry.connected()

    def describe(self, connection: ServerConnection, request: DescribeClientQuotas, body: memoryview) -> None:
        reply_later(self._context, connection, request, self._describe(request))

    async def _describe(self, request: DescribeClientQuotas) -> Reply:
        unknown = [part for part in request.any_of if part not in PARTS]
        if unknown:
            detail = f"part {unknown[0]!r} of a quota: expected one of {', '.join(PARTS)}"
            raise BrokerError(ErrorCode.INVALID_REQUEST, detail)
        index = await self._cache.store.index()
        if index is not None and not await self._cache.applied(index.version, timeout_s=limit_s(0)):
            raise BrokerError(ErrorCode.REQUEST_TIMED_OUT, "this broker has not read the newest quotas yet")
        found = self._cache.values
        entries = [
            DescribedQuotas(QuotaKey(*entity), dict(values))
            for entity, values in sorted(found.items(), key=lambda item: str(item[0]))
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
