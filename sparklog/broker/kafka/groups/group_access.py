"""The coordinators of groups and the permissions of clients, for the handlers of Kafka's requests about groups."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from sparklog.broker.groups.group_host import GroupHost
from sparklog.broker.kafka.call import KafkaCall
from sparklog.broker.kafka.coordinator_access import coordinator_of, outcome_of
from sparklog.broker.kafka.error_codes import KafkaCode, KafkaError, kafka_code
from sparklog.broker.kafka.permissions import Permissions
from sparklog.broker.lifecycle.broker import Broker
from sparklog.coordinator.effects import Outcome
from sparklog.errors import BrokerError, ErrorCode
from sparklog.security.acls import Operation, ResourceType

#: The maximum length of a group's name, as in sparklog's own requests.
MAX_NAME = 255
#: Kafka's names of the states of a group of KIP-848.
STATES = {"empty": "Empty", "reconciling": "Reconciling", "stable": "Stable"}


class GroupAccess:
    """The groups that this broker coordinates, with checks of names and permissions."""

    def __init__(self, broker: Broker) -> None:
        self._groups = broker.groups
        self.permissions = Permissions(broker)

    def require(self, call: KafkaCall, request: str, operation: Operation, group: str) -> None:
        """Check the group's name, and that the client may do the operation on the group.

        Raises BrokerError or KafkaError.
        """
        if not group or len(group) > MAX_NAME:
            raise KafkaError(KafkaCode.INVALID_GROUP_ID, f"a name of 1 to {MAX_NAME} characters expected")
        self.permissions.require(call, request, operation, ResourceType.GROUP, group)

    def host(self, group: str) -> GroupHost:
        """Return the group's coordinator. Raises BrokerError if this broker is not the coordinator or is not ready."""
        return coordinator_of(self._groups, group)

    async def ask(self, group: str, event_of: Callable[[int], object]) -> Outcome:
        """Pass a request to the group's coordinator, and return the outcome.

        Raises BrokerError if the coordinator refuses the request.
        """
        return await outcome_of(self.host(group), event_of)


def check_count(topics: Sequence[Any], partitions: Iterable[int], most: int) -> None:
    """Check that a request about offsets has at most ``most`` topics and at most ``most`` partitions.

    ``partitions`` has the number of partitions of each topic. Raises BrokerError INVALID_REQUEST for the whole request,
    because a response that repeats all names would be too large.
    """
    found = max(len(topics), sum(partitions))
    if found > most:
        raise BrokerError(ErrorCode.INVALID_REQUEST, f"{found} topics or partitions found, at most {most} expected")


def group_code(error: BrokerError | KafkaError) -> int:
    """Return Kafka's error code for a failed request about a group."""
    return kafka_code(error.code)
