"""Which replica of a partition a reader fetches from: the nearest that is in sync. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Literal

from sparklog.model import BrokerEndpoint

#: Whether files of this host may, may not, or have to be read instead.
LocalReads = Literal["auto", "never", "require"]


def nearest(
    leader: int, in_sync: Iterable[int], brokers: Mapping[int, BrokerEndpoint], *, is_here: Callable[[str], bool]
) -> int:
    """The in-sync replica to read from: one on this host, else one in a rack that this host has brokers in. The leader
    where it is as near as any."""
    if leader not in brokers or is_here(brokers[leader].host):  # one that is gone is found to be, and asked for again
        return leader
    racks = {broker.rack for broker in brokers.values() if broker.rack is not None and is_here(broker.host)}
    others = [broker_id for broker_id in in_sync if broker_id != leader and broker_id in brokers]
    return min(
        [leader, *others], key=lambda number: (not is_here(brokers[number].host), brokers[number].rack not in racks)
    )
