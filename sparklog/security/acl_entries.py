"""The conversion between ACLs or ACL filters and the structs in messages.

This module is pure.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from sparklog.protocol.messages import AclCondition, AclEntry
from sparklog.security.acls import (
    AclBinding,
    AclFilter,
    binding,
    parse_operation,
    parse_pattern_type,
    parse_permission,
    parse_resource_type,
)
from sparklog.security.principals import parse_principal

_T = TypeVar("_T")


def entry_of(acl: AclBinding) -> AclEntry:
    """Return the message struct for an ACL."""
    pattern = acl.pattern
    return AclEntry(
        pattern.resource_type.value,
        pattern.name,
        pattern.pattern_type.value,
        str(acl.principal),
        acl.host,
        acl.operation.value,
        acl.permission.value,
    )


def binding_of(entry: AclEntry) -> AclBinding:
    """Return the ACL that a message struct describes. Raises ConfigError if the ACL is invalid."""
    return binding(
        entry.resource_type,
        entry.name,
        entry.principal,
        entry.operation,
        host=entry.host,
        permission=entry.permission,
        pattern_type=entry.pattern_type,
    )


def condition_to_send(condition: AclFilter) -> AclCondition:
    """Return the message struct for an ACL filter."""
    return AclCondition(
        condition.resource_type and condition.resource_type.value,
        condition.name,
        condition.pattern_type and condition.pattern_type.value,
        str(condition.principal) if condition.principal is not None else None,
        condition.host,
        condition.operation and condition.operation.value,
        condition.permission and condition.permission.value,
        condition.matching,
    )


def condition_of(condition: AclCondition) -> AclFilter:
    """Return the ACL filter that a message struct describes. Raises ConfigError if the filter is invalid."""
    return AclFilter(
        _parsed(parse_resource_type, condition.resource_type),
        condition.name,
        _parsed(parse_pattern_type, condition.pattern_type),
        _parsed(parse_principal, condition.principal),
        condition.host,
        _parsed(parse_operation, condition.operation),
        _parsed(parse_permission, condition.permission),
        condition.matching,
    )


def _parsed(parse: Callable[[str], _T], text: str | None) -> _T | None:
    return None if text is None else parse(text)
