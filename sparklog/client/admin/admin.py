"""The admin client: topics, replicas, brokers, groups and transactions of a cluster.

A failed call is retried if its error is retriable. If it does not succeed within its timeout, it raises a typed error.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from types import TracebackType
from typing import Any

import pyarrow as pa

from sparklog.client.admin import acls as acl_requests
from sparklog.client.admin import (
    delegation_tokens,
    groups,
    reassignment,
    rolling_restart,
    set_aside,
    topics,
    transactions,
    users,
)
from sparklog.client.admin import quotas as quota_admin
from sparklog.client.admin.delegation_tokens import CreatedToken, DelegationTokenDescription, ScopeText
from sparklog.client.admin.descriptions import (
    BrokerDescription,
    ClusterDescription,
    HangingTransaction,
    MoveDescription,
    Reassigned,
    TopicDescription,
    TransactionDescription,
    describe_broker,
    describe_cluster,
    describe_topic,
)
from sparklog.client.admin.set_aside import RestoredTopic, SetAsideDescription
from sparklog.client.admin.users import UserDescription
from sparklog.client.cluster import forks
from sparklog.client.cluster.blocking_cluster import BlockingCluster
from sparklog.client.cluster.isolation_level import Isolation, wire_isolation
from sparklog.client.cluster.offsets import OffsetQuery, checked_offset, list_offsets
from sparklog.errors import BrokerError, ErrorCode
from sparklog.model import BrokerEndpoint, TopicPartition
from sparklog.net.client_security import Security
from sparklog.protocol.messages import (
    DescribeBroker,
    DescribeBrokerReply,
    GroupOffset,
    Metadata,
    MetadataReply,
    QuotaKey,
)
from sparklog.protocol.sasl import SCRAM_MECHANISMS
from sparklog.protocol.scram import DEFAULT_ITERATIONS
from sparklog.security.acls import (
    ANY,
    AclBinding,
    AclFilter,
    AuthorizationResult,
    cluster_name,
    parse_operation,
    parse_resource_type,
)
from sparklog.security.acls import ResourceType as AclResourceType
from sparklog.security.principals import parse_principal


class Admin:
    """A client for administration. Use it from one thread at a time. Close it, or use it in a ``with`` block.

    Every method raises ClientTimeout if it does not succeed within its timeout. The method's docstring says what may
    have happened then.

    >>> with Admin("localhost:9092") as admin:                                              # doctest: +SKIP
    ...     admin.create_topic("flights", partitions=6, schema="carrier string, dep_delay double", key="carrier")
    """

    def __init__(
        self,
        bootstrap: str | Iterable[str],
        *,
        timeout_s: float = 30.0,
        client_id: str = "sparklog-admin",
        first_contact_s: float | None = None,
        security: Security = None,
    ) -> None:
        """Create the client. It connects at the first call.

        ``timeout_s`` bounds every call, including retries. As long as no broker has ever responded, ``first_contact_s``
        is the bound; None means ``timeout_s``. ``security`` has the settings for TLS and login, with Kafka's names,
        or is the path of a file with them; None means the file that ``SPARKLOG_CLIENT_CONFIG`` names.

        Raises:
            ConfigError: ``bootstrap`` has no address, or ``security`` is not valid.
        """
        self._cluster = BlockingCluster(
            bootstrap,
            client_id=client_id,
            timeout_s=timeout_s,
            first_contact_s=first_contact_s,
            security=security,
        )
        self._timeout_s = timeout_s
        forks.watch(self)

    def close(self) -> None:
        """Close the connections. Do nothing in a forked child."""
        self._cluster.close()

    def __enter__(self) -> Admin:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # --- topics ---

    def create_topic(
        self,
        name: str,
        *,
        partitions: int | None = None,
        replication_factor: int | None = None,
        schema: pa.Schema | str | Any = None,
        key: str | Sequence[str] | None = None,
        event_time: str | None = None,
        config: Mapping[str, Any] | None = None,
        timeout_s: float | None = None,
    ) -> TopicDescription:
        """Create a topic and wait until its partitions have leaders.

        Args:
            partitions: the number of partitions. Default: the brokers' ``num.partitions``.
            replication_factor: the replicas of each partition. Default: the brokers' ``default.replication.factor``.
            schema: a pyarrow schema, a Spark ``StructType``, or text such as ``"carrier string, delay double"``, which
                needs no Spark. Default: Kafka's columns key, value, headers, timestamp.
            key: the column or columns that determine the partition of a typed topic's records.
            event_time: the timestamp column that queries by time use.
            config: topic settings by their Kafka names. Values are converted to text.

        Raises:
            BrokerError: TOPIC_ALREADY_EXISTS, INVALID_TOPIC_EXCEPTION, INVALID_PARTITIONS, INVALID_REPLICATION_FACTOR,
                INVALID_CONFIG, SCHEMA_MISMATCH.
            ConfigError: ``schema`` is invalid text.
            ClientTimeout: no success in time; the topic may still be created.
        """
        warning = topics.create_topic(
            self._cluster,
            name,
            partitions=partitions,
            replication_factor=replication_factor,
            schema=schema,
            key=key,
            event_time=event_time,
            config=config,
            timeout_s=self._timeout_s if timeout_s is None else timeout_s,
        )
        return describe_topic(self._cluster.topic(name, refresh=True), warning=warning)

    def delete_topic(self, name: str, *, timeout_s: float | None = None) -> None:
        """Delete a topic and its records.

        Raises:
            BrokerError: UNKNOWN_TOPIC_OR_PARTITION.
            ClientTimeout: no success in time; the topic may still be deleted.
        """
        topics.delete_topic(self._cluster, name, timeout_s=self._timeout_s if timeout_s is None else timeout_s)

    def create_partitions(
        self,
        name: str,
        partitions: int,
        *,
        assignment: Sequence[Sequence[int]] = (),
        timeout_s: float | None = None,
    ) -> TopicDescription:
        """Increase the number of a topic's partitions to ``partitions``, and wait until the new ones have leaders.

        Afterwards, new records of a key may go to a different partition than its earlier records.

        Args:
            assignment: the brokers of each added partition, preferred leader first. Default: a balanced assignment.

        Raises:
            BrokerError: UNKNOWN_TOPIC_OR_PARTITION, INVALID_PARTITIONS if the topic has this number or more,
                INVALID_REPLICA_ASSIGNMENT, INVALID_REPLICATION_FACTOR if too few brokers are alive.
            ClientTimeout: no success in time; the partitions may still be created.
        """
        timeout_s = self._timeout_s if timeout_s is None else timeout_s
        warning = topics.create_partitions(self._cluster, name, partitions, assignment=assignment, timeout_s=timeout_s)
        return describe_topic(self._cluster.topic(name, refresh=True), warning=warning)

    def add_columns(
        self, name: str, columns: pa.Schema | str | Any, *, timeout_s: float | None = None
    ) -> TopicDescription:
        """Add columns to a typed topic, after its existing columns, and wait until all reachable brokers know them.

        The columns must be nullable; in older rows they are null. A column that exists with the same type is ignored.

        Raises:
            BrokerError: UNKNOWN_TOPIC_OR_PARTITION; SCHEMA_MISMATCH if a column exists with another type, or is not
                nullable; INVALID_REQUEST for a topic with Kafka's columns.
            ClientTimeout: no success in time; the columns may still be added.
        """
        timeout_s = self._timeout_s if timeout_s is None else timeout_s
        return describe_topic(topics.add_columns(self._cluster, name, columns, timeout_s=timeout_s))

    def alter_topic(
        self,
        name: str,
        config: Mapping[str, Any] | None = None,
        *,
        unset: Iterable[str] = (),
        timeout_s: float | None = None,
    ) -> TopicDescription:
        """Change settings of a topic, and reset those in ``unset`` to the cluster's defaults.

        Other settings keep their values. Either all changes take effect or none. No restart is necessary.

        Raises:
            BrokerError: UNKNOWN_TOPIC_OR_PARTITION; INVALID_CONFIG names the setting and its range.
            ClientTimeout: no success in time; the settings may still be changed.
        """
        timeout_s = self._timeout_s if timeout_s is None else timeout_s
        topics.alter_topic(self._cluster, name, config or {}, unset=unset, timeout_s=timeout_s)
        return describe_topic(self._cluster.topic(name, refresh=True))

    def delete_records(
        self, before: Mapping[TopicPartition, int | None], *, timeout_s: float | None = None
    ) -> dict[TopicPartition, int]:
        """Delete the records before an offset of each partition (None: all records). Return the new log start offsets.

        Raises:
            BrokerError: OFFSET_OUT_OF_RANGE for an offset above the high watermark; INVALID_REQUEST for a topic whose
                cleanup.policy is only compact; UNKNOWN_TOPIC_OR_PARTITION. Records of other partitions may be deleted
                nevertheless.
            ClientTimeout: a leader did not respond in time.
        """
        wanted = {TopicPartition(*tp): offset for tp, offset in before.items()}
        timeout_s = self._timeout_s if timeout_s is None else timeout_s
        return topics.delete_records(self._cluster, wanted, timeout_s=timeout_s)

    def list_topics(self) -> list[str]:
        """Return the names of all topics, sorted."""
        return sorted(topic.name for topic in self._metadata(None, schemas=False).topics if not topic.code)

    def describe_topic(self, name: str) -> TopicDescription:
        """Return the description of a topic.

        Raises:
            BrokerError: UNKNOWN_TOPIC_OR_PARTITION, INVALID_TOPIC_EXCEPTION.
        """
        return describe_topic(self._cluster.topic(name, refresh=True))

    def describe_topics(self, names: Iterable[str] | None = None, *, internal: bool = False) -> list[TopicDescription]:
        """Return the descriptions of the topics ``names`` in this order, or of all topics.

        If ``names`` is None, ``internal`` says whether the result includes internal topics.

        Raises the same errors as ``describe_topic``.
        """
        if names is not None:
            return [self.describe_topic(name) for name in names]
        found = [topic for topic in self._metadata(None, internal=internal).topics if not topic.code]
        return [describe_topic(topic) for topic in sorted(found, key=lambda topic: topic.name)]

    # --- replicas and leaders ---

    def reassign(
        self,
        what: str | Mapping[TopicPartition, Sequence[int]],
        *,
        replication_factor: int | None = None,
        throttle_bytes: int = 0,
    ) -> Reassigned:
        """Move partitions to other brokers. Return when the moves have started.

        ``reassignments`` lists the moves, and ``wait_until_moved`` waits for their end. If there is a controller, the
        broker that received the request knows the moves when this method returns.

        Args:
            what: the new brokers of each partition, preferred leader first; or the name of a topic, together with
                ``replication_factor``. With a topic, replicas stay on their brokers if possible.
            throttle_bytes: the maximum number of bytes per second that each broker copies; 0 means no limit. To change
                the limit of a move, call this again with the same target.

        Raises:
            BrokerError: UNKNOWN_TOPIC_OR_PARTITION, INVALID_REPLICA_ASSIGNMENT or INVALID_REPLICATION_FACTOR for the
                first refused partition; the other partitions move.
        """
        if isinstance(what, str):
            if replication_factor is None:
                raise TypeError(f"reassign({what!r}): the name of a topic needs replication_factor")
            targets = self.plan_replication_factor(what, replication_factor)
        elif replication_factor is not None:
            raise TypeError("reassign: replication_factor needs the name of a topic, not targets")
        else:
            targets = {TopicPartition(*tp): tuple(brokers) for tp, brokers in what.items()}
        return self._move(targets, throttle_bytes)

    def plan_replication_factor(self, topic: str, replication_factor: int) -> dict[TopicPartition, tuple[int, ...]]:
        """Return the targets for ``reassign`` that give each partition this number of replicas.

        Partitions that already have this number of replicas are omitted.

        Raises:
            BrokerError: UNKNOWN_TOPIC_OR_PARTITION, INVALID_REPLICATION_FACTOR.
        """
        brokers, replicas = self._replicas()
        return reassignment.with_factor(brokers, replicas, topic, replication_factor)

    def drain_broker(self, broker_id: int, *, throttle_bytes: int = 0) -> Reassigned:
        """Move all replicas of ``broker_id`` to the other brokers. The broker need not be alive.

        New topics and partitions may still be placed on the broker. The broker is empty when a repeated call returns no
        ``targets``.

        Raises:
            BrokerError: INVALID_REPLICATION_FACTOR if there are too few other brokers, and BROKER_NOT_AVAILABLE if the
                broker is not known. Then no partition moves.
        """
        brokers, replicas = self._replicas()
        known = {broker.broker_id for broker in brokers}.union(*replicas.values())
        if broker_id not in known:
            raise BrokerError(
                ErrorCode.BROKER_NOT_AVAILABLE,
                f"broker {broker_id} is not known; the known brokers are {sorted(known)}",
            )
        return self._move(reassignment.draining(brokers, replicas, broker_id), throttle_bytes)

    def cancel_reassignment(
        self, partitions: Iterable[TopicPartition] = (), *, may_have_ended: Iterable[TopicPartition] = ()
    ) -> list[TopicPartition]:
        """Cancel moves, so that the partitions go back to their earlier brokers. Return the cancelled partitions.

        If a response was lost, the result may include moves that had just ended. A move in ``may_have_ended`` is
        ignored if it is no longer in progress.

        Raises:
            BrokerError: NO_REASSIGNMENT_IN_PROGRESS, UNKNOWN_TOPIC_OR_PARTITION; the other moves are cancelled.
        """
        named = dict.fromkeys(TopicPartition(*tp) for tp in partitions)
        found = dict.fromkeys(TopicPartition(*tp) for tp in may_have_ended)
        return reassignment.cancel_moves(
            self._cluster,
            named,
            may_have_ended=[tp for tp in found if tp not in named],
            timeout_ms=self._cluster.broker_timeout_ms(),
        )

    def reassignments(self) -> list[MoveDescription]:
        """Return the moves in progress. Each description has the progress of its move."""
        return reassignment.list_moves(self._cluster, self.describe_brokers())

    def wait_until_moved(
        self, targets: Mapping[TopicPartition, Sequence[int]], *, timeout_s: float | None = None
    ) -> None:
        """Wait until each partition has exactly the replicas of its target, all in sync.

        Raises:
            ClientTimeout: the message names partitions for which this is not true yet.
        """
        self._wait("moves", lambda reply: reassignment.not_on_target(reply, targets), timeout_s)

    def elect_leaders(
        self, partitions: Iterable[TopicPartition] | None = None, *, unclean: bool = False
    ) -> dict[TopicPartition, BrokerError]:
        """Elect the preferred leader, which is the first replica, for each of ``partitions`` (default: all).

        After a ``reassign`` of this client, the new order of the replicas applies. After a reassignment by another
        client, or without a controller, the old order may apply for a moment.

        With ``unclean``, if no member of the ISR is alive, elect any live replica. Such an election loses records.

        Return the partitions for which the election failed, each with the reason.
        """
        return reassignment.elect(
            self._cluster, partitions, unclean=unclean, timeout_ms=self._cluster.broker_timeout_ms()
        )

    def wait_until_in_sync(self, topics: Iterable[str] | None = None, *, timeout_s: float | None = None) -> None:
        """Wait until every partition (of ``topics``, if given) has a leader and all replicas are in sync.

        Raises:
            ClientTimeout: the message names partitions that have no leader or a replica that is not in sync.
        """
        wanted = None if topics is None else set(topics)
        self._wait("replicas in sync", lambda reply: reassignment.not_in_sync(reply, wanted), timeout_s)

    # --- set-aside logs ---

    def set_aside_logs(self) -> list[SetAsideDescription]:
        """Return the set-aside logs of all live brokers, which keep these logs without serving them.

        Brokers of release 0.1.0 keep no such logs.

        Raises:
            BrokerError: a broker did not respond.
        """
        return set_aside.set_aside_logs(self._cluster)

    def restore_set_aside(self, topic_id: str, *, timeout_s: float | None = None) -> RestoredTopic:
        """Recreate the topic with this id from set-aside logs, and wait until its partitions have leaders.

        Raises:
            BrokerError: UNKNOWN_TOPIC_ID if no broker has a log of the topic; TOPIC_ALREADY_EXISTS if a topic has the
                same name; REQUEST_TIMED_OUT if the topic was created and partitions have no leader yet.
        """
        return set_aside.restore_set_aside(
            self._cluster, topic_id, timeout_s=self._timeout_s if timeout_s is None else timeout_s
        )

    def remove_set_aside(self, broker_id: int, names: Iterable[str]) -> None:
        """Delete set-aside logs of one broker permanently. Unknown names are ignored.

        Raises:
            BrokerError: BROKER_NOT_AVAILABLE if the broker is not live; UNSUPPORTED_VERSION if its release does not
                support set-aside logs.
        """
        set_aside.remove_set_aside(self._cluster, broker_id, names)

    # --- ACLs ---

    def create_acls(self, acls: Iterable[AclBinding]) -> None:
        """Add ACLs. Existing ACLs do not change, and a call may be repeated.

        ``security.acls.binding`` returns the AclBinding for a principal, an operation and a resource.

        Raises:
            BrokerError: CLUSTER_AUTHORIZATION_FAILED if this client may not Alter the cluster; SECURITY_DISABLED if the
                brokers have no authorizer; INVALID_REQUEST if a resource pattern would have too many ACLs.
        """
        acl_requests.create_acls(self._cluster, acls)

    def acls(self, condition: AclFilter | None = None) -> list[AclBinding]:
        """Return the ACLs that satisfy the condition; None means all.

        Raises:
            BrokerError: CLUSTER_AUTHORIZATION_FAILED if this client may not Describe the cluster; SECURITY_DISABLED if
                the brokers have no authorizer.
        """
        return list(acl_requests.acl_table(self._cluster, condition or AclFilter()).acls)

    def delete_acls(self, conditions: Iterable[AclFilter]) -> list[AclBinding]:
        """Remove the ACLs that satisfy one of the conditions, and return them.

        Raises:
            BrokerError: CLUSTER_AUTHORIZATION_FAILED, SECURITY_DISABLED: for the same reasons as in ``create_acls``.
        """
        return acl_requests.delete_acls(self._cluster, conditions)

    def check_acl(
        self, principal: str, operation: str, *, resource_type: str = "topic", name: str, host: str = ANY
    ) -> AuthorizationResult:
        """Return whether the principal may do the operation on a resource, and the rule that decides, as one sentence.

        ``host`` is an address; ``*`` means a host that no ACL names.

        >>> admin.check_acl("User:anna", "Write", name="orders")                            # doctest: +SKIP
        AuthorizationResult(allowed=True, rule="an ACL allows User:anna Write on Topic 'orders' from any host")

        Raises:
            ConfigError: the principal, the operation or the type is invalid.
            BrokerError: CLUSTER_AUTHORIZATION_FAILED, SECURITY_DISABLED: for the same reasons as in ``acls``.
        """
        kind = parse_resource_type(resource_type)
        return acl_requests.check_acl(
            self._cluster,
            parse_principal(principal),
            parse_operation(operation),
            resource_type=kind,
            name=cluster_name(name) if kind is AclResourceType.CLUSTER else name,
            host=host,
        )

    # --- the cluster ---

    def restart_broker(self, broker_id: int) -> None:
        """Request a controlled shutdown of a broker, after which its supervisor starts the broker again.

        This method waits neither for the shutdown nor for the restart.

        Raises:
            BrokerError: BROKER_NOT_AVAILABLE, BROKER_STOPPING; INVALID_REQUEST if the broker has no supervisor.
        """
        rolling_restart.restart(self._cluster, broker_id)

    def rolling_restart(
        self,
        brokers: Sequence[int] | None = None,
        *,
        timeout_s: float = 120.0,
        tell: Callable[[str], None] = lambda line: None,
    ) -> list[int]:
        """Restart brokers (default: all) one at a time, each after all replicas are in sync. Return the brokers' ids.

        ``timeout_s`` bounds each wait. ``tell`` is called with a line of text at each step.

        Raises:
            BrokerError: for the same reasons as in ``restart_broker``.
            ClientTimeout: a broker did not come back, a broker was not alive, or a replica was not in sync. The
                message has the problems.
        """
        return rolling_restart.roll(self._cluster, brokers, timeout_s=timeout_s, tell=tell)

    def describe_cluster(self) -> ClusterDescription:
        """Return the cluster's id and its live brokers."""
        return describe_cluster(self._metadata((), schemas=False))

    def describe_brokers(self) -> list[BrokerDescription]:
        """Return the state of every live broker. A broker that does not respond is listed with its error."""
        return [self._describe_broker(address) for address in self.describe_cluster().brokers]

    def list_offsets(
        self,
        queries: Mapping[TopicPartition, OffsetQuery] | Iterable[TopicPartition],
        *,
        at: OffsetQuery = "latest",
        isolation: Isolation = "read_committed",
        known: Mapping[TopicPartition, int] | None = None,
    ) -> dict[TopicPartition, int]:
        """Return offsets of partitions.

        A query is ``"earliest"``, ``"latest"`` (the next offset that a consumer will see), or a time: a datetime, which
        is UTC without a time zone, or microseconds since the epoch. For a time, all records before the returned offset
        are older than the time. If no record has this time or a later one, the latest offset is returned.

        ``queries`` maps each partition to its query, or has only partitions, which all use the query ``at``. With
        ``isolation="read_committed"``, the latest offset is the first offset of an open transaction, if there is one.
        ``known`` are log end offsets that an earlier call returned. If a leader returns a lower offset, the other
        brokers must confirm that it is the leader.
        """
        asked = dict(queries) if isinstance(queries, Mapping) else dict.fromkeys(queries, at)
        by_partition = {TopicPartition(*tp): query for tp, query in asked.items()}
        return list_offsets(self._cluster, by_partition, isolation=wire_isolation(isolation), known=known)

    # --- consumer groups ---

    def commit_offsets(
        self, group: str, offsets: Mapping[TopicPartition, int], *, topic_ids: Mapping[str, str] | None = None
    ) -> None:
        """Set the offsets from which a group will read these partitions. Offsets of other partitions do not change.

        ``topic_ids`` has the ids of the topics to which the offsets belong, because a topic may have been recreated
        since. For a topic without an id, the offsets belong to the current topic of this name.

        Raises:
            BrokerError: NON_EMPTY_GROUP while the group has members; UNKNOWN_TOPIC_OR_PARTITION for the first refused
                partition: the offsets of the other partitions are set.
            TypeError, ValueError: an offset is invalid, see ``Consumer.seek``; no offset is set.
        """
        known = topic_ids or {}
        checked = {TopicPartition(*tp): checked_offset(TopicPartition(*tp), at) for tp, at in offsets.items()}
        entries = [GroupOffset(topic, part, offset, known.get(topic, "")) for (topic, part), offset in checked.items()]
        groups.commit_offsets(self._cluster, group, entries, timeout_s=self._timeout_s)

    def group_offsets(self, group: str) -> dict[TopicPartition, int]:
        """Return the next offset that a group reads, by partition. The result is empty for an unknown group."""
        found = groups.group_offsets(self._cluster, group, timeout_s=self._timeout_s)
        return {TopicPartition(entry.topic, entry.partition): entry.offset for entry in found}

    def list_groups(self) -> list[str]:
        """Return the names of all groups that have offsets or members, sorted."""
        return [found.group for found in self.group_listings()]

    def group_listings(self) -> list[groups.GroupListing]:
        """Return all groups that have offsets or members, with their state and number of members."""
        return groups.list_groups(self._cluster)

    def describe_group(self, group: str) -> groups.GroupDescription | None:
        """Return the members of a group and their partitions, or None if the group does not exist."""
        return groups.describe_group(self._cluster, group)

    def delete_group(self, group: str) -> None:
        """Delete a group without members, and its offsets.

        Raises:
            BrokerError: NON_EMPTY_GROUP, GROUP_ID_NOT_FOUND.
        """
        groups.delete_group(self._cluster, group)

    # --- users ---

    def list_users(self, names: Iterable[str] | None = None) -> list[UserDescription]:
        """Return the users that can log in with a password, with their mechanisms and iterations, by name.

        With ``names``, return only these users. Names of unknown users are ignored.
        """
        return users.list_users(self._cluster, names)

    def set_password(
        self,
        name: str,
        password: str,
        *,
        mechanisms: Iterable[str] = SCRAM_MECHANISMS,
        iterations: int = DEFAULT_ITERATIONS,
    ) -> None:
        """Create a user, or change its password, which ends the user's connections.

        The password does not leave this process. The brokers get keys that are derived from it. Credentials for
        mechanisms that are not in ``mechanisms`` do not change.

        Raises:
            ConfigError: the name or the password is empty or has characters that are not allowed, the mechanism is
                unknown, or there are too few or too many iterations.
            BrokerError: UNACCEPTABLE_CREDENTIAL.
        """
        prepared = users.checked_name(name)
        users.set_password(self._cluster, prepared, users.new_credentials(password, mechanisms, iterations))

    def delete_user(self, name: str, *, mechanisms: Iterable[str] | None = None) -> None:
        """Delete a user's credentials, which ends its connections. With ``mechanisms``, delete only these credentials.

        Raises:
            BrokerError: RESOURCE_NOT_FOUND if there is no such user, or it has no credential for a mechanism.
        """
        users.delete_user(self._cluster, name, mechanisms)

    # --- delegation tokens ---

    def create_delegation_token(
        self,
        *,
        renewers: Iterable[str] = (),
        max_lifetime_ms: int | None = None,
        period_ms: int | None = None,
        scope: Iterable[ScopeText] | None = None,
    ) -> CreatedToken:
        """Create a token with which other processes (helpers) log in as this client's principal without the password.

        Args:
            renewers: principals, such as ``User:otto``, that may renew and end the token.
            max_lifetime_ms: the maximum lifetime of the token, including renewals (default: the brokers'
                ``delegation.token.max.lifetime.ms``).
            period_ms: the token expires after this time unless it is renewed. Default and maximum are the brokers'
                ``delegation.token.expiry.time.ms``. A helper can renew its own token, each time for this period.
            scope: what a helper may do, for example ``[("Read", "Topic", "orders")]``: an operation, a type of
                resource, its name, and perhaps ``Prefixed``, as in an ACL. The helper may do it only if this client's
                principal may do it. By default the helper may do everything that the principal may do.

        A user that is deleted loses its tokens.

        Raises:
            BrokerError: DELEGATION_TOKEN_REQUEST_NOT_ALLOWED if this client has not logged in, or has logged in with a
                token; INVALID_REQUEST if an entry of the scope is not valid.
        """
        return delegation_tokens.create_token(
            self._cluster, renewers, max_lifetime_ms=max_lifetime_ms, period_ms=period_ms, scope=scope
        )

    def renew_delegation_token(self, token_id: str, *, period_ms: int | None = None) -> int:
        """Make a token expire ``period_ms`` from now. Return its expiry time in milliseconds since the Unix epoch.

        The default period is the brokers' ``delegation.token.expiry.time.ms``. A client that has logged in with this
        token renews it for the token's own period, whatever ``period_ms`` is.

        Raises:
            BrokerError: DELEGATION_TOKEN_NOT_FOUND, DELEGATION_TOKEN_OWNER_MISMATCH, DELEGATION_TOKEN_EXPIRED;
                DELEGATION_TOKEN_REQUEST_NOT_ALLOWED if this client has not logged in, or with another token.
        """
        return delegation_tokens.renew_token(self._cluster, token_id, period_ms).expiry_ms

    def expire_delegation_token(
        self, token_id: str, *, period_ms: int | None = None, after_ms: int | None = None
    ) -> int:
        """End a token, now or ``period_ms`` from now. Return its expiry time in milliseconds since the Unix epoch.

        ``after_ms`` is an earlier name of ``period_ms``. After this call, clients that have logged in with the token
        cannot renew the token.

        Raises the same errors as ``renew_delegation_token``.
        """
        return delegation_tokens.expire_token(self._cluster, token_id, after_ms if period_ms is None else period_ms)

    def list_delegation_tokens(self, owners: Iterable[str] | None = None) -> list[DelegationTokenDescription]:
        """Return the tokens of ``owners`` (default: of all owners) that this client's principal may see."""
        return delegation_tokens.list_tokens(self._cluster, owners)

    # --- transactions ---

    def transactions(self) -> list[TransactionDescription]:
        """Return the transactions of all coordinators, sorted by key.

        For each key (of a producer or sink), the result has the transaction that is open or ending. If there is none,
        the result has the last transaction of the key.

        Raises:
            ClientTimeout: a broker did not respond, or a coordinator is still loading its state.
        """
        return transactions.list_transactions(self._cluster)

    def abort_transaction(self, key: str) -> None:
        """Abort an open transaction and fence its producer.

        ``key`` is a key that ``transactions`` returns, such as ``id:`` followed by the transactional id of a producer.

        Raises:
            BrokerError: INVALID_TXN_STATE if no transaction is open, or its commit or abort is already decided.
            ClientTimeout: the coordinator did not respond; the transaction may be aborted.
        """
        transactions.abort_transaction(self._cluster, key)

    def hanging_transactions(self, *, open_s: float = 900.0) -> list[HangingTransaction]:
        """Return hanging transactions: open in a partition for at least ``open_s``, and unknown to every coordinator.

        A hanging transaction blocks readers of committed records until ``abort_hanging``, or until the brokers abort it
        after ``transaction.hanging.after.ms``.

        Raises:
            ClientTimeout: a broker did not respond, or not every coordinator was reachable.
        """
        return transactions.find_hanging(self._cluster, open_s=open_s)

    def abort_hanging(self, partition: TopicPartition, producer_id: int) -> None:
        """Abort the hanging transaction of a producer id in one partition.

        Consumers of committed records skip the records of an aborted transaction.

        Raises:
            BrokerError: INVALID_TXN_STATE if the producer has no open transaction in the partition, or if a
                coordinator knows the transaction. If a coordinator knows it, use ``abort_transaction``.
            ClientTimeout: the leader did not respond; the transaction may be aborted.
        """
        transactions.abort_hanging(self._cluster, TopicPartition(*partition), producer_id)

    # --- quotas ---

    def alter_quotas(
        self,
        quotas: Mapping[str, float | None],
        *,
        user: str | None = None,
        client_id: str | None = None,
        ip: str | None = None,
        timeout_s: float | None = None,
    ) -> None:
        """Set quotas of a user, a client id, a client id of a user, or an address; a value of None removes a quota.

        An empty name means the default: all users, client ids or addresses without quotas of their own. The quotas are
        ``producer_byte_rate``, ``consumer_byte_rate`` and ``request_percentage``; for an address
        ``connection_creation_rate``. Every broker enforces the quotas by itself, without a restart.

        Raises:
            BrokerError: INVALID_CONFIG for an unknown quota or an invalid value; INVALID_REQUEST for any other
                combination of names.
            ClientTimeout: no broker responded in time; the quotas may be set.
        """
        quota_admin.alter_quotas(self._cluster, QuotaKey(user, client_id, ip), quotas, timeout_s=timeout_s)

    def describe_quotas(
        self, *, user: str | None = None, client_id: str | None = None, ip: str | None = None
    ) -> list[quota_admin.ClientQuotas]:
        """Return the quotas of the entities (users, client ids, addresses) that match the arguments.

        An argument that is None does not restrict the result. An empty name matches only the default entity, which has
        the quotas of all users, client ids or addresses without quotas of their own.
        """
        return quota_admin.describe_quotas(self._cluster, QuotaKey(user, client_id, ip))

    def _replicas(self) -> tuple[tuple[BrokerEndpoint, ...], dict[TopicPartition, tuple[int, ...]]]:
        """Return the live brokers, and the replicas of every partition.

        For a partition that moves, the target is returned in place of the replicas.
        """
        reply = self._metadata(None, schemas=False, internal=True)
        return reply.brokers, reassignment.replicas_of(reply, reassignment.list_moves(self._cluster))

    def _move(self, targets: Mapping[TopicPartition, tuple[int, ...]], throttle_bytes: int) -> Reassigned:
        timeout_ms = self._cluster.broker_timeout_ms()
        warning = reassignment.alter(self._cluster, targets, throttle_bytes=throttle_bytes, timeout_ms=timeout_ms)
        return Reassigned(dict(targets), warning)

    def _wait(self, what: str, problems: Callable[[MetadataReply], list[str]], timeout_s: float | None) -> None:
        def attempt() -> None:
            found = problems(self._metadata(None, schemas=False, internal=True))
            if found:
                more = f" and {len(found) - 3} more" if len(found) > 3 else ""
                raise BrokerError(ErrorCode.REPLICA_NOT_AVAILABLE, f"{'; '.join(found[:3])}{more}")

        self._cluster.retrying(what, attempt, timeout_s=timeout_s)

    def _metadata(
        self, topics: tuple[str, ...] | None, *, schemas: bool = True, internal: bool = False
    ) -> MetadataReply:
        def attempt() -> MetadataReply:
            reply = self._cluster.ask_metadata(Metadata(0, topics, schemas, internal))
            if schemas:
                self._cluster.metadata.update(reply)
            return reply

        return self._cluster.retrying("metadata", attempt)

    def _describe_broker(self, address: Any) -> BrokerDescription:
        if address.broker_id not in self._cluster.metadata.brokers:
            self._cluster.retrying("metadata", self._cluster.refresh)
        try:
            reply = self._cluster.ask_broker(address.broker_id, DescribeBroker(0), DescribeBrokerReply)
        except BrokerError as error:
            return BrokerDescription(address, error=str(error))
        return describe_broker(address, reply)
