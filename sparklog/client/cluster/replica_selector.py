"""The selection of the replica that a reader fetches from: the nearest in-sync replica.

This module is pure.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Literal

from sparklog.model import BrokerEndpoint

#: Whether a reader may read the segment files of a broker on this host, must not, or must.
LocalReadMode = Literal["auto", "never", "require"]


def nearest(
    leader: int, in_sync: Iterable[int], brokers: Mapping[int, BrokerEndpoint], *, is_here: Callable[[str], bool]
) -> int:
    """Return the broker to fetch from.

    An in-sync replica on this host is preferred, and then an in-sync replica in the rack of a broker on this host. The
    leader is preferred among equally near replicas. ``is_here`` returns whether an address is one of this host.
    """
    # If the leader's address is unknown, return it nevertheless: the failing request will refresh the metadata.
    if leader not in brokers or is_here(brokers[leader].host):
        return leader
    racks = {broker.rack for broker in brokers.values() if broker.rack is not None and is_here(broker.host)}
    others = [broker_id for broker_id in in_sync if broker_id != leader and broker_id in brokers]
    return min(
        [leader, *others], key=lambda number: (not is_here(brokers[number].host), brokers[number].rack not in racks)
    )
