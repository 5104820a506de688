"""Messages about access control lists (ACLs).

The values of text fields are those of ``security.acls``, such as the operation ``Write`` and the pattern type
``Prefixed``. The broker accepts them in upper or lower case, and sends them in the case of ``security.acls``. Sources:
KIP-140, KIP-290.
"""

from __future__ import annotations

from typing import Annotated

import msgspec

from sparklog.protocol.fields import Listed, Message, Name

#: The maximum number of ACLs that one request adds. Each resource pattern takes one write to ZooKeeper.
MAX_ADDED = 1000
#: The maximum number of conditions in one request. The broker compares each condition with every ACL.
MAX_CONDITIONS = 100
#: The name of a resource or a principal.
LongName = Annotated[str, msgspec.Meta(max_length=1024)]


class AclEntry(msgspec.Struct, frozen=True, array_like=True):
    """One ACL, with the resource pattern that it applies to."""

    resource_type: Name
    name: LongName
    pattern_type: Name
    principal: LongName
    host: Name
    operation: Name
    permission: Name


class AclCondition(msgspec.Struct, frozen=True, array_like=True):
    """A condition that selects ACLs. A field that is None accepts every value.

    With ``matching`` the condition selects the ACLs of all patterns that match the resource ``name``.
    """

    resource_type: Name | None = None
    name: LongName | None = None
    pattern_type: Name | None = None
    principal: LongName | None = None
    host: Name | None = None
    operation: Name | None = None
    permission: Name | None = None
    matching: bool = False


class CreateAcls(Message, frozen=True, tag="create_acls"):
    """A request to add ACLs. The broker replies with an Ack after it has stored them.

    If one ACL is invalid, the broker adds none of them.
    """

    acls: Annotated[tuple[AclEntry, ...], msgspec.Meta(max_length=MAX_ADDED)]


class DescribeAcls(Message, frozen=True, tag="describe_acls"):
    """A request for the ACLs that satisfy a condition."""

    condition: AclCondition = AclCondition()


class DescribeAclsReply(Message, frozen=True, tag="describe_acls_reply"):
    """The reply to DescribeAcls.

    ``super_users`` and ``allow_everyone`` are the broker's settings ``super.users`` and
    ``allow.everyone.if.no.acl.found``. With them a client can compute the decisions of the broker.
    """

    acls: Listed[AclEntry]
    super_users: Listed[str] = ()
    allow_everyone: bool = False
    throttle_time_ms: int = 0


class DeleteAcls(Message, frozen=True, tag="delete_acls"):
    """A request to delete all ACLs that satisfy at least one of the conditions."""

    conditions: Annotated[tuple[AclCondition, ...], msgspec.Meta(max_length=MAX_CONDITIONS)]


class DeleteAclsReply(Message, frozen=True, tag="delete_acls_reply"):
    """The reply to DeleteAcls: the ACLs that were deleted."""

    acls: Listed[AclEntry]
    throttle_time_ms: int = 0
