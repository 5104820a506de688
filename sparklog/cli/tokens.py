"""``sparklog tokens``: delegation tokens, with which a program logs in as a user without the user's password."""

from __future__ import annotations

import datetime as dt
import itertools
import os
import secrets
from pathlib import Path
from typing import Annotated, Any, Optional

import typer

from sparklog.cli.acls import GroupNames, Operations, TopicNames, TransactionalIds
from sparklog.cli.options import AsJson, Bootstrap, Timeout, Yes, confirm, open_admin, span_ms
from sparklog.cli.output import done, print_json, print_line, print_table
from sparklog.client.admin.delegation_tokens import CreatedToken, DelegationTokenDescription, ScopeText
from sparklog.errors import ConfigError
from sparklog.net.client_security import ClientSecurity, client_security
from sparklog.protocol.sasl import OAUTHBEARER, SCRAM_SHA_256, SCRAM_SHA_512
from sparklog.security.acls import PatternType, ResourceType, parse_operation
from sparklog.security.listeners import SecurityProtocol

tokens = typer.Typer(
    help="Delegation tokens, with which a helper logs in: create, renew, expire, list.", no_args_is_help=True
)

Token = Annotated[str, typer.Argument(metavar="TOKEN", show_default=False)]
OwnToken = Annotated[
    Optional[str],  # noqa: UP045 - typer reads this on Python 3.10 as well
    typer.Argument(metavar="[TOKEN]", show_default=False, help="Id of the token. Default: that of this login."),
]
Period = Annotated[
    Optional[str],  # noqa: UP045 - as above
    typer.Option("--period", metavar="SPAN", help="Time from now until the token expires, such as 90s, 15m, 12h, 7d."),
]


@tokens.command("create")
def create(
    *,
    operation: Operations = None,
    topic: TopicNames = None,
    group: GroupNames = None,
    transactional_id: TransactionalIds = None,
    prefixed: Annotated[
        bool, typer.Option("--prefixed", help="The names are prefixes of the resources' names.")
    ] = False,
    renewer: Annotated[
        Optional[list[str]],  # noqa: UP045 - as above
        typer.Option("--renewer", metavar="TYPE:NAME", help="Principal that may renew and end the token; repeatable."),
    ] = None,
    period: Period = None,
    max_lifetime: Annotated[
        Optional[str],  # noqa: UP045 - as above
        typer.Option("--max-lifetime", metavar="SPAN", help="Time after which the token cannot be renewed."),
    ] = None,
    client_file: Annotated[
        Optional[Path],  # noqa: UP045 - as above
        typer.Option("--client-file", metavar="FILE", help="Write a client file with the token, and do not print it."),
    ] = None,
    bootstrap: Bootstrap = None,
    timeout: Timeout = 30.0,
    as_json: AsJson = False,
) -> None:
    """Create a token for the user of this login. With --operation and resources, such as --topic, the token allows only
    these operations on these resources. Otherwise it allows everything that the user may do.

    Example: sparklog tokens create --operation Read --topic orders --client-file reader.conf
    """
    scope = _scope(operation, topic, group, transactional_id, prefixed=prefixed)
    with open_admin(bootstrap, timeout) as admin:
        created = admin.create_delegation_token(
            renewers=renewer or (),
            max_lifetime_ms=_span(max_lifetime, "--max-lifetime"),
            period_ms=_span(period, "--period"),
            scope=scope,
        )
    if client_file is not None:
        _write_private(client_file, _client_settings(client_security(None), created))
    _show_created(created, client_file, as_json=as_json)


def _show_created(created: CreatedToken, client_file: Path | None, *, as_json: bool) -> None:
    token = created.token
    if client_file is not None:
        text = f"created token {token.token_id}, which expires at {_time(token.expiry_ms)}: {client_file}"
        done({**_document(token), "client_file": str(client_file)}, text, as_json=as_json)
    elif as_json:
        print_json({**_document(token), "secret": created.secret.reveal()})
    else:
        print_line(f"created token {token.token_id}, which expires at {_time(token.expiry_ms)}")
        print_line(f"secret: {created.secret.reveal()}")


@tokens.command("renew")
def renew(
    token: OwnToken = None,
    *,
    period: Period = None,
    bootstrap: Bootstrap = None,
    timeout: Timeout = 30.0,
    as_json: AsJson = False,
) -> None:
    """Renew a token, so that it expires later. The owner and the renewers of a token may renew it. A client that logs
    in with the token may renew it too, and may omit the token's id.

    Example: sparklog tokens renew --client-config reader.conf
    """
    if token is None:
        own = client_security(None)
        if not own.is_token:
            raise ConfigError("pass the id of a token: this login is not by a token")
        token = own.username
    with open_admin(bootstrap, timeout) as admin:
        expiry_ms = admin.renew_delegation_token(token, period_ms=_span(period, "--period"))
    _show_expiry(token, expiry_ms, as_json=as_json)


@tokens.command("expire")
def expire(
    token: Token,
    *,
    period: Period = None,
    yes: Yes = False,
    bootstrap: Bootstrap = None,
    timeout: Timeout = 30.0,
    as_json: AsJson = False,
) -> None:
    """End a token, now or after --period. Brokers close the connections that have logged in with it. Asks for
    confirmation unless --yes is given.

    Example: sparklog tokens expire 5VgN2pJkTu2c6yXSd0T3Zw --yes
    """
    after_ms = _span(period, "--period")
    confirm(f"End token {token}?", f"ending token {token}", yes=yes)
    with open_admin(bootstrap, timeout) as admin:
        expiry_ms = admin.expire_delegation_token(token, period_ms=after_ms)
    _show_expiry(token, expiry_ms, as_json=as_json)


@tokens.command("list")
def list_tokens(
    owner: Annotated[
        Optional[list[str]],  # noqa: UP045 - as above
        typer.Option("--owner", metavar="TYPE:NAME", help="Owner of the tokens, such as User:anna; repeatable."),
    ] = None,
    *,
    bootstrap: Bootstrap = None,
    timeout: Timeout = 30.0,
    as_json: AsJson = False,
) -> None:
    """List the tokens that the user of this login may see, without their secrets: those that the user owns or may
    renew, and those for which ACLs allow the user the operation Describe.

    Example: sparklog tokens list --owner User:anna
    """
    with open_admin(bootstrap, timeout) as admin:
        found = admin.list_delegation_tokens(owner)
    if as_json:
        print_json([_document(token) for token in found])
        return
    rows = [
        (one.token_id, one.owner, ", ".join(one.renewers), _time(one.expiry_ms), _time(one.max_ms), _allowed(one))
        for one in found
    ]
    print_table(("token", "owner", "renewers", "expires", "renewable until", "allows"), rows)


def _scope(
    operation: list[str] | None,
    topic: list[str] | None,
    group: list[str] | None,
    transactional_id: list[str] | None,
    *,
    prefixed: bool,
) -> list[ScopeText] | None:
    named = (
        (ResourceType.TOPIC, topic),
        (ResourceType.GROUP, group),
        (ResourceType.TRANSACTIONAL_ID, transactional_id),
    )
    resources = [(kind, name) for kind, names in named for name in names or ()]
    if not operation and not resources:
        return None
    if not operation or not resources:
        raise ConfigError("pass both --operation and a resource such as --topic, or neither")
    pattern_type = PatternType.PREFIXED if prefixed else PatternType.LITERAL
    return [
        (parse_operation(name).value, kind.value, resource, pattern_type.value)
        for name, (kind, resource) in itertools.product(operation, resources)
    ]


def _span(text: str | None, what: str) -> int | None:
    return None if text is None else span_ms(text, what=what)


def _client_settings(own: ClientSecurity, created: CreatedToken) -> str:
    """Return the text of a client file for the helper: the TLS of this login, and the token."""
    protocol = SecurityProtocol.SASL_SSL if own.protocol.uses_tls else SecurityProtocol.SASL_PLAINTEXT
    mechanism = own.mechanism or SCRAM_SHA_512
    settings = {
        "security.protocol": protocol.value,
        "ssl.ca.location": own.ca,
        "sasl.mechanism": SCRAM_SHA_256 if mechanism == OAUTHBEARER else mechanism,
        "sasl.tokenauth": "true",
        "sasl.username": created.token.token_id,
        "sasl.password": created.secret.reveal(),
    }
    lines = [f"{name} = {value}\n" for name, value in settings.items() if value]
    if own.protocol.uses_tls and not own.verify_hostname:
        lines.append("ssl.endpoint.identification.algorithm = none\n")
    return "".join(lines)


def _write_private(path: Path, text: str) -> None:
    """Write a file that only this user can read, in place of an existing one. Raises ConfigError."""
    new = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    try:
        with os.fdopen(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="utf-8") as file:
            file.write(text)
        new.replace(path)
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror or error}") from None


def _show_expiry(token: str, expiry_ms: int, *, as_json: bool) -> None:
    document = {"token": token, "expires": _time(expiry_ms)}
    done(document, f"token {token} expires at {_time(expiry_ms)}", as_json=as_json)


def _document(token: DelegationTokenDescription) -> dict[str, Any]:
    return {
        "token": token.token_id,
        "owner": token.owner,
        "renewers": token.renewers,
        "issued": _time(token.issue_ms),
        "expires": _time(token.expiry_ms),
        "renewable_until": _time(token.max_ms),
        "scope": None if token.scope_size is None else token.scope,
        "scope_size": token.scope_size,
    }


def _allowed(token: DelegationTokenDescription) -> str:
    if token.scope_size is None:
        return "everything"
    listed = [
        f"{one.operation} {one.resource_type} {one.name}{'*' if one.pattern_type == PatternType.PREFIXED.value else ''}"
        for one in token.scope
    ]
    more = token.scope_size - len(listed)
    return ", ".join(listed) + (f" and {more} more" if more else "") if token.scope_size else "nothing"


def _time(at_ms: int) -> str:
    return dt.datetime.fromtimestamp(at_ms / 1000, dt.timezone.utc).isoformat(" ", "seconds")
