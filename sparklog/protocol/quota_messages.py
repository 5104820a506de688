"""Messages of quotas. Source: Kafka, KIP-546."""

from __future__ import annotations

from typing import Annotated

import msgspec

from sparklog.protocol.fields import Listed, Message, Name

#: The most entities that one request changes. Each takes a write to ZooKeeper.
MAX_ALTERATIONS = 100
#: The most quotas of one entity in a message.
_MAX_QUOTAS = 20


class QuotaKey(msgspec.Struct, frozen=True, array_like=True):
    """The entity of a quota. Each part is a name, the empty text for the default, or None if it does not matter."""

    user: Name | None = None
    client_id: Name | None = None
    ip: Name | None = None


class QuotaAlteration(msgspec.Struct, frozen=True, array_like=True):
    """The quotas of one entity to set, or to remove (None)."""

    key: QuotaKey
    quotas: Annotated[dict[Name, float | None], msgspec.Meta(max_length=_MAX_QUOTAS)]


class AlterClientQuotas(Message, frozen=True, tag="alter_client_quotas"):
    """A request to change quotas. The reply follows after the broker that received the request applies them.

    With ``validate_only`` the quotas are only checked.
    """

    alterations: Annotated[tuple[QuotaAlteration, ...], msgspec.Meta(max_length=MAX_ALTERATIONS)]
    timeout_ms: int
    validate_only: bool = False


class QuotaResult(msgspec.Struct, frozen=True, array_like=True):
    """The result for one entity of AlterClientQuotas."""

    code: int
    detail: str = ""


class AlterClientQuotasReply(Message, frozen=True, tag="alter_client_quotas_reply"):
    """The reply to AlterClientQuotas: one result per entity, in order."""

    results: Listed[QuotaResult]


class DescribeClientQuotas(Message, frozen=True, tag="describe_client_quotas"):
    """A request for quotas.

    A part of ``key`` that is not None selects the entities with this name or, if it is empty, with the default.
    ``any_of`` has the names of parts (``user``, ``client-id``, ``ip``) that an entity must have, with any name. With
    ``strict`` an entity must have no other part.
    """

    key: QuotaKey = QuotaKey()
    any_of: Annotated[tuple[Name, ...], msgspec.Meta(max_length=3)] = ()
    strict: bool = False


class DescribedQuotas(msgspec.Struct, frozen=True, array_like=True):
    """The quotas of one entity."""

    key: QuotaKey
    quotas: Annotated[dict[str, float], msgspec.Meta(max_length=_MAX_QUOTAS)]


class DescribeClientQuotasReply(Message, frozen=True, tag="describe_client_quotas_reply"):
    """The reply to DescribeClientQuotas, sorted by entity."""

    entries: Listed[DescribedQuotas]
