"""The codes of Kafka's protocol for operations, permissions, and types of resources and patterns in ACLs.

Source: Kafka's ``AclOperation`` and similar enums.
"""

from __future__ import annotations

from collections.abc import Iterable

from sparklog.security.acls import Operation, PatternType, Permission, ResourceType

#: The number that means "any" in a filter. It is the same for every part of an ACL.
ANY = 1
#: A pattern type that only filters have. It selects every pattern that matches a resource.
MATCH = 2
#: The value of a response's authorized operations if the client has not requested them.
OPERATIONS_NOT_ASKED = -(2**31)

RESOURCE_TYPES: dict[int, ResourceType] = {
    2: ResourceType.TOPIC,
    3: ResourceType.GROUP,
    4: ResourceType.CLUSTER,
    5: ResourceType.TRANSACTIONAL_ID,
    6: ResourceType.DELEGATION_TOKEN,
    7: ResourceType.USER,
}
PATTERN_TYPES: dict[int, PatternType] = {3: PatternType.LITERAL, 4: PatternType.PREFIXED}
OPERATIONS: dict[int, Operation] = {
    2: Operation.ALL,
    3: Operation.READ,
    4: Operation.WRITE,
    5: Operation.CREATE,
    6: Operation.DELETE,
    7: Operation.ALTER,
    8: Operation.DESCRIBE,
    9: Operation.CLUSTER_ACTION,
    10: Operation.DESCRIBE_CONFIGS,
    11: Operation.ALTER_CONFIGS,
    12: Operation.IDEMPOTENT_WRITE,
    13: Operation.CREATE_TOKENS,
    14: Operation.DESCRIBE_TOKENS,
}
PERMISSIONS: dict[int, Permission] = {2: Permission.DENY, 3: Permission.ALLOW}

RESOURCE_TYPE_CODES = {kind: code for code, kind in RESOURCE_TYPES.items()}
PATTERN_TYPE_CODES = {kind: code for code, kind in PATTERN_TYPES.items()}
OPERATION_CODES = {operation: code for code, operation in OPERATIONS.items()}
PERMISSION_CODES = {permission: code for code, permission in PERMISSIONS.items()}


def operations_field(operations: Iterable[Operation]) -> int:
    """Return these operations as a bit field. Responses call this field "authorized operations"."""
    return sum(1 << OPERATION_CODES[operation] for operation in operations)
