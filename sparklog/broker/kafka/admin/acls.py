"""DescribeAcls, CreateAcls and DeleteAcls requests of Kafka clients. Sources: KIP-140, KIP-290."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import Enum
from typing import Protocol, TypeVar

from sparklog.broker.kafka.acl_codes import (
    ANY,
    MATCH,
    OPERATION_CODES,
    OPERATIONS,
    PATTERN_TYPE_CODES,
    PATTERN_TYPES,
    PERMISSION_CODES,
    PERMISSIONS,
    RESOURCE_TYPE_CODES,
    RESOURCE_TYPES,
)
from sparklog.broker.kafka.admin.item_errors import FAILURES, SUCCESS, ItemError, item_error
from sparklog.broker.kafka.call import KafkaCall
from sparklog.errors import BrokerError, ConfigError, ErrorCode
from sparklog.kafka.wire.security import (
    AclCreation,
    AclCreationResult,
    AclDescription,
    CreateAclsRequest,
    CreateAclsResponse,
    DeleteAclsFilterResult,
    DeleteAclsMatchingAcl,
    DeleteAclsRequest,
    DeleteAclsResponse,
    DescribeAclsRequest,
    DescribeAclsResource,
    DescribeAclsResponse,
)
from sparklog.protocol.acl_messages import MAX_ADDED, AclCondition, AclEntry
from sparklog.protocol.messages import CreateAcls, DeleteAcls, DeleteAclsReply, DescribeAcls, DescribeAclsReply
from sparklog.security.acl_entries import binding_of
from sparklog.security.acls import parse_operation, parse_pattern_type, parse_permission, parse_resource_type
from sparklog.security.principals import parse_principal

_Part = TypeVar("_Part", bound=Enum)


class _Filter(Protocol):
    """The filter of a DescribeAcls or a DeleteAcls request."""

    @property
    def resource_type_filter(self) -> int: ...
    @property
    def resource_name_filter(self) -> str | None: ...
    @property
    def pattern_type_filter(self) -> int: ...
    @property
    def principal_filter(self) -> str | None: ...
    @property
    def host_filter(self) -> str | None: ...
    @property
    def operation(self) -> int: ...
    @property
    def permission_type(self) -> int: ...


async def describe_acls(call: KafkaCall, request: DescribeAclsRequest) -> DescribeAclsResponse:
    """Return the ACLs that the filter selects, grouped by resource pattern."""
    try:
        reply = await call.native(DescribeAcls(0, _condition(request)))
    except FAILURES as failure:
        error = item_error(failure)
        return DescribeAclsResponse(error_code=error.code, error_message=error.message)
    assert isinstance(reply, DescribeAclsReply)
    resources: dict[tuple[int, str, int], list[AclDescription]] = {}
    for acl in reply.acls:
        found = AclDescription(
            principal=acl.principal,
            host=acl.host,
            operation=OPERATION_CODES[parse_operation(acl.operation)],
            permission_type=PERMISSION_CODES[parse_permission(acl.permission)],
        )
        resources.setdefault(_pattern(acl), []).append(found)
    return DescribeAclsResponse(
        error_message=None,
        resources=[
            DescribeAclsResource(resource_type=kind, resource_name=name, pattern_type=pattern_type, acls=acls)
            for (kind, name, pattern_type), acls in resources.items()
        ],
    )


async def create_acls(call: KafkaCall, request: CreateAclsRequest) -> CreateAclsResponse:
    """Create the requested ACLs that are valid, and return the result of each requested ACL."""
    errors: list[ItemError] = []
    valid: list[AclEntry] = []
    for creation in request.creations:
        await call.pause()
        error = SUCCESS
        try:
            entry = _entry(creation)
            binding_of(entry)
            valid.append(entry)
        except ConfigError as failure:
            error = ItemError(ErrorCode.INVALID_REQUEST, str(failure))
        except BrokerError as failure:
            error = item_error(failure)
        errors.append(error)
    failed = await _create(call, valid)
    if failed is not None:
        errors = [error if error.code else failed for error in errors]
    return CreateAclsResponse(
        results=[AclCreationResult(error_code=error.code, error_message=error.message) for error in errors]
    )


async def _create(call: KafkaCall, entries: Sequence[AclEntry]) -> ItemError | None:
    """Create ACLs, and return the error or None. Without ACLs the call only checks the client's permission."""
    try:
        for first in range(0, len(entries) or 1, MAX_ADDED):
            await call.native(CreateAcls(0, tuple(entries[first : first + MAX_ADDED])))
    except FAILURES as failure:
        return item_error(failure)
    return None


async def delete_acls(call: KafkaCall, request: DeleteAclsRequest) -> DeleteAclsResponse:
    """Delete the ACLs that the filters select, and return the result of each filter."""
    results: list[DeleteAclsFilterResult] = []
    for wanted in request.filters:
        await call.pause()
        try:
            results.append(DeleteAclsFilterResult(error_message=None, matching_acls=await _delete(call, wanted)))
        except FAILURES as failure:
            error = item_error(failure)
            results.append(DeleteAclsFilterResult(error_code=error.code, error_message=error.message))
    return DeleteAclsResponse(filter_results=results)


async def _delete(call: KafkaCall, wanted: _Filter) -> list[DeleteAclsMatchingAcl]:
    """Delete the ACLs that one filter selects, and return them. Raises BrokerError."""
    reply = await call.native(DeleteAcls(0, (_condition(wanted),)))
    assert isinstance(reply, DeleteAclsReply)
    return [_matching(acl) for acl in reply.acls]


def _matching(acl: AclEntry) -> DeleteAclsMatchingAcl:
    kind, name, pattern_type = _pattern(acl)
    return DeleteAclsMatchingAcl(
        error_message=None,
        resource_type=kind,
        resource_name=name,
        pattern_type=pattern_type,
        principal=acl.principal,
        host=acl.host,
        operation=OPERATION_CODES[parse_operation(acl.operation)],
        permission_type=PERMISSION_CODES[parse_permission(acl.permission)],
    )


def _pattern(acl: AclEntry) -> tuple[int, str, int]:
    return (
        RESOURCE_TYPE_CODES[parse_resource_type(acl.resource_type)],
        acl.name,
        PATTERN_TYPE_CODES[parse_pattern_type(acl.pattern_type)],
    )


def _entry(creation: AclCreation) -> AclEntry:
    """Convert an ACL to that of sparklog's protocol. Raises BrokerError INVALID_REQUEST for an unknown number."""
    return AclEntry(
        _named(RESOURCE_TYPES, creation.resource_type, "resource type").value,
        creation.resource_name,
        _named(PATTERN_TYPES, creation.resource_pattern_type, "pattern type").value,
        creation.principal,
        creation.host,
        _named(OPERATIONS, creation.operation, "operation").value,
        _named(PERMISSIONS, creation.permission_type, "permission").value,
    )


def _condition(wanted: _Filter) -> AclCondition:
    """Return the condition that selects the ACLs of a filter. Raises BrokerError INVALID_REQUEST."""
    pattern_type = wanted.pattern_type_filter
    principal, host = wanted.principal_filter, wanted.host_filter
    if principal is not None and not _is_principal(principal):
        principal, host = None, ""  # As in Kafka, no ACL has such a principal. No ACL has an empty host.
    return AclCondition(
        _filtered(RESOURCE_TYPES, wanted.resource_type_filter, "resource type"),
        wanted.resource_name_filter,
        None if pattern_type == MATCH else _filtered(PATTERN_TYPES, pattern_type, "pattern type"),
        principal,
        host,
        _filtered(OPERATIONS, wanted.operation, "operation"),
        _filtered(PERMISSIONS, wanted.permission_type, "permission"),
        matching=pattern_type == MATCH,
    )


def _is_principal(text: str) -> bool:
    try:
        parse_principal(text)
    except ConfigError:
        return False
    return True


def _filtered(known: Mapping[int, _Part], code: int, what: str) -> str | None:
    """Return the name of the value that the filter requires, or None if it accepts all values. Raises BrokerError."""
    return None if code == ANY else _named(known, code, what).value


def _named(known: Mapping[int, _Part], code: int, what: str) -> _Part:
    if code not in known:
        raise BrokerError(ErrorCode.INVALID_REQUEST, f"unknown {what} {code} of an ACL")
    return known[code]
