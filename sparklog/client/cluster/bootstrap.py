"""The bootstrap addresses of a client: ``host:port,host:port``.

This module is pure.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from sparklog.errors import ConfigError
from sparklog.model import host_and_port

DEFAULT_PORT = 9092


class Address(NamedTuple):
    """The host and port of a broker."""

    host: str
    port: int

    def __str__(self) -> str:
        return host_and_port(self.host, self.port)


def parse_bootstrap(bootstrap: str | Iterable[str]) -> tuple[Address, ...]:
    """Return the addresses in ``"a:9092,b:9092"`` or in a list of such texts.

    The port is optional, and an IPv6 host needs brackets.

    Raises:
        ConfigError: there is no address, or a part is not an address. The message has that part.
    """
    parts = bootstrap.split(",") if isinstance(bootstrap, str) else list(bootstrap)
    addresses = tuple(_parse(part.strip()) for part in parts if part.strip())
    if not addresses:
        raise ConfigError("bootstrap servers: none found; expected host:port[,host:port...]")
    return addresses


def _parse(text: str) -> Address:
    if text.startswith("["):
        host, bracket, rest = text[1:].partition("]")
        port = rest[1:] if rest.startswith(":") else rest
        valid = bool(bracket) and (not rest or rest.startswith(":"))
    else:
        host, _, port = text.partition(":")
        valid = ":" not in port
    port = port or str(DEFAULT_PORT)
    if not valid or not host or not port.isascii() or not port.isdigit() or not 0 < int(port) < 65536:
        hint = ": an IPv6 address needs brackets, as [::1]:9092" if text.count(":") > 1 else ""
        raise ConfigError(f"bootstrap servers: {text!r} found; expected host:port{hint}")
    return Address(host, int(port))
