"""``sparklog quotas``: limits on the bytes, the request time and the new connections of clients."""

from __future__ import annotations

from typing import Annotated, Optional

import typer

from sparklog.cli.options import AsJson, Bootstrap, Timeout, byte_count, open_admin, pairs
from sparklog.cli.output import done, print_json, print_table
from sparklog.client.admin.quotas import ClientQuotas
from sparklog.errors import BrokerError, ConfigError, ErrorCode
from sparklog.security.quotas import CONSUMER_BYTE_RATE, DEFAULT, PRODUCER_BYTE_RATE, QUOTA_NAMES, QuotaEntity

quotas = typer.Typer(help="Quotas of users, client ids and addresses: set, list, remove.", no_args_is_help=True)

User = Annotated[
    Optional[str],  # noqa: UP045 - typer reads this on Python 3.10 as well
    typer.Option("--user", metavar="NAME", help="The user that has logged in."),
]
Client = Annotated[
    Optional[str],  # noqa: UP045 - as above
    typer.Option("--client-id", "--client", metavar="NAME", help="The id that the client gives itself."),
]
Address = Annotated[
    Optional[str],  # noqa: UP045 - as above
    typer.Option("--ip", metavar="ADDRESS", help="The address of the client."),
]
UserDefaults = Annotated[bool, typer.Option("--user-defaults", help="All users without a quota of their own.")]
ClientDefaults = Annotated[bool, typer.Option("--client-defaults", help="All client ids without a quota of their own.")]
AddressDefaults = Annotated[bool, typer.Option("--ip-defaults", help="All addresses without a quota of their own.")]


@quotas.command("set")
def set_quotas(
    values: Annotated[list[str], typer.Argument(metavar="NAME=VALUE...", show_default=False)],
    *,
    user: User = None,
    user_defaults: UserDefaults = False,
    client_id: Client = None,
    client_defaults: ClientDefaults = False,
    ip: Address = None,
    ip_defaults: AddressDefaults = False,
    bootstrap: Bootstrap = None,
    timeout: Timeout = 30.0,
    as_json: AsJson = False,
) -> None:
    """Set quotas of a user, a client id, a client id of a user, or an address. Users and client ids have
    producer_byte_rate, consumer_byte_rate and request_percentage. Addresses have connection_creation_rate. Other
    quotas of the same clients stay.

    Example: sparklog quotas set --user anna producer_byte_rate=10MB request_percentage=20
    """
    entity = _required(
        _entity(
            user, client_id, ip, user_defaults=user_defaults, client_defaults=client_defaults, ip_defaults=ip_defaults
        )
    )
    wanted = {name: _value(name, text) for name, text in pairs(values, what="quota").items()}
    with open_admin(bootstrap, timeout) as admin:
        admin.alter_quotas(wanted, user=entity.user, client_id=entity.client_id, ip=entity.ip)
    listed = ", ".join(f"{name}={value:.17g}" for name, value in wanted.items())
    done(_described(entity) | {"quotas": wanted}, f"set for {entity}: {listed}", as_json=as_json)


@quotas.command("list")
def list_quotas(
    *,
    user: User = None,
    user_defaults: UserDefaults = False,
    client_id: Client = None,
    client_defaults: ClientDefaults = False,
    ip: Address = None,
    ip_defaults: AddressDefaults = False,
    bootstrap: Bootstrap = None,
    timeout: Timeout = 30.0,
    as_json: AsJson = False,
) -> None:
    """List all quotas, or those of the given user, client id or address.

    Example: sparklog quotas list --user anna
    """
    wanted = _entity(
        user, client_id, ip, user_defaults=user_defaults, client_defaults=client_defaults, ip_defaults=ip_defaults
    )
    with open_admin(bootstrap, timeout) as admin:
        found = admin.describe_quotas(user=wanted.user, client_id=wanted.client_id, ip=wanted.ip)
    if as_json:
        print_json([_described(_entity_of(one)) | {"quotas": one.quotas} for one in found])
        return
    rows = [(_entity_of(one), name, f"{value:.17g}") for one in found for name, value in sorted(one.quotas.items())]
    print_table(("clients", "quota", "value"), rows, numeric=("value",))


@quotas.command("remove")
def remove_quotas(
    names: Annotated[
        Optional[list[str]],  # noqa: UP045 - as above
        typer.Argument(metavar="[NAME...]", show_default=False),
    ] = None,
    *,
    user: User = None,
    user_defaults: UserDefaults = False,
    client_id: Client = None,
    client_defaults: ClientDefaults = False,
    ip: Address = None,
    ip_defaults: AddressDefaults = False,
    bootstrap: Bootstrap = None,
    timeout: Timeout = 30.0,
    as_json: AsJson = False,
) -> None:
    """Remove the named quotas of a user, a client id, a client id of a user, or an address. Without names, remove all
    quotas of these clients.

    Example: sparklog quotas remove --user anna producer_byte_rate
    """
    entity = _required(
        _entity(
            user, client_id, ip, user_defaults=user_defaults, client_defaults=client_defaults, ip_defaults=ip_defaults
        )
    )
    _check_names(names or [])
    with open_admin(bootstrap, timeout) as admin:
        found = admin.describe_quotas(user=entity.user, client_id=entity.client_id, ip=entity.ip)
        present = {name for one in found if _entity_of(one) == entity for name in one.quotas}
        removed = [name for name in names or sorted(present) if name in present]
        if not removed:
            what = " or ".join(names) if names else "quota"
            raise BrokerError(ErrorCode.RESOURCE_NOT_FOUND, f"{entity} has no {what}")
        admin.alter_quotas(dict.fromkeys(removed), user=entity.user, client_id=entity.client_id, ip=entity.ip)
    done(_described(entity) | {"removed": removed}, f"removed from {entity}: {', '.join(removed)}", as_json=as_json)


def _entity(
    user: str | None,
    client_id: str | None,
    ip: str | None,
    *,
    user_defaults: bool,
    client_defaults: bool,
    ip_defaults: bool,
) -> QuotaEntity:
    """Return the quota entity that the options name. Raises ConfigError for options that exclude each other."""
    return QuotaEntity(
        _part("--user", user, default=user_defaults),
        _part("--client-id", client_id, default=client_defaults),
        _part("--ip", ip, default=ip_defaults),
    )


def _part(option: str, name: str | None, *, default: bool) -> str | None:
    if name is not None and default:
        raise ConfigError(f"pass either {option} or {_defaults(option)}")
    if name == DEFAULT:
        raise ConfigError(f"{option}: expected a name; {_defaults(option)} means all others")
    return DEFAULT if default else name


def _defaults(option: str) -> str:
    return f"{option.removesuffix('-id')}-defaults"


def _required(entity: QuotaEntity) -> QuotaEntity:
    if not any(part is not None for part in entity):
        raise ConfigError(
            "no clients given: pass --user, --client-id or --ip, or --user-defaults, --client-defaults or --ip-defaults"
        )
    return entity


def _entity_of(found: ClientQuotas) -> QuotaEntity:
    return QuotaEntity(found.user, found.client_id, found.ip)


def _described(entity: QuotaEntity) -> dict[str, object]:
    return {"user": entity.user, "client_id": entity.client_id, "ip": entity.ip}


def _check_names(names: list[str]) -> None:
    if unknown := [name for name in names if name not in QUOTA_NAMES]:
        raise ConfigError(f"quota {unknown[0]!r}: expected one of {', '.join(QUOTA_NAMES)}")


def _value(name: str, text: str) -> float:
    """Return the value of a quota. A quota of bytes also accepts a size such as 10MB. Raises ConfigError."""
    _check_names([name])
    try:
        return float(text)
    except ValueError:
        if name in {PRODUCER_BYTE_RATE, CONSUMER_BYTE_RATE}:
            return float(byte_count(text, what=name))
        raise ConfigError(f"{name}={text}: expected a number") from None
