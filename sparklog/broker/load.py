"""How many leaderships and replicas each broker has, for the placement of new ones."""

from __future__ import annotations

from collections import Counter

from sparklog.broker.state import BrokerState
from sparklog.controller.placement import Load


def load(broker: BrokerState) -> Load:
    """Leaderships and replicas of every broker, so that a small topic goes where there is room."""
    leaders: Counter[int] = Counter()
    replicas: Counter[int] = Counter()
    for name in broker.cache.topics():
        topic = broker.cache.topic(name)
        for known in topic.partitions.values() if topic else ():
            leaders[known.state.leader] += 1
            replicas.update(known.replicas)
    return Load(leaders, replicas)
