"""The target assignment of a group: which member is to have each partition in the group's next epoch.

The module is pure. The computation for a large group takes hundreds of milliseconds, so its inputs are one frozen
value: another thread may compute the target from them while the group serves requests.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from sparklog.coordinator.assignor import Part, Subscriber, TopicView, assign


class Target(NamedTuple):
    """A target assignment: the partitions of each member, and the member of each partition.

    The receiver may change both mappings.
    """

    parts: dict[str, set[Part]]
    members: dict[Part, str]


@dataclass(frozen=True, slots=True, eq=False)
class TargetInputs:
    """The inputs for the computation of a target: members, topics, current owners of partitions, and the last target.

    The mappings are copies that do not change. Each computation has its own object. Its result is returned with the
    object, so that an outdated result can be recognized.
    """

    subscribers: Mapping[str, Subscriber]
    topics: Mapping[str, TopicView]
    owners: Mapping[Part, str]
    last_target: Mapping[Part, str]

    @property
    def size(self) -> int:
        """Return the number of members plus the number of partitions to assign."""
        wanted = frozenset[str]().union(*{subscriber.topics for subscriber in self.subscribers.values()})
        return len(self.subscribers) + sum(self.topics[name].partitions for name in wanted)

    def compute(self) -> Target:
        assigned = assign(self.subscribers, self.topics, {**self.owners, **self.last_target})
        members = {part: member_id for member_id, parts in assigned.items() for part in parts}
        return Target({member_id: set(parts) for member_id, parts in assigned.items()}, members)
