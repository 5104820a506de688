"""Access control lists (ACLs): which principal may do which operation on which resource, from which host.

This module is pure. The model is Kafka's:

- An ACL allows or denies one operation, or ``All``, to one principal, or to every principal (``User:*``).
- Its resource pattern is ``Literal`` (one name, or ``*`` for all names) or ``Prefixed``.
- An ACL that denies wins over every ACL that allows.
- An ACL that allows ``Read``, ``Write``, ``Delete`` or ``Alter`` also allows ``Describe``, and one that allows
  ``AlterConfigs`` also allows ``DescribeConfigs``. An ACL that denies affects only the operation that it names.
- Without a matching ACL the operation is denied. With ``allow.everyone.if.no.acl.found`` it is allowed if the resource
  has no ACL at all.
- Super users may do everything.

There are two differences from Kafka. First, a host may be a network, such as ``10.0.0.0/8``. Second, neither ``*`` nor
``allow.everyone.if.no.acl.found`` allows access to internal topics, because internal topics contain the data of all
groups and transactions. Sources: KIP-11, KIP-290; Kafka's ``AclAuthorizer``.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from enum import Enum
from ipaddress import IPv4Address, IPv6Address, ip_address, ip_network
from typing import NamedTuple, TypeVar

from sparklog.errors import ConfigError
from sparklog.model import is_internal
from sparklog.security.principals import EVERYONE, Principal, parse_principal

#: The name of a pattern that matches all names, and the host of an ACL for all hosts.
ANY = "*"
#: The name of the only resource of type Cluster, as in Kafka, and its alias here.
CLUSTER_NAME = "kafka-cluster"
CLUSTER_ALIAS = "sparklog-cluster"
_MAX_NAME = 1024


class _Text(str, Enum):
    """An enum whose members are strings. It replaces ``enum.StrEnum``, which Python 3.10 does not have."""

    def __str__(self) -> str:
        return str.__str__(self.value)

    def __format__(self, spec: str) -> str:
        return format(self.value, spec)


_E = TypeVar("_E", bound=_Text)


class Operation(_Text):
    """An operation that an ACL allows or denies."""

    ALL = "All"
    READ = "Read"
    WRITE = "Write"
    CREATE = "Create"
    DELETE = "Delete"
    ALTER = "Alter"
    DESCRIBE = "Describe"
    CLUSTER_ACTION = "ClusterAction"
    DESCRIBE_CONFIGS = "DescribeConfigs"
    ALTER_CONFIGS = "AlterConfigs"
    IDEMPOTENT_WRITE = "IdempotentWrite"
    CREATE_TOKENS = "CreateTokens"
    DESCRIBE_TOKENS = "DescribeTokens"


class ResourceType(_Text):
    """A type of resource that ACLs protect."""

    TOPIC = "Topic"
    GROUP = "Group"
    CLUSTER = "Cluster"
    TRANSACTIONAL_ID = "TransactionalId"
    DELEGATION_TOKEN = "DelegationToken"
    USER = "User"


class PatternType(_Text):
    """A rule by which the name in a resource pattern matches the name of a resource."""

    LITERAL = "Literal"
    PREFIXED = "Prefixed"


class Permission(_Text):
    """The effect of an ACL: it allows or denies an operation."""

    ALLOW = "Allow"
    DENY = "Deny"


#: The operations that each type of resource has, besides ``All``. Source: Kafka's ``AclEntry.supportedOperations``.
OPERATIONS: dict[ResourceType, frozenset[Operation]] = {
    ResourceType.TOPIC: frozenset(
        {
            Operation.READ,
            Operation.WRITE,
            Operation.CREATE,
            Operation.DELETE,
            Operation.ALTER,
            Operation.DESCRIBE,
            Operation.DESCRIBE_CONFIGS,
            Operation.ALTER_CONFIGS,
        }
    ),
    ResourceType.GROUP: frozenset({Operation.READ, Operation.DELETE, Operation.DESCRIBE}),
    ResourceType.CLUSTER: frozenset(
        {
            Operation.CREATE,
            Operation.ALTER,
            Operation.DESCRIBE,
            Operation.CLUSTER_ACTION,
            Operation.DESCRIBE_CONFIGS,
            Operation.ALTER_CONFIGS,
            Operation.IDEMPOTENT_WRITE,
        }
    ),
    ResourceType.TRANSACTIONAL_ID: frozenset({Operation.WRITE, Operation.DESCRIBE}),
    ResourceType.DELEGATION_TOKEN: frozenset({Operation.DESCRIBE}),
    ResourceType.USER: frozenset({Operation.CREATE_TOKENS, Operation.DESCRIBE_TOKENS}),
}

_IMPLIED_BY: dict[Operation, frozenset[Operation]] = {
    operation: frozenset({operation, Operation.ALL}) for operation in Operation
} | {
    Operation.DESCRIBE: frozenset(
        {
            Operation.DESCRIBE,
            Operation.READ,
            Operation.WRITE,
            Operation.DELETE,
            Operation.ALTER,
            Operation.ALL,
        }
    ),
    Operation.DESCRIBE_CONFIGS: frozenset({Operation.DESCRIBE_CONFIGS, Operation.ALTER_CONFIGS, Operation.ALL}),
}


class ResourcePattern(NamedTuple):
    """A set of resources of one type: one name, all names, or the names with a prefix."""

    resource_type: ResourceType
    name: str
    pattern_type: PatternType = PatternType.LITERAL

    def __str__(self) -> str:
        if self.pattern_type is PatternType.PREFIXED:
            return f"{self.resource_type} with the prefix {self.name!r}"
        return f"every {self.resource_type}" if self.name == ANY else f"{self.resource_type} {self.name!r}"

    def matches(self, name: str) -> bool:
        """Return whether the pattern matches the resource with this name."""
        if self.pattern_type is PatternType.PREFIXED:
            return name.startswith(self.name)
        return self.name in {name, ANY}


class AclBinding(NamedTuple):
    """One ACL with its resource pattern.

    ``host`` is an address, a network in CIDR notation, or ``*``.
    """

    pattern: ResourcePattern
    principal: Principal
    host: str
    operation: Operation
    permission: Permission

    def __str__(self) -> str:
        source = "any host" if self.host == ANY else self.host
        verb = "allows" if self.permission is Permission.ALLOW else "denies"
        return f"an ACL {verb} {self.principal} {self.operation} on {self.pattern} from {source}"


class AuthorizationResult(NamedTuple):
    """The result of an authorization: whether the operation is allowed, and a sentence about the rule that decided."""

    allowed: bool
    rule: str


def binding(
    resource_type: str,
    name: str,
    principal: str,
    operation: str,
    *,
    host: str = ANY,
    permission: str = Permission.ALLOW,
    pattern_type: str = PatternType.LITERAL,
) -> AclBinding:
    """Return the ACL with these parts. Enum values may be in upper or lower case, as in Kafka's tools.

    Raises:
        ConfigError: a part is unknown or empty, the host is neither an address nor a network, or the operation does not
            exist for this type of resource.
    """
    kind = _one_of(ResourceType, resource_type, "resource type")
    found = _one_of(Operation, operation, "operation")
    if found is not Operation.ALL and found not in OPERATIONS[kind]:
        expected = ", ".join(sorted(OPERATIONS[kind]))
        raise ConfigError(f"operation {found} found on a resource of type {kind}; expected All, {expected}")
    matched = _one_of(PatternType, pattern_type, "pattern type")
    if not name or len(name) > _MAX_NAME:
        raise ConfigError(f"resource name of {len(name)} characters found, 1 to {_MAX_NAME} expected")
    if kind is ResourceType.CLUSTER:
        name = cluster_name(name)
        if matched is not PatternType.LITERAL:
            raise ConfigError("a prefix of a Cluster's name found; the cluster is one resource")
    who = parse_principal(principal)
    if len(principal) > _MAX_NAME:
        raise ConfigError(f"principal of {len(principal)} characters found, at most {_MAX_NAME} expected")
    return AclBinding(
        ResourcePattern(kind, name, matched),
        who,
        canonical_host(host),
        found,
        _one_of(Permission, permission, "permission"),
    )


def cluster_name(name: str) -> str:
    """Return Kafka's name of the cluster resource, ``kafka-cluster``. ``name`` is this name or its alias.

    Raises:
        ConfigError: ``name`` is neither the name nor its alias.
    """
    if name not in {CLUSTER_NAME, CLUSTER_ALIAS, ANY}:
        raise ConfigError(f"resource name {name!r} of the Cluster found; expected {CLUSTER_ALIAS} or {CLUSTER_NAME}")
    return CLUSTER_NAME


def _one_of(choices: type[_E], text: str, what: str) -> _E:
    wanted = text.replace("_", "").replace("-", "").lower()
    for choice in choices:
        if choice.value.lower() == wanted:
            return choice
    raise ConfigError(f"{what} {text[:100]!r} found; expected one of {', '.join(choices)}")


def parse_operation(text: str) -> Operation:
    """Return the operation with this name, in upper or lower case. Raises ConfigError for an unknown name."""
    return _one_of(Operation, text, "operation")


def parse_resource_type(text: str) -> ResourceType:
    """Return the type of resource with this name, in upper or lower case. Raises ConfigError for an unknown name."""
    return _one_of(ResourceType, text, "resource type")


def parse_pattern_type(text: str) -> PatternType:
    """Return the type of pattern with this name, in upper or lower case. Raises ConfigError for an unknown name."""
    return _one_of(PatternType, text, "pattern type")


def parse_permission(text: str) -> Permission:
    """Return the permission with this name, in upper or lower case. Raises ConfigError for an unknown name."""
    return _one_of(Permission, text, "permission")


def canonical_host(host: str) -> str:
    """Return the canonical notation of an address or network. Return ``*`` unchanged.

    Raises:
        ConfigError: the text is neither an address nor a network nor ``*``.
    """
    if host == ANY:
        return ANY
    try:
        return str(ip_network(host)) if "/" in host else str(ip_address(host))
    except ValueError as error:
        raise ConfigError(f"host {host[:100]!r} found; expected an address, a network or {ANY}: {error}") from None


def _address(host: str) -> IPv4Address | IPv6Address | None:
    """Return the address, or None if the text is not an address. An IPv4 address within IPv6 counts as IPv4."""
    try:
        address = ip_address(host)
    except ValueError:
        return None
    if isinstance(address, IPv6Address) and address.ipv4_mapped is not None:
        return address.ipv4_mapped
    return address


def host_matches(rule: str, host: str) -> bool:
    """Return whether ``rule``, the host of an ACL, matches ``host``, the address of a connection."""
    if rule in {ANY, host}:
        return True
    address = _address(host)
    if address is None:
        return False
    return address in ip_network(rule) if "/" in rule else str(address) == rule


class AclFilter(NamedTuple):
    """A filter of ACLs. A field that is None accepts every value.

    With ``matching`` the filter accepts all ACLs whose patterns match a resource called ``name``. Without it, the
    filter accepts only ACLs whose pattern has exactly this name. Source: Kafka's ``AclBindingFilter`` with the pattern
    type MATCH.
    """

    resource_type: ResourceType | None = None
    name: str | None = None
    pattern_type: PatternType | None = None
    principal: Principal | None = None
    host: str | None = None
    operation: Operation | None = None
    permission: Permission | None = None
    matching: bool = False

    def accepts(self, acl: AclBinding) -> bool:
        """Return whether the filter accepts this ACL."""
        kind, name, pattern_type = acl.pattern
        if self.name is not None:
            wanted = CLUSTER_NAME if self.name == CLUSTER_ALIAS and kind is ResourceType.CLUSTER else self.name
            if not (acl.pattern.matches(wanted) if self.matching else name == wanted):
                return False
        return (
            self.resource_type in {None, kind}
            and self.pattern_type in {None, pattern_type}
            and self.principal in {None, acl.principal}
            and self.host in {None, acl.host}
            and self.operation in {None, acl.operation}
            and self.permission in {None, acl.permission}
        )


#: The ACLs of one pattern, by their principal.
_Entries = dict[Principal, tuple[AclBinding, ...]]


class _Patterns:
    """The patterns of one type of resource.

    ``_prefixes`` is sorted. For each prefix, ``_parents`` has the index of the longest other prefix with which it
    starts, or -1. So the prefixes of a name form one chain. A binary search finds the chain's start: the greatest
    prefix that is not greater than the name.
    """

    def __init__(self, acls: Iterable[AclBinding]) -> None:
        literal: dict[str, list[AclBinding]] = {}
        prefixed: dict[str, list[AclBinding]] = {}
        for acl in acls:
            kept = prefixed if acl.pattern.pattern_type is PatternType.PREFIXED else literal
            kept.setdefault(acl.pattern.name, []).append(acl)
        self.literal = {name: _by_principal(found) for name, found in literal.items()}
        self.prefixed = {name: _by_principal(found) for name, found in prefixed.items()}
        self._prefixes = sorted(prefixed)
        self._parents = _parents(self._prefixes)

    def matching(self, name: str) -> Iterator[_Entries]:
        """Return the ACLs of each pattern that matches the name. ``*`` comes last."""
        found = self.literal.get(name)
        if found is not None and name != ANY:
            yield found
        prefixes, at = self._prefixes, bisect_right(self._prefixes, name) - 1
        while at >= 0:
            if name.startswith(prefixes[at]):
                yield self.prefixed[prefixes[at]]
            at = self._parents[at]
        found = self.literal.get(ANY)
        if found is not None:
            yield found


def _by_principal(acls: Iterable[AclBinding]) -> _Entries:
    found: dict[Principal, list[AclBinding]] = {}
    for acl in acls:
        found.setdefault(acl.principal, []).append(acl)
    return {principal: tuple(listed) for principal, listed in found.items()}


def _parents(prefixes: Sequence[str]) -> list[int]:
    parents: list[int] = []
    chain: list[int] = []
    for index, prefix in enumerate(prefixes):
        while chain and not prefix.startswith(prefixes[chain[-1]]):
            chain.pop()
        parents.append(chain[-1] if chain else -1)
        chain.append(index)
    return parents


class AclTable:
    """A table of all ACLs of a cluster, with the super users. Immutable.

    The time of a decision depends on the number of patterns that match the name, and on the principal's ACLs in these
    patterns. It does not depend on the total number of ACLs.
    """

    def __init__(
        self,
        acls: Iterable[AclBinding] = (),
        *,
        super_users: frozenset[Principal] = frozenset(),
        allow_everyone_if_no_acl_found: bool = False,
    ) -> None:
        self.acls: tuple[AclBinding, ...] = tuple(sorted(set(acls)))
        self.super_users = super_users
        self.allow_everyone_if_no_acl_found = allow_everyone_if_no_acl_found
        by_type: dict[ResourceType, list[AclBinding]] = {}
        for acl in self.acls:
            by_type.setdefault(acl.pattern.resource_type, []).append(acl)
        self._types = {kind: _Patterns(found) for kind, found in by_type.items()}

    def with_acls(self, acls: Iterable[AclBinding]) -> AclTable:
        """Return a table with these ACLs, and with this table's super users and ``allow_everyone_if_no_acl_found``."""
        return AclTable(
            acls,
            super_users=self.super_users,
            allow_everyone_if_no_acl_found=self.allow_everyone_if_no_acl_found,
        )

    def decide(
        self, principal: Principal, host: str, operation: Operation, resource_type: ResourceType, name: str
    ) -> AuthorizationResult:
        """Decide whether ``principal`` may do the operation on the resource called ``name``.

        ``host`` is the address from which the principal sends the request.
        """
        if principal in self.super_users:
            return AuthorizationResult(True, f"{principal} is a super user")
        internal = resource_type is ResourceType.TOPIC and is_internal(name)
        implying = _IMPLIED_BY[operation]
        allowed: AclBinding | None = None
        found = False
        patterns = self._types.get(resource_type)
        for entries in patterns.matching(name) if patterns is not None else ():
            found = True
            for acl in (*entries.get(principal, ()), *entries.get(EVERYONE, ())):
                if acl.permission is Permission.DENY:
                    if acl.operation in {operation, Operation.ALL} and host_matches(acl.host, host):
                        return AuthorizationResult(False, str(acl))
                elif (
                    allowed is None
                    and acl.operation in implying
                    and not (internal and acl.pattern.name == ANY)
                    and host_matches(acl.host, host)
                ):
                    allowed = acl
        if allowed is not None:
            return AuthorizationResult(True, str(allowed))
        if self.allow_everyone_if_no_acl_found and not found and not internal:
            return AuthorizationResult(
                True, f"{resource_type} {name!r} has no ACL, and allow.everyone.if.no.acl.found is true"
            )
        return AuthorizationResult(
            False, f"no ACL allows {principal} {operation} on {resource_type} {name!r} from {host}"
        )

    def decide_any(
        self, principal: Principal, host: str, operation: Operation, resource_type: ResourceType
    ) -> AuthorizationResult:
        """Decide whether ``principal`` may do the operation on at least one resource of this type.

        An ACL that allows the operation has no effect here if another ACL denies the operation on all resources that
        the first one allows. Source: KIP-679, ``Authorizer.authorizeByResourceType``.
        """
        if principal in self.super_users:
            return AuthorizationResult(True, f"{principal} is a super user")
        denied: list[ResourcePattern] = []
        allowed: list[AclBinding] = []
        for acl in self.acls:
            if (
                acl.pattern.resource_type is not resource_type
                or acl.principal not in {principal, EVERYONE}
                or not host_matches(acl.host, host)
            ):
                continue
            if acl.permission is Permission.DENY and acl.operation in {operation, Operation.ALL}:
                denied.append(acl.pattern)
            elif acl.permission is Permission.ALLOW and acl.operation in _IMPLIED_BY[operation]:
                allowed.append(acl)
        for acl in allowed:
            if not any(_covers(pattern, acl.pattern) for pattern in denied):
                return AuthorizationResult(True, str(acl))
        if self.allow_everyone_if_no_acl_found and not any(pattern.name == ANY for pattern in denied):
            return AuthorizationResult(True, "allow.everyone.if.no.acl.found is true")
        return AuthorizationResult(False, f"no ACL allows {principal} {operation} on any {resource_type} from {host}")


def _covers(wider: ResourcePattern, pattern: ResourcePattern) -> bool:
    """Return whether every resource of ``pattern`` also belongs to ``wider``."""
    if wider.pattern_type is PatternType.LITERAL:
        return wider.name == ANY or (wider.name == pattern.name and pattern.pattern_type is PatternType.LITERAL)
    if pattern.pattern_type is PatternType.LITERAL and pattern.name == ANY:
        return False
    return pattern.name.startswith(wider.name)
