"""The table of all kinds of requests and their handlers."""

from __future__ import annotations

import logging
from collections.abc import Callable

from sparklog.broker.context import BrokerContext
from sparklog.broker.groups.group_requests import GroupRequests
from sparklog.broker.lifecycle.broker import Broker
from sparklog.broker.requests.add_columns import AddColumnsRequests
from sparklog.broker.requests.add_partitions import CreatePartitionsRequests
from sparklog.broker.requests.admin import TopicRequests
from sparklog.broker.requests.alter_topic import AlterTopicRequests
from sparklog.broker.requests.delete_records import DeleteRecordsRequests
from sparklog.broker.requests.describe import DescribeBrokerRequests
from sparklog.broker.requests.dispatch import HandleRequest, Handlers, checked_handlers
from sparklog.broker.requests.elections import ElectionRequests
from sparklog.broker.requests.list_offsets import ListOffsetsRequests
from sparklog.broker.requests.produce import ProduceRequests
from sparklog.broker.requests.reassignments import ReassignmentRequests
from sparklog.broker.requests.restore_records import RestoreRecordsRequests
from sparklog.broker.requests.set_aside import SetAsideRequests
from sparklog.broker.security.acl_requests import AclRequests
from sparklog.broker.security.authorized_requests import authorized_handlers, scoped_handlers
from sparklog.broker.security.token_requests import TokenRequests
from sparklog.broker.security.user_requests import UserRequests
from sparklog.broker.transactions.hanging_transactions import HangingTransactionRequests
from sparklog.broker.transactions.marker_append import MarkerRequests
from sparklog.broker.transactions.transaction_requests import TransactionRequests
from sparklog.errors import BrokerError, ErrorCode
from sparklog.net.server_connection import ServerConnection
from sparklog.protocol.messages import (
    AbortHanging,
    AbortTransaction,
    Ack,
    AddColumns,
    AddToTransaction,
    AlterClientQuotas,
    AlterReassignments,
    AlterTopic,
    AlterUserScramCredentials,
    BeginTransaction,
    CommitOffsets,
    ControlUpdate,
    CreateAcls,
    CreateDelegationToken,
    CreatePartitions,
    CreateTopic,
    DeleteAcls,
    DeleteGroup,
    DeleteRecords,
    DeleteTopic,
    DescribeAcls,
    DescribeBroker,
    DescribeClientQuotas,
    DescribeDelegationTokens,
    DescribeGroup,
    DescribeUserScramCredentials,
    ElectLeaders,
    EndTransaction,
    ExpireDelegationToken,
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
    RenewDelegationToken,
    RequestLocalReads,
    RestartBroker,
    RestoreRecords,
    RestoreSetAside,
    SettleVersion,
    TouchTransaction,
    VerifyTransaction,
    WriteMarkers,
)

_log = logging.getLogger(__name__)


def request_handlers(broker: Broker) -> Handlers:
    """Return the handler of each kind of request.

    For most requests, the permitted sender depends only on the kind of request. The handlers of ``Fetch``,
    ``CommitOffsets`` and ``ControlUpdate`` check the sender themselves, because the permitted sender depends on the
    request's content.
    """
    handlers = {**_of_data(broker), **_of_topics(broker), **_of_coordinators(broker), **_of_operation(broker)}
    checked = checked_handlers(broker.access, handlers)
    if broker.authorizer is None:
        return checked
    return authorized_handlers(broker.authorizer, checked, slices=broker.slices, cache=broker.context.cache)


def handlers_of_tokens(broker: Broker, handlers: Handlers) -> Handlers:
    """Return the handlers for clients that have logged in with a delegation token.

    ``handlers`` are the handlers for all other clients.
    """
    if broker.authorizer is not None:
        return handlers  # They check the scopes of tokens too.
    return scoped_handlers(broker.scopes, handlers, slices=broker.slices, cache=broker.context.cache)


def _of_data(broker: Broker) -> Handlers:
    context, partitions, slices = broker.context, broker.partitions, broker.slices
    produce = ProduceRequests(
        context,
        partitions,
        slices=slices,
        fetches=broker.fetches,
        verifications=broker.verifications,
        quotas=broker.quotas,
    )
    delete_records = DeleteRecordsRequests(
        context,
        partitions,
        slices=slices,
        log_start_moved=broker.fetches.log_start_moved,
        log_failed=broker.log_failed,
    )
    return {
        Produce: produce.handle,
        Fetch: broker.fetches.handle,
        Metadata: _metadata(context),
        ListOffsets: ListOffsetsRequests(partitions, slices).handle,
        RequestLocalReads: broker.local_read_tickets.handle,
        DeleteRecords: delete_records.handle,
        RestoreRecords: RestoreRecordsRequests(context, partitions, slices).handle,
    }


def _metadata(context: BrokerContext) -> HandleRequest:
    def handle(connection: ServerConnection, request: Metadata, body: memoryview) -> None:
        connection.reply(
            context.cache.metadata(
                request.cid,
                request.topics,
                listener=connection.listener,
                schemas=request.schemas,
                internal=request.internal,
                start=request.start,
            )
        )

    return handle


def _of_topics(broker: Broker) -> Handlers:
    context, registry = broker.context, broker.registry
    topics = TopicRequests(context, registry)
    reassignments = ReassignmentRequests(context, broker.slices, registry)
    return {
        InitProducerId: topics.init_producer_id,
        CreateTopic: topics.create,
        DeleteTopic: topics.delete,
        CreatePartitions: CreatePartitionsRequests(context, registry).handle,
        AddColumns: AddColumnsRequests(context, registry).handle,
        AlterTopic: AlterTopicRequests(context, registry).handle,
        AlterReassignments: reassignments.alter,
        ListReassignments: reassignments.list_moves,
        ElectLeaders: ElectionRequests(context, broker.slices, registry).handle,
    }


def _of_coordinators(broker: Broker) -> Handlers:
    context, slices = broker.context, broker.slices
    transactions = TransactionRequests(context, slices, transactions=broker.transactions, registry=broker.registry)
    hanging = HangingTransactionRequests(context, broker.hanging, broker.transactions)
    groups = GroupRequests(context, broker.access, slices, groups=broker.groups, takes_part=broker.hanging.takes_part)
    return {
        FindCoordinator: broker.internal_topics.find_coordinator,
        BeginTransaction: transactions.begin,
        SettleVersion: transactions.settle_version,
        AddToTransaction: transactions.add,
        TouchTransaction: transactions.touch,
        EndTransaction: transactions.end,
        ListTransactions: transactions.list_transactions,
        AbortTransaction: transactions.abort,
        VerifyTransaction: transactions.verify,
        WriteMarkers: MarkerRequests(broker.access, slices, broker.markers).handle,
        ListParticipants: hanging.list_participants,
        FindHanging: hanging.find,
        AbortHanging: hanging.abort,
        CommitOffsets: groups.commit_offsets,
        FetchOffsets: groups.fetch_offsets,
        HoldOffsets: groups.hold_offsets,
        ListGroups: groups.list_groups,
        Heartbeat: groups.heartbeat,
        DescribeGroup: groups.describe,
        DeleteGroup: groups.delete,
    }


def _of_operation(broker: Broker) -> Handlers:
    context = broker.context
    set_aside = SetAsideRequests(context, broker.set_aside, broker.registry)
    acls = AclRequests(context, broker.authorizer, broker.acls)
    users = UserRequests(context, broker.users, broker.tokens)
    tokens = TokenRequests(context, broker.tokens, broker.authorizer)
    return {
        RestartBroker: _restart(context, broker.restart),
        ListSetAside: set_aside.list_logs,
        RestoreSetAside: set_aside.restore,
        RemoveSetAside: set_aside.remove,
        AlterClientQuotas: broker.quota_requests.alter,
        DescribeClientQuotas: broker.quota_requests.describe,
        CreateDelegationToken: tokens.create,
        RenewDelegationToken: tokens.renew,
        ExpireDelegationToken: tokens.expire,
        DescribeDelegationTokens: tokens.describe,
        DescribeUserScramCredentials: users.describe,
        AlterUserScramCredentials: users.alter,
        DescribeBroker: DescribeBrokerRequests(context, broker.partitions, broker.slices).handle,
        CreateAcls: acls.create,
        DescribeAcls: acls.describe,
        DeleteAcls: acls.delete,
        ControlUpdate: broker.control_updates.handle,
    }


def _restart(context: BrokerContext, restart: Callable[[], None]) -> HandleRequest:
    """Return the handler of restart requests.

    ``restart`` begins the shutdown, after which the supervisor starts the broker again. It raises BrokerError if a
    restart is not possible.
    """

    def handle(connection: ServerConnection, request: RestartBroker, body: memoryview) -> None:
        if request.incarnation != context.incarnation:
            raise BrokerError(
                ErrorCode.STALE_BROKER_EPOCH,
                f"broker {context.broker_id}: expected incarnation {context.incarnation}, found {request.incarnation}",
            )
        restart()
        _log.info("restart requested by %s", connection.peer)
        reply = Ack(request.cid)
        connection.reply(reply)
        context.audit.replied(connection, request, reply)

    return handle
