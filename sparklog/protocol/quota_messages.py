"""Messages about quotas of clients. Source: Kafka, KIP-546."""

from __future__ import annotations

from typing import Annotated

import msgspec

from sparklog.protocol.fields import Listed, Message, Name

#: The maximum number of entities that one request changes. Each entity takes one write to ZooKeeper.
MAX_ALTERATIONS = 100
#: The maximum number of quotas of one entity in a message.
_MAX_QUOTAS = 20


class QuotaKey(msgspec.Struct, frozen=True, array_like=True):
    """An entity (user, client id, IP address, or user and client id) to whose connections a quota applies.

    Each field is a name, or empty for the default entity, or None if it is not part of the entity.
    """

    user: Name | None = None
    client_id: Name | None = None
    ip: Name | None = None


class QuotaAlteration(msgspec.Struct, frozen=True, array_like=True):
    """The changes to the quotas of one entity. The value None removes a quota."""

    key: QuotaKey
    quotas: Annotated[dict[Name, float | None], msgspec.Meta(max_length=_MAX_QUOTAS)]


class AlterClientQuotas(Message, frozen=True, tag="alter_client_quotas"):
    """A request to change quotas. The broker that receives it replies when it enforces the new quotas itself.

    With ``validate_only`` the broker only checks the request.
    """

    alterations: Annotated[tuple[QuotaAlteration, ...], msgspec.Meta(max_length=MAX_ALTERATIONS)]
    timeout_ms: int
    validate_only: bool = False


class QuotaResult(msgspec.Struct, frozen=True, array_like=True):
    """The result of AlterClientQuotas for one entity: an error code (0 for success) and a text."""

    code: int
    detail: str = ""


class AlterClientQuotasReply(Message, frozen=True, tag="alter_client_quotas_reply"):
    """The reply to AlterClientQuotas: one result per entity, in the order of the request."""

    results: Listed[QuotaResult]
    throttle_time_ms: int = 0


class DescribeClientQuotas(Message, frozen=True, tag="describe_client_quotas"):
    """A request for the quotas of entities that satisfy a filter.

    A field of ``key`` with a name selects the entities with this name. An empty field selects default entities. A field
    that is None selects all entities. ``any_of`` lists the parts (``user``, ``client-id``, ``ip``) that an entity must
    have, with any name. With ``strict``, an entity must have no parts other than those in ``key`` and ``any_of``.
    """

    key: QuotaKey = QuotaKey()
    any_of: Annotated[tuple[Name, ...], msgspec.Meta(max_length=3)] = ()
    strict: bool = False


class DescribedQuotas(msgspec.Struct, frozen=True, array_like=True):
    """The quotas of one entity, in the reply to DescribeClientQuotas."""

    key: QuotaKey
    quotas: Annotated[dict[str, float], msgspec.Meta(max_length=_MAX_QUOTAS)]


class DescribeClientQuotasReply(Message, frozen=True, tag="describe_client_quotas_reply"):
    """The reply to DescribeClientQuotas: the selected entities with their quotas, sorted by entity."""

    entries: Listed[DescribedQuotas]
    throttle_time_ms: int = 0
