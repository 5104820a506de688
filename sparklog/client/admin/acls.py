"""The administration of ACLs: adding, listing and removing them, and checking what they allow."""

from __future__ import annotations

from collections.abc import Iterable

from sparklog.client.cluster.blocking_cluster import BlockingCluster
from sparklog.client.cluster.request_pieces import pieces
from sparklog.protocol.messages import (
    Ack,
    CreateAcls,
    DeleteAcls,
    DeleteAclsReply,
    DescribeAcls,
    DescribeAclsReply,
)
from sparklog.security.acl_entries import binding_of, condition_to_send, entry_of
from sparklog.security.acls import AclBinding, AclFilter, AclTable, AuthorizationResult, Operation, ResourceType
from sparklog.security.principals import Principal, parse_principal


def create_acls(cluster: BlockingCluster, acls: Iterable[AclBinding]) -> None:
    """Add ACLs. See ``Admin.create_acls`` for the arguments and errors."""
    for piece in pieces(tuple(map(entry_of, acls))):
        request = CreateAcls(0, tuple(piece))
        cluster.retrying("adding ACLs", lambda request=request: cluster.ask_any(request, Ack))  # type: ignore[misc]


def acl_table(cluster: BlockingCluster, condition: AclFilter) -> AclTable:
    """Return the ACLs that satisfy a condition, and the super users of the broker that replied."""
    request = DescribeAcls(0, condition_to_send(condition))
    reply = cluster.retrying("listing ACLs", lambda: cluster.ask_any(request, DescribeAclsReply))
    return AclTable(
        map(binding_of, reply.acls),
        super_users=frozenset(map(parse_principal, reply.super_users)),
        allow_everyone_if_no_acl_found=reply.allow_everyone,
    )


def delete_acls(cluster: BlockingCluster, conditions: Iterable[AclFilter]) -> list[AclBinding]:
    """Remove ACLs. See ``Admin.delete_acls`` for the arguments and errors."""
    removed: list[AclBinding] = []
    for piece in pieces(tuple(map(condition_to_send, conditions))):
        request = DeleteAcls(0, tuple(piece))
        reply = cluster.retrying(
            "removing ACLs",
            lambda request=request: cluster.ask_any(request, DeleteAclsReply),  # type: ignore[misc]
        )
        removed += map(binding_of, reply.acls)
    return removed


def check_acl(
    cluster: BlockingCluster,
    principal: Principal,
    operation: Operation,
    *,
    resource_type: ResourceType,
    name: str,
    host: str,
) -> AuthorizationResult:
    """Return a broker's decision about an operation, based on its ACLs.

    See ``Admin.check_acl`` for the arguments and errors.
    """
    table = acl_table(cluster, AclFilter(resource_type=resource_type, name=name, matching=True))
    return table.decide(principal, host, operation, resource_type, name)
