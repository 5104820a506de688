"""The choice of the replica that a reader fetches from: the nearest one that is in sync. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Literal

from sparklog.model import BrokerEndpoint

#: Whether reads may, may not, or must use files of this host.
LocalReads = Literal["auto", "never", "require"]


def nearest(
    leader: int, in_sync: Iterable[int], brokers: Mapping[int, BrokerEndpoint], *, is_here: Callable[[str], bool]
) -> int:
    """Return the in-sync replica to read from: one on this host, else one in a rack with brokers of this host.

    The leader is preferred among equally near replicas.
    """
    # the request to a leader that is gone fails, and refreshes the metadata
    if leader not in brokers or is_here(brokers[leader].host):
        return leader
    racks = {broker.rack for broker in brokers.values() if broker.rack is not None and is_here(broker.host)}
    others = [broker_id for broker_id in in_sync if broker_id != leader and broker_id in brokers]
    return min(
        [leader, *others], key=lambda number: (not is_here(brokers[number].host), brokers[number].rack not in racks)
    )
