"""Quotas of clients: their names and values, the precedence between them, and the token buckets that enforce them.

This module is pure: the callers pass the time.

A quota belongs to an entity: a user, a client id, a client id of a user, or an address. A default entity stands for all
users, client ids or addresses without their own quota. Several entities may match a connection. The first one in
``_PRECEDENCE`` with a value applies. ``_PRECEDENCE`` also defines whether clients have separate quotas or share one.
Source: Kafka, KIP-13, KIP-55, KIP-124, KIP-612.

Each broker enforces the quotas alone, for its own requests. The number of buckets is bounded, because a client may
choose a new client id for each connection. Only a full bucket is dropped, because it has no debt that could be lost.
While no bucket can be dropped, further clients of a quota share one bucket.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Mapping
from typing import NamedTuple

from sparklog.errors import BrokerError, ErrorCode

#: The name of a default entity. No user has an empty name, and an empty client id cannot have its own quota.
DEFAULT = ""
#: Bytes of batches per second.
PRODUCER_BYTE_RATE = "producer_byte_rate"
CONSUMER_BYTE_RATE = "consumer_byte_rate"
#: The share of the time of the broker's event loop, in percent.
REQUEST_PERCENTAGE = "request_percentage"
#: Connections per second.
CONNECTION_CREATION_RATE = "connection_creation_rate"

#: The largest value of each quota of users and client ids, and of addresses. All values are above 0.
CLIENT_QUOTAS: Mapping[str, float] = {PRODUCER_BYTE_RATE: 2**53, CONSUMER_BYTE_RATE: 2**53, REQUEST_PERCENTAGE: 100}
ADDRESS_QUOTAS: Mapping[str, float] = {CONNECTION_CREATION_RATE: 2**31 - 1}
QUOTA_NAMES = (*CLIENT_QUOTAS, *ADDRESS_QUOTAS)
#: The smallest value: one unit in 12 days. A smaller value would cause waits that are too long for timers.
_LEAST = 1e-6
#: The names of an entity's parts in messages, as in Kafka.
USER, CLIENT_ID, IP = "user", "client-id", "ip"
PARTS = (USER, CLIENT_ID, IP)
_MAX_NAME = 255
#: The maximum number of buckets of one quota in one broker.
MAX_BUCKETS = 10_000
#: The maximum number of buckets that a search for a full bucket examines. If none of them is full, the client gets a
#: bucket that it shares with other clients.
_EXAMINED = 16


class QuotaEntity(NamedTuple):
    """The clients to which a quota applies, described by user, client id and address.

    Each part is a name, ``DEFAULT``, or None for any value.
    """

    user: str | None = None
    client_id: str | None = None
    ip: str | None = None

    def __str__(self) -> str:
        parts = zip(PARTS, self, strict=True)
        return ", ".join(f"{part} {name!r}" if name else f"default {part}" for part, name in parts if name is not None)

    def matches(self, wanted: QuotaEntity, *, any_of: Collection[str] = (), strict: bool = False) -> bool:
        """Return whether the entity has all parts that ``wanted`` has, with the same values.

        The entity must also have all parts that ``any_of`` names, with any value. With ``strict`` it must have no other
        parts.
        """
        for part, name, needed in zip(PARTS, self, wanted, strict=True):
            if needed is not None and name != needed:
                return False
            if name is None and part in any_of:
                return False
            if strict and name is not None and needed is None and part not in any_of:
                return False
        return True


#: The values of one entity's quotas, by the name of the quota.
QuotaValues = Mapping[str, float]


def check_entity(entity: QuotaEntity) -> None:
    """Raise BrokerError INVALID_REQUEST unless the entity is a user, a client id, both, or an address.

    Raise the same error if one of the entity's names is too long.
    """
    found = [name for name in entity if name is not None]
    if not found or (entity.ip is not None and len(found) > 1):
        detail = "a quota is of a user, a client id, both, or an address"
        raise BrokerError(ErrorCode.INVALID_REQUEST, detail)
    if max(map(len, found)) > _MAX_NAME:
        raise BrokerError(ErrorCode.INVALID_REQUEST, f"a name of a quota has more than {_MAX_NAME} characters")


def check_quota(entity: QuotaEntity, name: str, value: float | None) -> None:
    """Raise BrokerError INVALID_CONFIG unless the entity can have the quota ``name``.

    Raise the same error if ``value`` is neither None nor a valid value of this quota.
    """
    known = CLIENT_QUOTAS if entity.ip is None else ADDRESS_QUOTAS
    if name not in known:
        detail = f"quota {name[:_MAX_NAME]!r} of {entity}: expected one of {', '.join(known)}"
        raise BrokerError(ErrorCode.INVALID_CONFIG, detail)
    if value is not None and not _LEAST <= value <= known[name]:  # also false for NaN
        detail = f"{name}={value:g} of {entity}: expected more than 0 and at most {known[name]:g}"
        raise BrokerError(ErrorCode.INVALID_CONFIG, detail)


class TokenBucket:
    """A token bucket that gains ``rate`` units per second and saves at most ``burst`` units.

    A charge may be greater than the saved units. The bucket then has a debt, and clients must wait until it is paid
    off. So in any period of ``t`` seconds, clients that wait are charged at most ``rate * t + burst``, plus one charge.
    """

    __slots__ = ("_tokens", "_updated_s", "burst", "rate")

    def __init__(self, rate: float, burst: float, now_s: float) -> None:
        self.rate = rate
        self.burst = burst
        self._tokens = burst
        self._updated_s = now_s

    def charge(self, amount: float, now_s: float) -> float:
        """Charge ``amount``. Return the time in seconds to wait before the next charge; 0 if there is no debt."""
        self._refill(now_s)
        self._tokens -= amount
        return -self._tokens / self.rate if self._tokens < 0 else 0.0

    def wait_s(self, now_s: float) -> float:
        """Return the time in seconds until the debt is paid off; 0 if there is no debt."""
        return self.charge(0, now_s)

    def is_full(self, now_s: float) -> bool:
        self._refill(now_s)
        return self._tokens >= self.burst

    def _refill(self, now_s: float) -> None:
        if now_s > self._updated_s:
            self._tokens = min(self.burst, self._tokens + (now_s - self._updated_s) * self.rate)
            self._updated_s = now_s


class _Rule(NamedTuple):
    """One step of the precedence between quotas: a kind of entity.

    ``user`` is True if the entity names the connection's user, False if it is the default for users, and None if users
    do not matter. ``client_id`` is the same for client ids.
    """

    user: bool | None
    client_id: bool | None

    def entity(self, user: str, client_id: str) -> QuotaEntity:
        return QuotaEntity(_part(self.user, user), _part(self.client_id, client_id))

    def owner(self, user: str, client_id: str) -> QuotaEntity:
        """Return the entity whose clients share one quota: all connections with this user, this client id, or both."""
        return QuotaEntity(None if self.user is None else user, None if self.client_id is None else client_id)


def _part(named: bool | None, name: str) -> str | None:
    return None if named is None else name if named else DEFAULT


#: The precedence, the most specific entity first. Source: Kafka's documentation of quotas.
_PRECEDENCE = (
    _Rule(True, True),
    _Rule(True, False),
    _Rule(True, None),
    _Rule(False, True),
    _Rule(False, False),
    _Rule(False, None),
    _Rule(None, True),
    _Rule(None, False),
)


class QuotaLimit(NamedTuple):
    """The quota that applies to a client: its rate, the entity that defines the rate, and the clients that share it."""

    rate: float
    entity: QuotaEntity
    owner: QuotaEntity


class QuotaTable:
    """A table of all quotas of a cluster. Immutable."""

    def __init__(self, quotas: Mapping[QuotaEntity, QuotaValues] | None = None) -> None:
        self.quotas = {entity: dict(values) for entity, values in (quotas or {}).items() if values}
        self._names = frozenset(name for values in self.quotas.values() for name in values)

    def has(self, name: str) -> bool:
        """Return whether any entity has the quota ``name``."""
        return name in self._names

    @property
    def limits_clients(self) -> bool:
        """Return whether any quota applies to requests, and not only to new connections."""
        return not self._names.isdisjoint(CLIENT_QUOTAS)

    def limit(self, name: str, *, user: str, client_id: str) -> QuotaLimit | None:
        """Return the quota ``name`` that applies to connections with this user and client id; None if there is none."""
        if name not in self._names:
            return None
        for rule in _PRECEDENCE:
            entity = rule.entity(user, client_id)
            rate = self.quotas.get(entity, {}).get(name)
            if rate is not None:
                return QuotaLimit(rate, entity, rule.owner(user, client_id))
        return None

    def limit_of_address(self, name: str, ip: str) -> QuotaLimit | None:
        """Return the quota ``name`` that applies to connections from this address; None if there is none."""
        if name not in self._names:
            return None
        for entity in (QuotaEntity(ip=ip), QuotaEntity(ip=DEFAULT)):
            rate = self.quotas.get(entity, {}).get(name)
            if rate is not None:
                return QuotaLimit(rate, entity, QuotaEntity(ip=ip))
        return None


class QuotaBuckets:
    """The token buckets that enforce one quota, such as ``producer_byte_rate``, in one broker.

    A bucket saves at most the units of ``window_s`` seconds. ``unit`` converts the quota's value to charged units per
    second. Not thread-safe: use the buckets only on the broker's event loop.
    """

    def __init__(self, name: str, *, window_s: float, unit: float = 1.0, limit: int = MAX_BUCKETS) -> None:
        self.name = name
        self._window_s = window_s
        self._unit = unit
        self._limit = limit
        #: The buckets by owner, the least recently used first.
        self._buckets: OrderedDict[QuotaEntity, TokenBucket] = OrderedDict()
        #: The buckets that several owners share, by the entity that sets their rate.
        self._shared: dict[QuotaEntity, TokenBucket] = {}

    def __len__(self) -> int:
        return len(self._buckets) + len(self._shared)

    def bucket(self, limit: QuotaLimit, now_s: float) -> TokenBucket:
        """Return the bucket of the clients that share this quota.

        If the rate has changed, this is a new bucket without a debt. If there are too many buckets, further clients get
        a bucket that they share.
        """
        rate = limit.rate * self._unit
        bucket = self._buckets.get(limit.owner)
        if bucket is not None and bucket.rate == rate:
            self._buckets.move_to_end(limit.owner)
            return bucket
        if bucket is None and len(self._buckets) >= self._limit and not self._forget_one(now_s):
            shared = self._shared.get(limit.entity)
            if shared is None or shared.rate != rate:
                shared = self._shared[limit.entity] = TokenBucket(rate, rate * self._window_s, now_s)
            return shared
        bucket = self._buckets[limit.owner] = TokenBucket(rate, rate * self._window_s, now_s)
        return bucket

    def _forget_one(self, now_s: float) -> bool:
        """Drop one full bucket. Return False if none of the first ``_EXAMINED`` buckets is full."""
        for _ in range(_EXAMINED):
            owner, bucket = next(iter(self._buckets.items()))
            if bucket.is_full(now_s):
                del self._buckets[owner]
                return True
            self._buckets.move_to_end(owner)
        return False

    def keep_only(self, table: QuotaTable) -> None:
        """Drop the shared buckets of entities that no longer have this quota."""
        self._shared = {
            entity: bucket for entity, bucket in self._shared.items() if self.name in table.quotas.get(entity, {})
        }
