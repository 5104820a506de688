"""Descriptions of the changes that administrative requests make, for the audit log.

This module is pure.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from sparklog.errors import ErrorCode
from sparklog.protocol.messages import (
    AbortHanging,
    AbortTransaction,
    AddColumns,
    AlterClientQuotas,
    AlterClientQuotasReply,
    AlterReassignments,
    AlterReassignmentsReply,
    AlterTopic,
    AlterUserScramCredentials,
    AlterUserScramCredentialsReply,
    CreateAcls,
    CreateDelegationToken,
    CreateDelegationTokenReply,
    CreatePartitions,
    CreateTopic,
    CreateTopicReply,
    DelegationTokenExpiryReply,
    DeleteAcls,
    DeleteAclsReply,
    DeleteGroup,
    DeleteRecords,
    DeleteRecordsReply,
    DeleteTopic,
    ElectLeaders,
    ElectLeadersReply,
    ErrorReply,
    ExpireDelegationToken,
    QuotaAlteration,
    RemoveSetAside,
    RenewDelegationToken,
    Reply,
    Request,
    RestartBroker,
    RestoreSetAside,
    RestoreSetAsideReply,
)
from sparklog.security.acl_entries import binding_of
from sparklog.security.quotas import QuotaEntity

#: The maximum number of partitions or names that a description lists.
_LISTED = 10


class Change(NamedTuple):
    """A change that an administrative request has made: the resource, such as ``Topic:orders``, and a description."""

    resource: str
    what: str


def change_of(request: Request, reply: Reply) -> Change | None:
    """Return the change that the request has made, according to its reply.

    Return None if it has changed nothing or is not an administrative request.
    """
    if isinstance(reply, ErrorReply):
        return _requested(request) if reply.code == ErrorCode.REQUEST_TIMED_OUT else None
    match request, reply:
        case CreateTopic(), CreateTopicReply():
            return Change(f"Topic:{request.name}", f"created, topic id {reply.topic_id}")
        case DeleteTopic(), _:
            return Change(f"Topic:{request.name}", "deleted")
        case CreatePartitions(), _:
            return Change(f"Topic:{request.topic}", f"{request.partitions} partitions")
        case AddColumns(), _:
            return Change(f"Topic:{request.topic}", "added columns")
        case AlterTopic(), _:
            return Change(f"Topic:{request.topic}", _settings(request))
        case DeleteRecords(), DeleteRecordsReply():
            moved = [
                f"{wanted.topic}-{wanted.partition} below {result.log_start_offset}"
                for wanted, result in zip(request.partitions, reply.results, strict=False)
                if not result.code
            ]
            return _of_many(_topics(wanted.topic for wanted in request.partitions), "deleted records of", moved)
        case AlterReassignments(), AlterReassignmentsReply():
            begun = [
                f"{move.topic}-{move.partition} to {'its old replicas' if move.target is None else list(move.target)}"
                for move, result in zip(request.moves, reply.results, strict=False)
                if not result.code
            ]
            return _of_many(_topics(move.topic for move in request.moves), "moves", begun)
        case ElectLeaders(), ElectLeadersReply():
            if request.partitions is None:
                return Change("Cluster", f"{request.kind} elections of all partitions")
            elected = [f"{result.topic}-{result.partition}" for result in reply.results if not result.code]
            return _of_many("Cluster", f"{request.kind} elections of", elected)
        case DeleteGroup(), _:
            return Change(f"Group:{request.group}", "deleted")
        case AbortTransaction(), _:
            return Change(f"TransactionalId:{request.key}", "aborted")
        case AbortHanging(), _:
            where = f"{request.topic}-{request.partition}"
            return Change(
                f"Topic:{request.topic}", f"aborted the transaction of producer {request.producer_id} in {where}"
            )
        case AlterClientQuotas(), AlterClientQuotasReply() if not request.validate_only:
            done = zip(request.alterations, reply.results, strict=False)
            return _of_many(
                "Cluster", "quotas:", [_quotas(alteration) for alteration, result in done if not result.code]
            )
        case CreateAcls(), _:
            return _of_many("Cluster", "added:", [str(binding_of(entry)) for entry in request.acls])
        case DeleteAcls(), DeleteAclsReply():
            return _of_many("Cluster", "removed:", [str(binding_of(entry)) for entry in reply.acls])
        case RestartBroker(), _:
            return Change("Cluster", "restart of this broker")
        case RestoreSetAside(), RestoreSetAsideReply():
            return Change(f"Topic:{reply.topic}", f"recreated from set-aside logs, topic id {request.topic_id}")
        case RemoveSetAside(), _:
            return _of_many("Cluster", "deleted set-aside logs", list(request.names))
        case CreateDelegationToken(), CreateDelegationTokenReply():
            return Change(f"DelegationToken:{reply.token.token_id}", f"created for {reply.token.owner}")
        case RenewDelegationToken(), DelegationTokenExpiryReply():
            return Change(f"DelegationToken:{request.token_id}", f"renewed until {reply.expiry_ms}")
        case ExpireDelegationToken(), DelegationTokenExpiryReply():
            return Change(f"DelegationToken:{request.token_id}", f"ends at {reply.expiry_ms}")
        case AlterUserScramCredentials(), AlterUserScramCredentialsReply():
            altered = [result.user for result in reply.users if not result.code]
            return _of_many(f"User:{_listed(altered)}", "credentials:", _credentials(request, set(altered)))
    return None


def _requested(request: Request) -> Change | None:
    """Return the change that a request may still make, although it was not complete in time."""
    match request:
        case CreateTopic() | DeleteTopic():
            return Change(f"Topic:{request.name}", "requested, not complete in time")
        case CreatePartitions() | AddColumns() | AlterTopic():
            return Change(f"Topic:{request.topic}", "requested, not complete in time")
        case ElectLeaders() | RestoreSetAside():
            return Change("Cluster", "requested, not complete in time")
        case AlterClientQuotas():
            return _of_many("Cluster", "requested quotas:", [_quotas(one) for one in request.alterations])
    return None


def _settings(request: AlterTopic) -> str:
    done = [f"{key}={value}" for key, value in request.config.items()] + [f"unset {key}" for key in request.unset]
    return _listed(done)


def _quotas(alteration: QuotaAlteration) -> str:
    key = alteration.key
    values = [f"unset {name}" if value is None else f"{name}={value:g}" for name, value in alteration.quotas.items()]
    return f"{QuotaEntity(key.user, key.client_id, key.ip)}: {' '.join(values)}"


def _credentials(request: AlterUserScramCredentials, altered: set[str]) -> list[str]:
    deleted = [f"deleted {one.mechanism} of {one.user}" for one in request.deletions if one.user in altered]
    return deleted + [f"set {one.mechanism} of {one.user}" for one in request.upsertions if one.user in altered]


def _topics(names: Iterable[str]) -> str:
    return f"Topic:{_listed(list(dict.fromkeys(names)))}"


def _of_many(resource: str, what: str, items: Sequence[str]) -> Change | None:
    return Change(resource, f"{what} {_listed(items)}") if items else None


def _listed(items: Sequence[str]) -> str:
    more = len(items) - _LISTED
    return ", ".join(items[:_LISTED]) + (f" and {more} more" if more > 0 else "")
