"""The principals of clients: the identities that ACLs, quotas and the audit log use.

This module is pure.
"""

from __future__ import annotations

from sparklog.errors import ConfigError
from sparklog.model import USER, Principal

__all__ = ["ANONYMOUS", "EVERYONE", "USER", "Principal", "parse_principal", "parse_super_users"]

#: The principal of a connection without a login. Source: Kafka's ``KafkaPrincipal.ANONYMOUS``.
ANONYMOUS = Principal(USER, "ANONYMOUS")
#: The principal that stands for every principal. Only ACLs use it.
EVERYONE = Principal(USER, "*")


def parse_principal(text: str) -> Principal:
    """Return the principal that the text describes, such as ``User:anna``.

    Raises:
        ConfigError: the text has no colon, or nothing before or after it.
    """
    kind, colon, name = text.partition(":")
    if not (kind and colon and name):
        raise ConfigError(f"principal {text!r}: expected a type and a name, such as User:anna")
    return Principal(kind, name)


def parse_super_users(text: str) -> frozenset[Principal]:
    """Return the principals in the setting ``super.users``. Semicolons separate the principals, as in Kafka.

    Raises:
        ConfigError: a part of the setting is not a principal.
    """
    return frozenset(parse_principal(part.strip()) for part in text.split(";") if part.strip())
