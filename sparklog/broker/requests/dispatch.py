"""The dispatch of decoded requests to the functions that handle them.

A handler is a plain function that responds itself, at once or later. A handler uses a task only if it waits for
ZooKeeper. An exception in a handler becomes a typed response, and the connection stays open.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from sparklog.broker import internal_topics
from sparklog.broker.groups import group_requests
from sparklog.broker.lifecycle import restart
from sparklog.broker.replication import leader_and_isr
from sparklog.broker.requests import (
    add_columns,
    add_partitions,
    admin,
    alter_topic,
    delete_records,
    describe,
    elections,
    fetch,
    list_offsets,
    produce,
    reassignments,
    restore_records,
    set_aside,
)
from sparklog.broker.state import BrokerState
from sparklog.broker.transactions import hanging_transactions, marker_append, transaction_requests
from sparklog.errors import BrokerError, ErrorCode
from sparklog.net.server import ServerConnection
from sparklog.protocol.messages import (
    AbortHanging,
    AbortTransaction,
    AddColumns,
    AddToTransaction,
    AlterReassignments,
    AlterTopic,
    BeginTransaction,
    CommitOffsets,
    ControlUpdate,
    CreatePartitions,
    CreateTopic,
    DeleteGroup,
    DeleteRecords,
    DeleteTopic,
    DescribeBroker,
    DescribeGroup,
    ElectLeaders,
    EndTransaction,
    ErrorReply,
    Fetch,
    FetchOffsets,
    FindCoordinator,
    FindHanging,
    Heartbeat,
    HoldOffsets,
    InitProducerId,
    ListGroups,
    ListOffsets,
    ListParticipants,
    ListReassignments,
    ListSetAside,
    ListTransactions,
    Metadata,
    Produce,
    RemoveSetAside,
    Request,
    RestartBroker,
    RestoreRecords,
    RestoreSetAside,
    SettleVersion,
    TouchTransaction,
    VerifyTransaction,
    WriteMarkers,
)
from sparklog.protocol.senders import SENDERS, Sender

_log = logging.getLogger(__name__)

HandleRequest = Callable[[BrokerState, ServerConnection, Any, memoryview], None]


def _handle_metadata(broker: BrokerState, connection: ServerConnection, request: Metadata, body: memoryview) -> None:
    connection.reply(
        broker.cache.metadata(
            request.cid,
            request.topics,
            schemas=request.schemas,
            internal=request.internal,
            start=request.start,
        )
    )


def _of_brokers(handle: HandleRequest) -> HandleRequest:
    """Return ``handle`` for requests that only brokers send."""

    def checked(broker: BrokerState, connection: ServerConnection, request: Any, body: memoryview) -> None:
        broker.access.require(connection, Sender.BROKER, type(request).__name__)
        handle(broker, connection, request, body)

    return checked


#: ``Fetch``, ``CommitOffsets`` and ``ControlUpdate`` check their senders themselves, because the check depends on the
#: content.
_HANDLERS: dict[type, HandleRequest] = {
    Produce: produce.handle_produce,
    Fetch: fetch.handle_fetch,
    Metadata: _handle_metadata,
    ListOffsets: list_offsets.handle_list_offsets,
    InitProducerId: admin.handle_init_producer_id,
    FindCoordinator: internal_topics.handle_find_coordinator,
    BeginTransaction: transaction_requests.handle_begin_transaction,
    SettleVersion: transaction_requests.handle_settle_version,
    AddToTransaction: transaction_requests.handle_add_to_transaction,
    TouchTransaction: transaction_requests.handle_touch_transaction,
    EndTransaction: transaction_requests.handle_end_transaction,
    ListTransactions: transaction_requests.handle_list_transactions,
    AbortTransaction: transaction_requests.handle_abort_transaction,
    VerifyTransaction: transaction_requests.handle_verify_transaction,
    WriteMarkers: marker_append.handle_write_markers,
    ListParticipants: hanging_transactions.handle_list_participants,
    FindHanging: hanging_transactions.handle_find_hanging,
    AbortHanging: hanging_transactions.handle_abort_hanging,
    CommitOffsets: group_requests.handle_commit_offsets,
    FetchOffsets: group_requests.handle_fetch_offsets,
    HoldOffsets: group_requests.handle_hold_offsets,
    ListGroups: group_requests.handle_list_groups,
    Heartbeat: group_requests.handle_heartbeat,
    DescribeGroup: group_requests.handle_describe_group,
    DeleteGroup: group_requests.handle_delete_group,
    CreateTopic: admin.handle_create_topic,
    DeleteTopic: admin.handle_delete_topic,
    CreatePartitions: add_partitions.handle_create_partitions,
    AddColumns: add_columns.handle_add_columns,
    AlterTopic: alter_topic.handle_alter_topic,
    DeleteRecords: delete_records.handle_delete_records,
    RestoreRecords: restore_records.handle_restore_records,
    AlterReassignments: reassignments.handle_alter_reassignments,
    ListReassignments: reassignments.handle_list_reassignments,
    ElectLeaders: elections.handle_elect_leaders,
    RestartBroker: restart.handle_restart_broker,
    ListSetAside: set_aside.handle_list_set_aside,
    RestoreSetAside: set_aside.handle_restore_set_aside,
    RemoveSetAside: set_aside.handle_remove_set_aside,
    DescribeBroker: describe.handle_describe_broker,
    ControlUpdate: leader_and_isr.handle_control_update,
}
HANDLERS = {
    kind: _of_brokers(handle) if SENDERS[kind] is Sender.BROKER else handle for kind, handle in _HANDLERS.items()
}


class ConnectionHandler:
    """The handler of one client's connection. Owner: the server's connection."""

    def __init__(self, broker: BrokerState, connection: ServerConnection) -> None:
        self._broker = broker
        self._connection = connection
        broker.counters["connections.opened"] += 1

    def request_received(self, request: Request, body: memoryview) -> None:
        connection = self._connection
        try:
            HANDLERS[type(request)](self._broker, connection, request, body)
        except BrokerError as error:
            connection.reply(ErrorReply(request.cid, error.code, error.detail))
        except Exception as error:
            self._broker.counters["requests.failed"] += 1
            _log.exception("%s from %s failed", type(request).__name__, connection.peer)
            connection.reply(
                ErrorReply(request.cid, ErrorCode.UNKNOWN_SERVER_ERROR, f"{type(error).__name__}: {error}")
            )

    def connection_lost(self) -> None:
        self._broker.counters["connections.closed"] += 1
        fetch.connection_lost(self._broker, self._connection)
