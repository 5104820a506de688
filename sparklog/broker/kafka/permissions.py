"""The permissions of the client of a Kafka call.

The handlers check them for those parts of Kafka's requests that have no equivalent in sparklog's own requests.
"""

from __future__ import annotations

from sparklog.broker.kafka.acl_codes import operations_field
from sparklog.broker.kafka.call import KafkaCall
from sparklog.broker.lifecycle.broker import Broker
from sparklog.broker.security.authorizer import Authorizer
from sparklog.errors import BrokerError
from sparklog.protocol.messages import Request
from sparklog.security.acls import OPERATIONS, Operation, ResourceType
from sparklog.security.request_rules import REFUSALS, RULES, Need


class Permissions:
    """The checks of Kafka calls by the ACLs of one broker and the scopes of delegation tokens.

    Its methods raise BrokerError BROKER_NOT_AVAILABLE until the broker has read the ACLs.
    """

    def __init__(self, broker: Broker) -> None:
        self._authorizer = broker.authorizer
        self._scopes = broker.scopes

    def _limits(self, call: KafkaCall) -> Authorizer | None:
        """Return the authorizer that limits the client, or None if the client may do everything."""
        authorizer, connection = self._authorizer, call.connection
        if authorizer is not None:
            return None if authorizer.skips(connection) else authorizer
        return self._scopes if connection.token_id and self._scopes.has_scope(connection) else None

    def allows(self, call: KafkaCall, operation: Operation, resource_type: ResourceType, name: str) -> bool:
        """Return whether the client may do the operation. The audit log does not record this check."""
        limits = self._limits(call)
        return limits is None or limits.allows(call.connection, operation, resource_type, name)

    def require(
        self, call: KafkaCall, request: str, operation: Operation, resource_type: ResourceType, name: str
    ) -> None:
        """Check that the client may do the operation. ``request`` names the client's request in the audit log.

        Raises:
            BrokerError: the client may not do the operation. The code depends on the type of the resource.
        """
        limits = self._limits(call)
        if limits is not None and not limits.allows(call.connection, operation, resource_type, name):
            detail = limits.deny(call.connection, request, Need(operation, resource_type, name))
            raise BrokerError(REFUSALS[resource_type], detail)

    def require_rule(self, call: KafkaCall, request: Request) -> None:
        """Check that the client may send ``request``, by the rule that ``security.request_rules`` has for it.

        This method does not check entries of a request, such as partitions, so the request must have none. Raises
        BrokerError.
        """
        limits = self._limits(call)
        if limits is not None:
            limits.require(call.connection, request, RULES[type(request)].clauses(request))

    def operations(self, call: KafkaCall, resource_type: ResourceType, name: str) -> int:
        """Return the bit field of the operations that the client may do on the resource."""
        return operations_field(
            operation for operation in OPERATIONS[resource_type] if self.allows(call, operation, resource_type, name)
        )
