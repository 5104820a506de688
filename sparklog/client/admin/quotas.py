"""The administration of quotas: setting, removing and listing them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from sparklog.client.cluster.blocking_cluster import BlockingCluster
from sparklog.errors import BrokerError
from sparklog.protocol.messages import (
    AlterClientQuotas,
    AlterClientQuotasReply,
    DescribeClientQuotas,
    DescribeClientQuotasReply,
    QuotaAlteration,
    QuotaKey,
)


@dataclass(frozen=True, slots=True)
class ClientQuotas:
    """The quotas of one entity, such as a user.

    ``user``, ``client_id`` and ``ip`` are the parts of the entity. ``""`` means the default entity. None means that the
    entity does not have this part, for example no client id.
    """

    user: str | None
    client_id: str | None
    ip: str | None
    quotas: Mapping[str, float]


def alter_quotas(
    cluster: BlockingCluster, key: QuotaKey, quotas: Mapping[str, float | None], *, timeout_s: float | None
) -> None:
    """Set or remove quotas. See ``Admin.alter_quotas`` for the arguments and errors."""
    values = {name: None if value is None else float(value) for name, value in quotas.items()}
    request = AlterClientQuotas(0, (QuotaAlteration(key, values),), cluster.broker_timeout_ms(timeout_s))

    def attempt() -> None:
        for result in cluster.ask_any(request, AlterClientQuotasReply).results:
            if result.code:
                raise BrokerError(result.code, result.detail)

    cluster.retrying("AlterClientQuotas", attempt, timeout_s=timeout_s)


def describe_quotas(cluster: BlockingCluster, key: QuotaKey) -> list[ClientQuotas]:
    """Return quotas. See ``Admin.describe_quotas`` for the arguments and errors."""
    reply = cluster.retrying(
        "DescribeClientQuotas", lambda: cluster.ask_any(DescribeClientQuotas(0, key), DescribeClientQuotasReply)
    )
    return [
        ClientQuotas(entry.key.user, entry.key.client_id, entry.key.ip, dict(entry.quotas)) for entry in reply.entries
    ]
