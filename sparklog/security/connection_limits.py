"""Limits on the connections of clients: by address, by user, and on new connections per second.

This module is pure: the callers pass the time. Connections of brokers and controllers do not count. All clients without
a login have the same principal, so the limit by user does not apply to them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable

from sparklog.model import Principal
from sparklog.security.principals import ANONYMOUS
from sparklog.security.quotas import CONNECTION_CREATION_RATE, QuotaBuckets, QuotaTable


class ConnectionLimits:
    """A limiter for the connections of clients to one broker.

    ``per_address`` and ``per_user`` are the maximum numbers of open connections of one address and of one user. An
    address may use its quota of new connections for ``window_s`` seconds at once. Not thread-safe: use it only on the
    broker's event loop.
    """

    def __init__(self, *, per_address: int, per_user: int, window_s: float) -> None:
        self._per_address = per_address
        self._per_user = per_user
        self._table = QuotaTable()
        self._buckets = QuotaBuckets(CONNECTION_CREATION_RATE, window_s=window_s)
        #: The address and the user of each open connection that counts.
        self._open: dict[Hashable, tuple[str, Principal]] = {}
        self._of_address: Counter[Hashable] = Counter()
        self._of_user: Counter[Hashable] = Counter()

    def __len__(self) -> int:
        """Return the number of addresses, users and connections that are counted."""
        return len(self._open) + len(self._of_address) + len(self._of_user)

    def apply(self, table: QuotaTable) -> None:
        """Enforce the quotas of new connections in this table from now on."""
        self._table = table
        self._buckets.keep_only(table)

    def admit(
        self, connection: Hashable, *, address: str, principal: Principal, within_host: bool, now_s: float
    ) -> str:
        """Count a client's connection after its login. Return the reason to refuse it, or the empty string.

        ``within_host`` marks a connection on the Unix socket that continues a TCP connection. The quota of new
        connections does not count it.
        """
        if self._of_address[address] >= self._per_address:
            return f"{self._of_address[address]} connections of address {address} are open, which is the maximum"
        is_user = principal != ANONYMOUS
        if is_user and self._of_user[principal] >= self._per_user:
            return f"{self._of_user[principal]} connections of {principal} are open, which is the maximum"
        if not within_host and (limit := self._table.limit_of_address(CONNECTION_CREATION_RATE, address)) is not None:
            bucket = self._buckets.bucket(limit, now_s)
            wait_s = bucket.wait_s(now_s)
            if wait_s > 0:
                return f"address {address} has opened more than {limit.rate:g} connections per second"
            bucket.charge(1, now_s)
        self._open[connection] = address, principal
        self._of_address[address] += 1
        self._of_user[principal] += 1
        return ""

    def leave(self, connection: Hashable) -> None:
        """Remove a connection that has ended. Do nothing if the connection was never counted."""
        found = self._open.pop(connection, None)
        if found is not None:
            address, principal = found
            _decrement(self._of_address, address)
            _decrement(self._of_user, principal)


def _decrement(counter: Counter[Hashable], key: Hashable) -> None:
    counter[key] -= 1
    if not counter[key]:
        del counter[key]
