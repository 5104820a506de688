"""The unknown connections of a server, by address. Their hello or login is not complete yet.

One address may open connections faster than other clients finish their logins. So if there are too many unknown
connections, the address with the most of them loses its oldest one. Each operation takes constant time.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterator
from typing import Generic, Protocol, TypeVar

#: The length of a site's IPv6 prefix in bits. A site can choose the other bits for each connection.
_SITE_BITS = 64


class WithAddress(Protocol):
    """The part of a connection that ``UnknownConnections`` uses."""

    @property
    def peer_host(self) -> str: ...


def origin_of(address: str) -> str:
    """Return the part of an address that identifies its origin, a host or a site.

    The part is a whole IPv4 address, or the network of an IPv6 address.
    """
    if ":" not in address:
        return address
    try:
        found = ipaddress.IPv6Address(address)
    except ValueError:
        return address
    if found.ipv4_mapped is not None:
        return str(found.ipv4_mapped)
    return str(ipaddress.IPv6Network((int(found) >> _SITE_BITS << _SITE_BITS, _SITE_BITS)))


_Connection = TypeVar("_Connection", bound=WithAddress)


class UnknownConnections(Generic[_Connection]):
    """A set of unknown connections, which have not completed their hello or login, grouped by origin.

    ``loser`` is the connection to close when a new connection needs a slot.
    """

    def __init__(self) -> None:
        #: The origin of each connection.
        self._origins: dict[_Connection, str] = {}
        #: The connections of each origin, the oldest first.
        self._of_origin: dict[str, dict[_Connection, None]] = {}
        #: The origins by their number of connections. Origins with the same number are in the order in which they
        #: reached it.
        self._with_count: dict[int, dict[str, None]] = {}
        self._most = 0

    def __len__(self) -> int:
        return len(self._origins)

    def __iter__(self) -> Iterator[_Connection]:
        return iter(self._origins)

    @property
    def origins(self) -> int:
        """Return the number of origins (see ``origin_of``) of the connections."""
        return len(self._of_origin)

    def add(self, connection: _Connection) -> None:
        origin = origin_of(connection.peer_host)
        self._origins[connection] = origin
        own = self._of_origin.setdefault(origin, {})
        own[connection] = None
        self._moved(origin, len(own) - 1, len(own))

    def discard(self, connection: _Connection) -> None:
        """Remove the connection, if the set contains it."""
        origin = self._origins.pop(connection, None)
        if origin is None:
            return
        own = self._of_origin[origin]
        del own[connection]
        if not own:
            del self._of_origin[origin]
        self._moved(origin, len(own) + 1, len(own))

    @property
    def loser(self) -> _Connection | None:
        """Return the connection to close when a new connection needs a slot, or None if the set is empty.

        The result is the oldest connection of the origin that has the most connections.
        """
        if not self._most:
            return None
        origin = next(iter(self._with_count[self._most]))
        return next(iter(self._of_origin[origin]))

    def _moved(self, origin: str, before: int, after: int) -> None:
        """Record the new number of an origin's connections."""
        if before:
            same = self._with_count[before]
            del same[origin]
            if not same:
                del self._with_count[before]
        if after:
            self._with_count.setdefault(after, {})[origin] = None
        if after > self._most or self._most not in self._with_count:
            self._most = after
