"""``sparklog acls``: add, list and remove ACLs, and check what they allow."""

from __future__ import annotations

import itertools
from typing import Annotated, Any, Optional

import typer

from sparklog.cli.options import AsJson, Bootstrap, Timeout, Yes, confirm, open_admin
from sparklog.cli.output import done, print_json, print_line, print_table
from sparklog.errors import ConfigError
from sparklog.security.acls import (
    ANY,
    CLUSTER_ALIAS,
    AclBinding,
    AclFilter,
    Operation,
    PatternType,
    Permission,
    ResourceType,
    binding,
    canonical_host,
    parse_operation,
    parse_pattern_type,
)
from sparklog.security.principals import parse_principal

acls = typer.Typer(help="ACLs: who may do what. Add, list, remove, check.", no_args_is_help=True)

_ANY_PATTERN, _MATCH = "any", "match"
#: The values that stand for an option that is not given.
_ALL: tuple[None] = (None,)
#: The operations of the roles, by type of resource. Source: Kafka's ``kafka-acls --producer`` and ``--consumer``.
_PRODUCER = {
    ResourceType.TOPIC: (Operation.WRITE, Operation.DESCRIBE, Operation.CREATE),
    ResourceType.TRANSACTIONAL_ID: (Operation.WRITE, Operation.DESCRIBE),
}
_CONSUMER = {
    ResourceType.TOPIC: (Operation.READ, Operation.DESCRIBE),
    ResourceType.GROUP: (Operation.READ,),
}

Principals = Annotated[
    Optional[list[str]],  # noqa: UP045 - typer reads this on Python 3.10 as well
    typer.Option("--principal", metavar="TYPE:NAME", help="Principal, such as User:anna; User:* is every principal."),
]
Operations = Annotated[
    Optional[list[str]],  # noqa: UP045 - as above
    typer.Option("--operation", metavar="NAME", help="Operation, such as Read, Write, Describe or All."),
]
Hosts = Annotated[
    Optional[list[str]],  # noqa: UP045 - as above
    typer.Option("--host", metavar="ADDRESS", help="Address or network of clients, such as 10.0.0.0/8."),
]
Named = Optional[list[str]]  # noqa: UP045 - as above
TopicNames = Annotated[Named, typer.Option("--topic", metavar="NAME", help="Topic; '*' is every topic.")]
GroupNames = Annotated[Named, typer.Option("--group", metavar="NAME", help="Consumer group.")]
TransactionalIds = Annotated[Named, typer.Option("--transactional-id", metavar="NAME", help="Transactional id.")]
TokenNames = Annotated[Named, typer.Option("--delegation-token", metavar="ID", help="Delegation token.")]
UserNames = Annotated[Named, typer.Option("--user", metavar="NAME", help="Owner of delegation tokens.")]
Cluster = Annotated[bool, typer.Option("--cluster", help="The cluster itself.")]


def _resources(
    topic: Named, group: Named, transactional_id: Named, token: Named, user: Named, *, cluster: bool
) -> list[tuple[ResourceType, str]]:
    named = {
        ResourceType.TOPIC: topic,
        ResourceType.GROUP: group,
        ResourceType.CLUSTER: [CLUSTER_ALIAS] if cluster else None,
        ResourceType.TRANSACTIONAL_ID: transactional_id,
        ResourceType.DELEGATION_TOKEN: token,
        ResourceType.USER: user,
    }
    return [(kind, name) for kind, names in named.items() for name in names or ()]


@acls.command("add")
def add(
    principal: Principals = None,
    operation: Operations = None,
    *,
    topic: TopicNames = None,
    group: GroupNames = None,
    transactional_id: TransactionalIds = None,
    delegation_token: TokenNames = None,
    user: UserNames = None,
    cluster: Cluster = False,
    producer: Annotated[
        bool, typer.Option("--producer", help="What a producer needs: Write, Describe and Create.")
    ] = False,
    consumer: Annotated[
        bool, typer.Option("--consumer", help="What a consumer needs: Read and Describe on topics, Read on groups.")
    ] = False,
    prefixed: Annotated[
        bool, typer.Option("--prefixed", help="The names are prefixes of the resources' names.")
    ] = False,
    deny: Annotated[bool, typer.Option("--deny", help="Deny instead of allow. Denying ACLs win.")] = False,
    host: Hosts = None,
    bootstrap: Bootstrap = None,
    timeout: Timeout = 30.0,
    as_json: AsJson = False,
) -> None:
    """Add one ACL for each combination of the given principals, hosts, operations and resources.

    Example: sparklog acls add --principal User:anna --operation Write --topic orders
    """
    resources = _resources(topic, group, transactional_id, delegation_token, user, cluster=cluster)
    operations = [parse_operation(name) for name in operation or ()]
    if not principal or not resources or not (operations or producer or consumer):
        raise ConfigError("pass --principal, a resource such as --topic, and --operation, --producer or --consumer")
    found: dict[AclBinding, None] = {}
    for who, where, (kind, name) in itertools.product(principal, host or [ANY], resources):
        wanted = list(operations)
        wanted += _PRODUCER.get(kind, ()) if producer else ()
        wanted += _CONSUMER.get(kind, ()) if consumer else ()
        for one in wanted:
            acl = binding(
                kind,
                name,
                who,
                one,
                host=where,
                permission=Permission.DENY if deny else Permission.ALLOW,
                # The cluster is one resource, which has no prefix.
                pattern_type=PatternType.PREFIXED
                if prefixed and kind is not ResourceType.CLUSTER
                else PatternType.LITERAL,
            )
            found[acl] = None
    if not found:
        raise ConfigError("a producer uses topics and transactional ids, and a consumer topics and groups")
    with open_admin(bootstrap, timeout) as admin:
        admin.create_acls(found)
    _show(list(found), title="added", as_json=as_json)


@acls.command("list")
def list_acls(
    principal: Principals = None,
    operation: Operations = None,
    *,
    topic: TopicNames = None,
    group: GroupNames = None,
    transactional_id: TransactionalIds = None,
    delegation_token: TokenNames = None,
    user: UserNames = None,
    cluster: Cluster = False,
    pattern_type: Annotated[
        str,
        typer.Option(
            "--pattern-type",
            metavar="TYPE",
            help="literal, prefixed, any, or match: all patterns that match a resource of the name.",
        ),
    ] = _MATCH,
    host: Hosts = None,
    bootstrap: Bootstrap = None,
    timeout: Timeout = 30.0,
    as_json: AsJson = False,
) -> None:
    """List all ACLs, or those of the given principals, operations and resources.

    Example: sparklog acls list --topic orders
    """
    resources = _resources(topic, group, transactional_id, delegation_token, user, cluster=cluster)
    conditions = _conditions(principal, operation, host, resources, pattern_type)
    with open_admin(bootstrap, timeout) as admin:
        found = [acl for acl in admin.acls() if any(condition.accepts(acl) for condition in conditions)]
    _show(found, title="", as_json=as_json)


@acls.command("remove")
def remove(
    principal: Principals = None,
    operation: Operations = None,
    *,
    topic: TopicNames = None,
    group: GroupNames = None,
    transactional_id: TransactionalIds = None,
    delegation_token: TokenNames = None,
    user: UserNames = None,
    cluster: Cluster = False,
    pattern_type: Annotated[
        str, typer.Option("--pattern-type", metavar="TYPE", help="literal, prefixed, any or match, as for 'list'.")
    ] = PatternType.LITERAL.value,
    host: Hosts = None,
    yes: Yes = False,
    bootstrap: Bootstrap = None,
    timeout: Timeout = 30.0,
    as_json: AsJson = False,
) -> None:
    """Remove the ACLs that 'list' shows for the same options. Asks for confirmation unless --yes is given.

    Example: sparklog acls remove --principal User:anna --topic orders
    """
    resources = _resources(topic, group, transactional_id, delegation_token, user, cluster=cluster)
    if not (principal or resources):
        raise ConfigError("pass --principal or a resource such as --topic")
    conditions = _conditions(principal, operation, host, resources, pattern_type)
    with open_admin(bootstrap, timeout) as admin:
        found = [acl for acl in admin.acls() if any(condition.accepts(acl) for condition in conditions)]
        if found and not as_json:
            _show(found, title="", as_json=False)
        if found:
            confirm(f"Remove {len(found)} ACLs?", "removing ACLs", yes=yes)
            found = admin.delete_acls(_exactly(acl) for acl in found)
    done(
        {"removed": [_plain(acl) for acl in found]},
        f"{len(found)} ACLs removed" if found else "no ACL found",
        as_json=as_json,
    )


@acls.command("check")
def check(
    principal: Annotated[str, typer.Option("--principal", metavar="TYPE:NAME", help="Principal, such as User:anna.")],
    operation: Annotated[str, typer.Option("--operation", metavar="NAME", help="Operation, such as Write.")],
    *,
    topic: TopicNames = None,
    group: GroupNames = None,
    transactional_id: TransactionalIds = None,
    delegation_token: TokenNames = None,
    user: UserNames = None,
    cluster: Cluster = False,
    host: Annotated[str, typer.Option("--host", metavar="ADDRESS", help="Address of the client.")] = ANY,
    bootstrap: Bootstrap = None,
    timeout: Timeout = 30.0,
    as_json: AsJson = False,
) -> None:
    """Show whether a principal may do something, and which rule decides. The exit code is 1 if it is denied.

    Example: sparklog acls check --principal User:anna --operation Write --topic orders
    """
    resources = _resources(topic, group, transactional_id, delegation_token, user, cluster=cluster)
    if len(resources) != 1:
        raise ConfigError(f"{len(resources)} resources found, one expected, such as --topic orders")
    [(kind, name)] = resources
    with open_admin(bootstrap, timeout) as admin:
        decision = admin.check_acl(principal, operation, resource_type=kind, name=name, host=canonical_host(host))
    verdict = "allowed" if decision.allowed else "denied"
    done(
        {"allowed": decision.allowed, "rule": decision.rule},
        f"{verdict}: {decision.rule}",
        as_json=as_json,
    )
    if not decision.allowed:
        raise typer.Exit(1)


def _conditions(
    principals: Named,
    operations: Named,
    hosts: Named,
    resources: list[tuple[ResourceType, str]],
    pattern_type: str,
) -> list[AclFilter]:
    """Return one filter for each combination of the options. An option that is not given accepts every value."""
    kind = pattern_type.lower()
    pattern = None if kind in {_ANY_PATTERN, _MATCH} else parse_pattern_type(pattern_type)
    named: list[tuple[ResourceType | None, str | None]] = [*resources] or [(None, None)]
    return [
        AclFilter(
            resource_type,
            name,
            pattern if name is not None else None,
            None if who is None else parse_principal(who),
            None if where is None else canonical_host(where),
            None if what is None else parse_operation(what),
            matching=kind == _MATCH,
        )
        for (resource_type, name), who, where, what in itertools.product(
            named, principals or _ALL, hosts or _ALL, operations or _ALL
        )
    ]


def _exactly(acl: AclBinding) -> AclFilter:
    """Return the filter that accepts only this ACL."""
    return AclFilter(*acl.pattern, acl.principal, acl.host, acl.operation, acl.permission)


def _show(found: list[AclBinding], *, title: str, as_json: bool) -> None:
    if as_json:
        print_json([_plain(acl) for acl in found])
        return
    if not found:
        print_line("no ACL found")
        return
    columns = ("principal", "permission", "operation", "resource", "name", "pattern", "host")
    rows = [
        (
            str(acl.principal),
            acl.permission,
            acl.operation,
            acl.pattern.resource_type,
            acl.pattern.name,
            acl.pattern.pattern_type,
            acl.host,
        )
        for acl in sorted(found)
    ]
    print_table(columns, rows, title=title)


def _plain(acl: AclBinding) -> dict[str, Any]:
    return {
        "principal": str(acl.principal),
        "permission": acl.permission.value,
        "operation": acl.operation.value,
        "resource_type": acl.pattern.resource_type.value,
        "name": acl.pattern.name,
        "pattern_type": acl.pattern.pattern_type.value,
        "host": acl.host,
    }
