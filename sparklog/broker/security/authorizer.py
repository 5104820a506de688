"""The authorizer of one broker, which applies the cluster's ACLs to requests.

Super users may do everything, and so may brokers and controllers that have proved their identity. If a client has
logged in with a delegation token, the token's scope must also allow the operation. The authorizer caches all decisions
until the ACLs change.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Protocol

from sparklog.broker.security.audit_log import AuditedConnection
from sparklog.config import BrokerConfig
from sparklog.errors import BrokerError, ConfigError, ErrorCode
from sparklog.protocol.messages import Request
from sparklog.protocol.proof import Identity
from sparklog.security.acls import AclTable, AuthorizationResult, Operation, ResourceType
from sparklog.security.principals import Principal, parse_super_users
from sparklog.security.request_rules import REFUSALS, Clause, Need

#: The maximum number of cached decisions. When it is reached, the cache is cleared, because a client can name any
#: number of resources.
MOST_CACHED = 100_000
#: The maximum length of a resource name in the cache. No topic name is longer.
_LONGEST_CACHED = 255

#: A function that returns the ACLs that limit the holder of a delegation token, or None if the token has no scope.
ScopeOf = Callable[[str], "AclTable | None"]
_Known = dict[tuple[Operation, ResourceType, "str | None"], bool]


class Requester(AuditedConnection, Protocol):
    """The part of a connection that the authorizer uses: its principal, address, proved identity and token."""

    @property
    def identity(self) -> Identity | None: ...

    @property
    def token_id(self) -> str: ...


class DenialLog(Protocol):
    """The part of the audit log to which the authorizer reports denied requests.

    ``audit_log.Audit`` implements it.
    """

    def denied(
        self, connection: AuditedConnection, request: Request | str, operation: str, resource: str, rule: str
    ) -> None: ...


def _unlimited(token_id: str) -> AclTable | None:
    """Return None: no token has a scope."""
    return None


def authorizer_of(config: BrokerConfig, denials: DenialLog, scope_of: ScopeOf = _unlimited) -> Authorizer | None:
    """Return the authorizer if the settings enable it, otherwise None.

    ``scope_of`` returns the scopes of delegation tokens.

    Raises:
        ConfigError: a super user is not a valid principal, or the authorizer is enabled but the setting ``super.users``
            is empty. Without a super user no client could add the first ACL.
    """
    super_users = parse_super_users(config.super_users)
    if config.authorizer_enable == "false" or (config.authorizer_enable == "auto" and not super_users):
        return None
    if not super_users:
        raise ConfigError("authorizer.enable=true: expected at least one principal in super.users, such as User:admin")
    everyone = config.allow_everyone_if_no_acl_found
    return Authorizer(AclTable(super_users=super_users, allow_everyone_if_no_acl_found=everyone), denials, scope_of)


class _NoAcls(AclTable):
    """The table of a broker without ACLs, which allows everything."""

    def decide(
        self, principal: Principal, host: str, operation: Operation, resource_type: ResourceType, name: str
    ) -> AuthorizationResult:
        return AuthorizationResult(True, "the broker has no ACLs")

    def decide_any(
        self, principal: Principal, host: str, operation: Operation, resource_type: ResourceType
    ) -> AuthorizationResult:
        return AuthorizationResult(True, "the broker has no ACLs")


def scope_authorizer(denials: DenialLog, scope_of: ScopeOf) -> Authorizer:
    """Return an authorizer for a broker without ACLs, where only the scopes of delegation tokens limit clients.

    Use the authorizer only for connections for which ``has_scope`` is true.
    """
    found = Authorizer(_NoAcls(), denials, scope_of)
    found.set_acls(_NoAcls())
    return found


class Authorizer:
    """The authorizer of one broker: it decides by the ACLs which requests are allowed, and caches its decisions.

    At first ``table`` has the super users and no ACLs. Until ``set_acls`` is called, requests of other principals get a
    retriable error. ``scope_of`` returns the scope of a delegation token. Not thread-safe: use it only on the broker's
    event loop.
    """

    def __init__(self, table: AclTable, denials: DenialLog, scope_of: ScopeOf = _unlimited) -> None:
        self._table = table
        self._denials = denials
        self._scope_of = scope_of
        self._loaded = False
        #: The decisions by principal, host and delegation token, then by operation and resource.
        self._known: dict[tuple[Principal, str, str], _Known] = {}
        self._cached = 0

    @property
    def table(self) -> AclTable:
        """Return the current ACLs and super users."""
        return self._table

    @property
    def cached(self) -> int:
        """Return the number of cached decisions."""
        return self._cached

    def set_acls(self, table: AclTable) -> None:
        """Use these ACLs for all later decisions, and drop the cached decisions."""
        self._table = table
        self._loaded = True
        self._clear()

    def has_scope(self, connection: Requester) -> bool:
        """Return whether the client has logged in with a delegation token that has a scope."""
        return bool(connection.token_id) and self._scope_of(connection.token_id) is not None

    def skips(self, connection: Requester) -> bool:
        """Return whether all requests of the connection are allowed, so that the ACLs need not be checked.

        The result is true for a super user, unless it has logged in with a token that has a scope. It is also true for
        a broker or controller that has proved its identity.

        Raises:
            BrokerError: BROKER_NOT_AVAILABLE, the broker has not read the ACLs yet.
        """
        if connection.identity is not None or connection.principal in self._table.super_users:
            return not connection.token_id or not self.has_scope(connection)
        if not self._loaded:
            raise BrokerError(ErrorCode.BROKER_NOT_AVAILABLE, "the broker has not read the ACLs yet")
        return False

    def allows(
        self, connection: Requester, operation: Operation, resource_type: ResourceType, name: str | None
    ) -> bool:
        """Return whether the connection's principal may do the operation on the resource called ``name``.

        If ``name`` is None, return whether it may do the operation on at least one resource of the type.
        """
        known = self._known.get((connection.principal, connection.peer_host, connection.token_id))
        if known is not None:
            allowed = known.get((operation, resource_type, name))
            if allowed is not None:
                return allowed
        allowed = self.decide(connection, Need(operation, resource_type, name)).allowed
        if name is None or len(name) <= _LONGEST_CACHED:
            self._remember(connection, (operation, resource_type, name), allowed=allowed)
        return allowed

    def _remember(
        self, connection: Requester, key: tuple[Operation, ResourceType, str | None], *, allowed: bool
    ) -> None:
        if self._cached >= MOST_CACHED:
            self._clear()
        of = connection.principal, connection.peer_host, connection.token_id
        self._known.setdefault(of, {})[key] = allowed
        self._cached += 1

    def _clear(self) -> None:
        self._known.clear()
        self._cached = 0

    def decide(self, connection: Requester, need: Need) -> AuthorizationResult:
        """Decide without the cache whether ``need`` is allowed. The result has the rule that decided."""
        found = _decision(self._table, connection, need)
        scope = self._scope_of(connection.token_id) if connection.token_id else None
        if scope is None or not found.allowed or _decision(scope, connection, need).allowed:
            return found
        return AuthorizationResult(False, f"the scope of delegation token {connection.token_id} does not allow {need}")

    def require(self, connection: Requester, request: Request, clauses: Iterable[Clause]) -> None:
        """Check the clauses of a request: the connection must be allowed at least one operation of each clause.

        Raises:
            BrokerError: no operation of a clause is allowed. The error is that of the clause's last operation.
        """
        for clause in clauses:
            for need in clause:
                if self.allows(connection, *need):
                    break
            else:
                if self._is_within_scope(connection, clause):
                    continue
                detail = self.deny(connection, request, clause[-1])
                raise BrokerError(REFUSALS[clause[-1].resource_type], detail)

    def _is_within_scope(self, connection: Requester, clause: Clause) -> bool:
        """Return whether the ACLs and the scope of the client's token allow different needs of the clause.

        An example is a principal that may create all topics, with a token for the creation of one topic.
        """
        scope = self._scope_of(connection.token_id) if connection.token_id and len(clause) > 1 else None
        return scope is not None and all(
            any(_decision(table, connection, need).allowed for need in clause) for table in (self._table, scope)
        )

    def deny(self, connection: Requester, request: Request | str, need: Need) -> str:
        """Write the denial and its rule to the audit log. Return an error text for the client, without the rule."""
        rule = self.decide(connection, need).rule
        name = "*" if need.name is None else need.name
        self._denials.denied(connection, request, need.operation.value, f"{need.resource_type}:{name}", rule)
        return f"{connection.principal} may not {need.operation} on {need.resource_type} {name[:255]!r}"


def _decision(table: AclTable, connection: Requester, need: Need) -> AuthorizationResult:
    operation, resource_type, name = need
    principal, host = connection.principal, connection.peer_host
    if name is None:
        return table.decide_any(principal, host, operation, resource_type)
    return table.decide(principal, host, operation, resource_type, name)
