"""The creation and connection of the parts of one broker, and their start and stop.

Each part gets only the other parts that it uses. ``process`` decides when the broker opens and closes, and
``request_table`` lists the handlers of requests.

The broker registers in ZooKeeper last, because clients connect once they see the registration. Before that the parts
already serve requests, but requests that need ZooKeeper fail with BROKER_NOT_AVAILABLE.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable
from functools import partial

from sparklog.broker.context import BrokerContext
from sparklog.broker.groups.group_host import GroupHost
from sparklog.broker.groups.retention_holds import RetentionHolds
from sparklog.broker.internal_topics import OFFSETS, TRANSACTIONS, InternalTopics
from sparklog.broker.lifecycle.zk_registration import ZkRegistration
from sparklog.broker.replication.cleaner import Cleaner
from sparklog.broker.replication.fetcher import Fetchers
from sparklog.broker.replication.leader_and_isr import ControlUpdates
from sparklog.broker.replication.log_maintenance import LogMaintenance
from sparklog.broker.replication.partition import OnLogFailed
from sparklog.broker.replication.partition_effects import PartitionEffects
from sparklog.broker.replication.partitions import Partitions
from sparklog.broker.replication.replica_hosting import ReplicaHosting
from sparklog.broker.replication.set_aside import SetAsideLogs
from sparklog.broker.replication.topic_notes import TopicNotes
from sparklog.broker.requests.access import Access
from sparklog.broker.requests.fetch import Fetches
from sparklog.broker.requests.local_read_tickets import LocalReadTickets
from sparklog.broker.requests.slices import Slices
from sparklog.broker.security.acl_cache import AclCache
from sparklog.broker.security.authorized_requests import AuthorizedFetch, scoped_fetch
from sparklog.broker.security.authorizer import authorizer_of, scope_authorizer
from sparklog.broker.security.logins import Logins, sasl_mechanisms, token_validator
from sparklog.broker.security.quota_cache import QuotaCache
from sparklog.broker.security.quota_manager import QuotaManager
from sparklog.broker.security.quota_requests import QuotaRequests
from sparklog.broker.security.tokens import Tokens
from sparklog.broker.security.users import Users
from sparklog.broker.transactions.coordinator_epochs import CoordinatorEpochs
from sparklog.broker.transactions.coordinator_registry import CoordinatorHosting, Coordinators
from sparklog.broker.transactions.fenced_producers import FencedProducers
from sparklog.broker.transactions.hanging_transactions import HangingTransactions
from sparklog.broker.transactions.hosted_coordinators import HostedCoordinators
from sparklog.broker.transactions.leader_transactions import LeaderTransactions
from sparklog.broker.transactions.marker_append import MarkerAppend
from sparklog.broker.transactions.marker_sender import MarkerSender
from sparklog.broker.transactions.transaction_host import TransactionHost
from sparklog.broker.transactions.verification import TransactionVerification
from sparklog.net.server_connection import ServerConnection
from sparklog.protocol.messages import ControlUpdate
from sparklog.replica.fetch_session import SessionCache
from sparklog.security.connection_limits import ConnectionLimits

_log = logging.getLogger(__name__)


class Broker:
    """The parts of one broker, which it creates, connects, starts and stops.

    At creation ``partitions`` has no replica yet, and ``registry`` is not open yet. ``log_failed`` is called with each
    error of the log directory. ``restart`` begins a controlled shutdown after which the supervisor starts the broker
    again. ``restart`` raises BrokerError if a restart is not possible.

    Not thread-safe: use it only on the broker's event loop.
    """

    def __init__(
        self,
        context: BrokerContext,
        partitions: Partitions,
        registry: ZkRegistration,
        *,
        log_failed: OnLogFailed,
        restart: Callable[[], None],
    ) -> None:
        self.context = context
        self.partitions = partitions
        self.registry = registry
        self.log_failed = log_failed
        self.restart = restart
        self._directory = partitions.directory
        config = context.config
        connections = ConnectionLimits(
            per_address=config.max_connections_per_ip,
            per_user=config.max_connections_per_user,
            window_s=config.quota_window_seconds,
        )
        self.quotas = QuotaManager(
            context.counters,
            connections,
            window_s=config.quota_window_seconds,
            queued_max_bytes=config.queued_max_bytes,
        )
        self._quota_cache = QuotaCache(self.quotas)
        registry.session_listeners.append(self._quota_cache.open)
        self.quota_requests = QuotaRequests(context, registry, self._quota_cache)
        self.access = Access(context.credentials, context.cache, context.counters, context.audit)
        self._create_logins()
        #: The scheduler for the work on long requests, which runs in slices so that the event loop also serves other
        #: requests.
        self.slices = Slices()
        # The fetch session ids of this process must differ from those of an earlier process.
        first_id = int.from_bytes(os.urandom(4), "big")
        sessions = SessionCache(slots=context.config.fetch_session_slots, first_id=first_id)
        self.fetches = Fetches(context, self.access, self.partitions, sessions)
        self._create_authorizer()
        self._create_coordinators()
        self._create_replication()

    def _create_logins(self) -> None:
        """Create the caches of users and delegation tokens, and the logins of clients."""
        self.users = Users()
        self.registry.session_listeners.append(self.users.open)
        self.tokens = Tokens(
            wall_ms=self.context.wall_ms,
            check_interval_ms=self.context.config.delegation_token_expiry_check_interval_ms,
        )
        self.registry.session_listeners.append(self.tokens.open)
        self.logins = Logins(
            sasl_mechanisms(self.context.config.sasl_enabled_mechanisms),
            self.users,
            self.tokens,
            max_reauth_ms=self.context.config.connections_max_reauth_ms,
            wall_ms=self.context.wall_ms,
            on_login=self.context.audit.login,
            validate_token=token_validator(self.context.config),
        )

    def _create_authorizer(self) -> None:
        """Create the authorizer if the settings enable it.

        Without an authorizer, only requests of clients whose delegation token has a scope are checked.
        """
        audit, scope_of = self.context.audit, self.tokens.scope
        self.authorizer = authorizer_of(self.context.config, audit, scope_of)
        self.acls: AclCache | None = None
        #: The authorizer that checks the scopes of delegation tokens if ``authorizer`` is None.
        self.scopes = scope_authorizer(audit, scope_of)
        if self.authorizer is None:
            self.fetches.open_fetch_of_token = scoped_fetch(self.scopes)
        else:
            self.acls = AclCache(self.authorizer, self.context.counters)
            self.fetches.open_fetch = self.fetches.open_fetch_of_token = partial(AuthorizedFetch, self.authorizer)
            self.registry.session_listeners.append(self.acls.open)

        self.local_read_tickets = LocalReadTickets(
            self.context, self.scopes if self.authorizer is None else self.authorizer
        )

    def _create_coordinators(self) -> None:
        context, partitions, log_start_moved = self.context, self.partitions, self.fetches.log_start_moved
        self.internal_topics = InternalTopics(context, self.registry)
        self.transactions: HostedCoordinators[TransactionHost] = HostedCoordinators(context, TRANSACTIONS)
        self.groups: HostedCoordinators[GroupHost] = HostedCoordinators(context, OFFSETS)
        self.coordinator_epochs = epochs = CoordinatorEpochs(context.cache)
        self.fences = FencedProducers()
        rules = LeaderTransactions(self.fences, context.counters)
        self.verifications = TransactionVerification(
            context, partitions, epochs=epochs, rules=rules, transactions=self.transactions
        )
        self.markers = MarkerAppend(context, partitions, epochs=epochs, rules=rules)
        self.hanging = HangingTransactions(
            context, partitions, epochs=epochs, markers=self.markers, transactions=self.transactions
        )
        self.marker_sender = MarkerSender(
            context,
            self.slices,
            registry=self.registry,
            internal_topics=self.internal_topics,
            markers=self.markers,
            groups=self.groups,
        )
        transaction_host = partial(
            TransactionHost, context, decisions=self.marker_sender, log_start_moved=log_start_moved
        )
        group_host = partial(
            GroupHost,
            context,
            registry=self.registry,
            takes_part=self.hanging.takes_part,
            log_start_moved=log_start_moved,
        )
        self._coordinators = Coordinators(
            CoordinatorHosting(context, self.transactions, transaction_host),
            CoordinatorHosting(context, self.groups, group_host),
        )

    def _create_replication(self) -> None:
        context, partitions, directory = self.context, self.partitions, self._directory
        self._fetchers = Fetchers(context)
        self._log_maintenance = LogMaintenance(
            context,
            partitions,
            directory=directory,
            holds=RetentionHolds(context, self.groups),
            log_start_moved=self.fetches.log_start_moved,
            log_failed=self.log_failed,
        )
        self._cleaner = Cleaner(context, partitions, self.log_failed)
        self.set_aside = SetAsideLogs(context, directory, self.registry)
        self._topic_notes = TopicNotes(context, partitions)
        self.effects = PartitionEffects(
            context,
            partitions,
            registry=self.registry,
            fetchers=self._fetchers,
            fetches=self.fetches,
            log_maintenance=self._log_maintenance,
            coordinators=self._coordinators,
            log_failed=self.log_failed,
        )
        hosting = ReplicaHosting(
            context,
            partitions,
            effects=self.effects,
            on_log_set_aside=self.set_aside.check_soon,
            log_failed=self.log_failed,
        )
        self.control_updates = ControlUpdates(
            context,
            self.access,
            partitions,
            hosting=hosting,
            registry=self.registry,
            on_update=self._on_update,
        )

    def _on_update(self, update: ControlUpdate) -> None:
        """Pass an update of the controller to the topic notes, and store its controller epoch if it is new.

        A thread stores the epoch.
        """
        self._topic_notes.on_update(update)
        file, epoch, controller_id = self._directory.seen_file, update.controller_epoch, update.controller_id

        async def note() -> None:
            try:
                await asyncio.to_thread(file.note_controller, epoch, controller_id)
            except OSError as error:  # a full disk: the next controller's epoch is stored
                _log.warning("could not record controller epoch %d in the log directory: %s", epoch, error)

        if epoch > file.seen.controller_epoch:
            self.context.spawn(note(), "note the controller epoch")

    def connection_lost(self, connection: ServerConnection) -> None:
        """Drop the state that the quotas and the fetches keep for a connection that has ended."""
        self.quotas.connection_lost(connection)
        self.fetches.connection_lost(connection)

    def start(self) -> None:
        """Start the background work. Call this after the registration."""
        self._log_maintenance.start()
        self._cleaner.start()
        self.set_aside.start()
        self._topic_notes.start()
        self.hanging.start()

    async def stop_replication(self) -> None:
        """Start no more background work, and stop all replicas.

        Each replica responds to its waiting produce and fetch requests.
        """
        self._log_maintenance.close()
        self._cleaner.close()
        self.set_aside.close()
        await self._fetchers.close()
        for partition in self.partitions:
            partition.stop_at_exit()
        self.partitions.stop_timer()

    async def close(self) -> None:
        """End all tasks, close the connections to other brokers, and end the ZooKeeper session."""
        self.slices.close()
        await self.context.end_tasks()
        self.marker_sender.close()
        self.verifications.close()
        self.hanging.close()
        if self.acls is not None:
            self.acls.close()
        self._quota_cache.close()
        self.users.close()
        self.tokens.close()
        await self.registry.close()
        self.context.audit.close()

    def finish_logs(self) -> None:
        """Mark the log directory as cleanly closed. Call this after ``close``. This blocks for the disk.

        Raises:
            SparklogError: a flush has failed, so the clean-shutdown marker was not written.
        """
        self._log_maintenance.ended()
        if self._topic_notes.collect():
            self._topic_notes.write()
        self._directory.write_clean_marker()
