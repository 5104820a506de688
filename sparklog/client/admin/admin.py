"""Topics, brokers and offsets of a cluster: asking about them and changing them.

Every call is retried while the error says that this may help, and ends with a typed error within its time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from types import TracebackType
from typing import Any

import pyarrow as pa

from sparklog.client.admin import groups, reassignment, rolling_restart, set_aside, topics, transactions
from sparklog.client.admin.delete_records import delete_records
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
from sparklog.client.cluster import forks
from sparklog.client.cluster.blocking_cluster import BlockingCluster
from sparklog.client.cluster.isolation_level import Isolation, wire_isolation
from sparklog.client.cluster.offsets import OffsetQuery, checked_offset, list_offsets
from sparklog.errors import BrokerError, ErrorCode
from sparklog.model import BrokerEndpoint, TopicPartition
from sparklog.protocol.messages import (
    DescribeBroker,
    DescribeBrokerReply,
    GroupOffset,
    Metadata,
    MetadataReply,
)


class Admin:
    """A client for administration. Use from one thread at a time; close it, or use it in a ``with`` block.

    Every call raises ClientTimeout when it is not done in its time; the ones below say where that leaves the cluster.

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
    ) -> None:
        """``timeout_s`` bounds every call, retries included. Nothing is connected before the first call.
        ``first_contact_s``: give up after this when no broker has ever answered; None: no sooner than any call.
        """
        self._link = BlockingCluster(
            bootstrap, client_id=client_id, timeout_s=timeout_s, first_contact_s=first_contact_s
        )
        self._timeout_s = timeout_s
        forks.watch(self)

    def close(self) -> None:
        """End the connections. Does nothing in a forked child."""
        self._link.close()

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
            partitions: left out, the brokers' ``num.partitions``.
            replication_factor: left out, the brokers' ``default.replication.factor``.
            schema: a pyarrow schema, a Spark ``StructType``, or text like ``"carrier string, delay double"``.
                sparklog reads the text itself; of the three only a ``StructType`` needs Spark. Left out: Kafka's
                columns key, value, headers, timestamp.
            key: column or columns that decide the partition of a typed topic's records.
            event_time: timestamp column that time queries go by.
            config: topic settings by their Kafka names; values are written as text.

        Raises:
            BrokerError: TOPIC_ALREADY_EXISTS, INVALID_TOPIC_EXCEPTION, INVALID_PARTITIONS,
                INVALID_REPLICATION_FACTOR, INVALID_CONFIG, SCHEMA_MISMATCH.
            ConfigError: ``schema`` is text that is not understood.
            ClientTimeout: not done in time; the topic may come into being later.
        """
        warning = topics.create_topic(
            self._link,
            name,
            partitions=partitions,
            replication_factor=replication_factor,
            schema=schema,
            key=key,
            event_time=event_time,
            config=config,
            timeout_s=self._timeout_s if timeout_s is None else timeout_s,
        )
        return describe_topic(self._link.topic(name, refresh=True), warning=warning)

    def delete_topic(self, name: str, *, timeout_s: float | None = None) -> None:
        """Delete a topic and its records.

        Raises:
            BrokerError: UNKNOWN_TOPIC_OR_PARTITION.
            ClientTimeout: not done in time; it may be deleted later.
        """
        topics.delete_topic(self._link, name, timeout_s=self._timeout_s if timeout_s is None else timeout_s)

    def create_partitions(
        self,
        name: str,
        partitions: int,
        *,
        assignment: Sequence[Sequence[int]] = (),
        timeout_s: float | None = None,
    ) -> TopicDescription:
        """Give a topic more partitions, ``partitions`` in all, and wait until the new ones have leaders. From then on
        a key may go to another partition than before.

        Args:
            assignment: brokers of each added partition, preferred leader first; left out, placed evenly.

        Raises:
            BrokerError: UNKNOWN_TOPIC_OR_PARTITION, INVALID_PARTITIONS when that is not more than there are,
                INVALID_REPLICA_ASSIGNMENT, INVALID_REPLICATION_FACTOR when too few brokers are alive.
            ClientTimeout: not done in time; they may come into being later.
        """
        timeout_s = self._timeout_s if timeout_s is None else timeout_s
        warning = topics.create_partitions(self._link, name, partitions, assignment=assignment, timeout_s=timeout_s)
        return describe_topic(self._link.topic(name, refresh=True), warning=warning)

    def add_columns(
        self, name: str, columns: pa.Schema | str | Any, *, timeout_s: float | None = None
    ) -> TopicDescription:
        """Give a typed topic more columns, behind its own; all of them have to be nullable, and older rows read as
        null in them. Columns that it has already, with the same type, are left as they are.

        Returns when every broker that answers knows of them.

        Raises:
            BrokerError: UNKNOWN_TOPIC_OR_PARTITION; SCHEMA_MISMATCH for another type or a column that is not nullable;
                INVALID_REQUEST for a topic with Kafka's columns.
            ClientTimeout: not done in time; they may have been added.
        """
        timeout_s = self._timeout_s if timeout_s is None else timeout_s
        return describe_topic(topics.add_columns(self._link, name, columns, timeout_s=timeout_s))

    def alter_topic(
        self,
        name: str,
        config: Mapping[str, Any] | None = None,
        *,
        unset: Iterable[str] = (),
        timeout_s: float | None = None,
    ) -> TopicDescription:
        """Set settings of a topic that is there, and take others (``unset``) back to the cluster's defaults; those that
        are not named stay. In force at once, without a restart; all of them or none.

        Raises:
            BrokerError: UNKNOWN_TOPIC_OR_PARTITION; INVALID_CONFIG names the setting and the range allowed.
            ClientTimeout: not done in time; they may have been set.
        """
        timeout_s = self._timeout_s if timeout_s is None else timeout_s
        topics.alter_topic(self._link, name, config or {}, unset=unset, timeout_s=timeout_s)
        return describe_topic(self._link.topic(name, refresh=True))

    def delete_records(
        self, before: Mapping[TopicPartition, int | None], *, timeout_s: float | None = None
    ) -> dict[TopicPartition, int]:
        """Let partitions begin at an offset (None: at their end): what lies before is gone. Returns where they begin.

        Raises:
            BrokerError: OFFSET_OUT_OF_RANGE above the high watermark; INVALID_REQUEST for a topic whose cleanup.policy
                is compact alone; UNKNOWN_TOPIC_OR_PARTITION. Other partitions may have been shortened.
            ClientTimeout: some leader did not answer in time.
        """
        wanted = {TopicPartition(*tp): offset for tp, offset in before.items()}
        return delete_records(self._link, wanted, timeout_s=self._timeout_s if timeout_s is None else timeout_s)

    def list_topics(self) -> list[str]:
        """The names of all topics, in order."""
        return sorted(topic.name for topic in self._metadata(None, schemas=False).topics if not topic.code)

    def describe_topic(self, name: str) -> TopicDescription:
        """Raises BrokerError: UNKNOWN_TOPIC_OR_PARTITION, INVALID_TOPIC_EXCEPTION."""
        return describe_topic(self._link.topic(name, refresh=True))

    def describe_topics(self, names: Iterable[str] | None = None, *, internal: bool = False) -> list[TopicDescription]:
        """The topics named, in that order; without names all there are, with ``internal`` the log's own as well. Raises
        as ``describe_topic``."""
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
        """Let partitions move to other brokers; returns when the moves are taken and the broker asked has heard of them
        from the controller, if there is one. See ``reassignments`` and ``wait_until_moved``.

        Args:
            what: the brokers wanted for each partition, preferred leader first; or a topic's name, with
                ``replication_factor``: replicas stay where they are as far as that allows.
            throttle_bytes: bytes per second each broker copies at most; 0: no limit. Naming a partition's target again
                changes the limit of its move.

        Raises:
            BrokerError: of the first partition refused, UNKNOWN_TOPIC_OR_PARTITION, INVALID_REPLICA_ASSIGNMENT or
                INVALID_REPLICATION_FACTOR; the other partitions move.
        """
        if isinstance(what, str):
            if replication_factor is None:
                raise TypeError(f"reassign({what!r}): a topic's name needs replication_factor")
            targets = self.plan_replication_factor(what, replication_factor)
        elif replication_factor is not None:
            raise TypeError("reassign: replication_factor goes with a topic's name, not with targets")
        else:
            targets = {TopicPartition(*tp): tuple(brokers) for tp, brokers in what.items()}
        return self._move(targets, throttle_bytes)

    def plan_replication_factor(self, topic: str, replication_factor: int) -> dict[TopicPartition, tuple[int, ...]]:
        """Brokers that give each partition so many replicas, for ``reassign``; partitions that have them are left out.

        Raises:
            BrokerError: UNKNOWN_TOPIC_OR_PARTITION, INVALID_REPLICATION_FACTOR.
        """
        brokers, replicas = self._replicas()
        return reassignment.with_factor(brokers, replicas, topic, replication_factor)

    def drain_broker(self, broker_id: int, *, throttle_bytes: int = 0) -> Reassigned:
        """Let everything that ``broker_id`` holds move to the other brokers; it need not be alive.

        New topics and partitions may still be placed on it: it is empty when, asked again, there are no ``targets``.

        Raises:
            BrokerError: INVALID_REPLICATION_FACTOR when the others are too few; nothing moves then.
        """
        brokers, replicas = self._replicas()
        known = {broker.broker_id for broker in brokers}.union(*replicas.values())
        if broker_id not in known:
            raise BrokerError(ErrorCode.BROKER_NOT_AVAILABLE, f"broker {broker_id} found; known are {sorted(known)}")
        return self._move(reassignment.draining(brokers, replicas, broker_id), throttle_bytes)

    def cancel_reassignment(
        self, partitions: Iterable[TopicPartition] = (), *, may_have_ended: Iterable[TopicPartition] = ()
    ) -> list[TopicPartition]:
        """Take moves back: the partitions go to the brokers they were on. Returns those that do; where an answer was
        lost also those that had ended just before.

        Of those that ``may_have_ended``, as they were only found under way, what is not any more is passed over.

        Raises:
            BrokerError: NO_REASSIGNMENT_IN_PROGRESS, UNKNOWN_TOPIC_OR_PARTITION; the others are taken back.
        """
        named = dict.fromkeys(TopicPartition(*tp) for tp in partitions)
        found = dict.fromkeys(TopicPartition(*tp) for tp in may_have_ended)
        return reassignment.take_back(
            self._link,
            named,
            may_have_ended=[tp for tp in found if tp not in named],
            timeout_ms=self._link.broker_timeout_ms(),
        )

    def reassignments(self) -> list[MoveDescription]:
        """Moves under way, and how far each has come."""
        return reassignment.under_way(self._link, self.describe_brokers())

    def wait_until_moved(
        self, targets: Mapping[TopicPartition, Sequence[int]], *, timeout_s: float | None = None
    ) -> None:
        """Wait until each partition is on its target, and only there, and in sync.

        Raises:
            ClientTimeout: names partitions that are not.
        """
        self._wait("moves", lambda reply: reassignment.not_on_target(reply, targets), timeout_s)

    def elect_leaders(
        self, partitions: Iterable[TopicPartition] | None = None, *, unclean: bool = False
    ) -> dict[TopicPartition, BrokerError]:
        """Let partitions (left out: all) be led by their preferred leaders, the first of their replicas.

        What is preferred goes by what the broker asked has been told: after a ``reassign`` of this client the new order
        counts, after one of another client, or without a controller, perhaps a moment later.

        ``unclean``: where no member of the in-sync set is alive, by any replica that is. That loses records.

        Returns the partitions that have not got the leader they should have, with the reason.
        """
        return reassignment.elect(self._link, partitions, unclean=unclean, timeout_ms=self._link.broker_timeout_ms())

    def wait_until_in_sync(self, topics: Iterable[str] | None = None, *, timeout_s: float | None = None) -> None:
        """Wait until every partition (of ``topics``) has a leader and all replicas in sync.

        Raises:
            ClientTimeout: names partitions that have not.
        """
        wanted = None if topics is None else set(topics)
        self._wait("replicas in sync", lambda reply: reassignment.not_in_sync(reply, wanted), timeout_s)

    # --- logs that no topic claims ---

    def set_aside_logs(self) -> list[SetAsideDescription]:
        """Return the logs that live brokers keep without serving them. Brokers of 0.1.0 are not asked.

        Raises:
            BrokerError: a broker did not answer.
        """
        return set_aside.set_aside_logs(self._link)

    def restore_set_aside(self, topic_id: str, *, timeout_s: float | None = None) -> RestoredTopic:
        """Make the topic of this id again out of set-aside logs, and wait until its partitions have leaders.

        Raises:
            BrokerError: UNKNOWN_TOPIC_ID when no broker has such a log; TOPIC_ALREADY_EXISTS when a topic has the
                name; REQUEST_TIMED_OUT when the topic is there and partitions have no leader yet.
        """
        return set_aside.restore_set_aside(
            self._link, topic_id, timeout_s=self._timeout_s if timeout_s is None else timeout_s
        )

    def remove_set_aside(self, broker_id: int, names: Iterable[str]) -> None:
        """Delete set-aside logs of one broker for good. Names that are not there are fine.

        Raises:
            BrokerError: BROKER_NOT_AVAILABLE, UNSUPPORTED_VERSION.
        """
        set_aside.remove_set_aside(self._link, broker_id, names)

    # --- the cluster ---

    def restart_broker(self, broker_id: int) -> None:
        """Let a broker stop in an orderly way and be started again by its supervisor. Does not wait for it.

        Raises:
            BrokerError: BROKER_NOT_AVAILABLE, BROKER_STOPPING; INVALID_REQUEST when nobody supervises it.
        """
        rolling_restart.restart(self._link, broker_id)

    def rolling_restart(
        self,
        brokers: Sequence[int] | None = None,
        *,
        timeout_s: float = 120.0,
        tell: Callable[[str], None] = lambda line: None,
    ) -> list[int]:
        """Restart brokers (left out: all) one after the other, each when all replicas are in sync. ``timeout_s``
        bounds each wait; ``tell`` is given a line at each step. Returns the brokers restarted.

        Raises:
            BrokerError: as ``restart_broker``.
            ClientTimeout: a broker did not come back, or the cluster was not whole: says what is in the way.
        """
        return rolling_restart.roll(self._link, brokers, timeout_s=timeout_s, tell=tell)

    def describe_cluster(self) -> ClusterDescription:
        """The cluster's id and its live brokers."""
        return describe_cluster(self._metadata((), schemas=False))

    def describe_brokers(self) -> list[BrokerDescription]:
        """What every live broker says about itself; one that does not answer is listed with its error."""
        return [self._describe_broker(address) for address in self.describe_cluster().brokers]

    def list_offsets(
        self,
        queries: Mapping[TopicPartition, OffsetQuery] | Iterable[TopicPartition],
        *,
        at: OffsetQuery = "latest",
        isolation: Isolation = "read_committed",
        known: Mapping[TopicPartition, int] | None = None,
    ) -> dict[TopicPartition, int]:
        """Offsets of partitions: ``"earliest"``, ``"latest"`` (the next offset a consumer will see), or a time
        (a datetime, which is UTC without a time zone, or microseconds since the epoch): the first record at or after
        it lies at or after the offset; where there is none, the latest.

        ``queries`` names a question for each partition, or only partitions, which are then all asked ``at``. Under
        ``isolation="read_committed"`` a partition ends where its first open transaction begins. ``known``: ends that
        logs are believed to have reached, as from an earlier call. A leader that says less is believed when the other
        brokers confirm that it leads.
        """
        asked = dict(queries) if isinstance(queries, Mapping) else dict.fromkeys(queries, at)
        by_partition = {TopicPartition(*tp): query for tp, query in asked.items()}
        return list_offsets(self._link, by_partition, isolation=wire_isolation(isolation), known=known)

    # --- consumer groups ---

    def commit_offsets(
        self, group: str, offsets: Mapping[TopicPartition, int], *, topic_ids: Mapping[str, str] | None = None
    ) -> None:
        """Set the offsets of the next records to read of a group in these partitions; its others stay. No records are
        looked at. ``topic_ids``: of topics that may have been deleted and made again since, whose offsets these are;
        others are taken for those that are there now.

        Raises:
            BrokerError: NON_EMPTY_GROUP while the group has members, who commit themselves; of the first partition
                refused, UNKNOWN_TOPIC_OR_PARTITION: the others are set.
            TypeError, ValueError: an offset that is none, as for ``Consumer.seek``; nothing is set.
        """
        known = topic_ids or {}
        checked = {TopicPartition(*tp): checked_offset(TopicPartition(*tp), at) for tp, at in offsets.items()}
        entries = [GroupOffset(topic, part, offset, known.get(topic, "")) for (topic, part), offset in checked.items()]
        groups.commit_offsets(self._link, group, entries, timeout_s=self._timeout_s)

    def group_offsets(self, group: str) -> dict[TopicPartition, int]:
        """The offset of the next record to read, by partition; none for a group that nobody has written to."""
        found = groups.group_offsets(self._link, group, timeout_s=self._timeout_s)
        return {TopicPartition(entry.topic, entry.partition): entry.offset for entry in found}

    def list_groups(self) -> list[str]:
        """The names of all groups that have offsets or members, in order."""
        return [found.group for found in self.group_listings()]

    def group_listings(self) -> list[groups.GroupListing]:
        """As ``list_groups``, with what they are doing and how many members they have."""
        return groups.list_groups(self._link)

    def describe_group(self, group: str) -> groups.GroupDescription | None:
        """Who is in a group and has which partitions; None when there is no such group."""
        return groups.describe_group(self._link, group)

    def delete_group(self, group: str) -> None:
        """Forget a group without members, and its offsets.

        Raises:
            BrokerError: NON_EMPTY_GROUP, GROUP_ID_NOT_FOUND.
        """
        groups.delete_group(self._link, group)

    # --- transactions ---

    def transactions(self) -> list[TransactionDescription]:
        """What is open or being ended in the cluster, and the keys that coordinators remember, by key.

        Raises:
            ClientTimeout: a broker did not answer, or one is still reading its state.
        """
        return transactions.list_transactions(self._link)

    def abort_transaction(self, key: str) -> None:
        """End an open transaction in place of who began it, which is fenced. Keys are as ``transactions`` gives them:
        ``id:`` and the transactional id of a producer.

        Raises:
            BrokerError: INVALID_TXN_STATE when nothing is open, or it is decided already.
            ClientTimeout: its coordinator did not answer; it may have been aborted.
        """
        transactions.abort_transaction(self._link, key)

    def hanging_transactions(self, *, open_s: float = 900.0) -> list[HangingTransaction]:
        """What is open in partitions for ``open_s`` or longer and no coordinator knows: it holds up readers, and nobody
        but ``abort_hanging``, or the brokers after ``transaction.hanging.after.ms``, will end it.

        Raises:
            ClientTimeout: a broker did not answer, or not every coordinator could be asked.
        """
        return transactions.find_hanging(self._link, open_s=open_s)

    def abort_hanging(self, partition: TopicPartition, producer_id: int) -> None:
        """End what a producer id has open in one partition: what it wrote there is never seen.

        Raises:
            BrokerError: INVALID_TXN_STATE when nothing is open, or a coordinator knows it: abort it by its key.
            ClientTimeout: the leader did not answer; it may have been ended.
        """
        transactions.abort_hanging(self._link, TopicPartition(*partition), producer_id)

    def _replicas(self) -> tuple[tuple[BrokerEndpoint, ...], dict[TopicPartition, tuple[int, ...]]]:
        """The live brokers, and where every partition is or is going."""
        reply = self._metadata(None, schemas=False, internal=True)
        return reply.brokers, reassignment.replicas_of(reply, reassignment.under_way(self._link))

    def _move(self, targets: Mapping[TopicPartition, tuple[int, ...]], throttle_bytes: int) -> Reassigned:
        timeout_ms = self._link.broker_timeout_ms()
        warning = reassignment.alter(self._link, targets, throttle_bytes=throttle_bytes, timeout_ms=timeout_ms)
        return Reassigned(dict(targets), warning)

    def _wait(self, what: str, problems: Callable[[MetadataReply], list[str]], timeout_s: float | None) -> None:
        def attempt() -> None:
            found = problems(self._metadata(None, schemas=False, internal=True))
            if found:
                more = f" and {len(found) - 3} more" if len(found) > 3 else ""
                raise BrokerError(ErrorCode.REPLICA_NOT_AVAILABLE, f"{'; '.join(found[:3])}{more}")

        self._link.retrying(what, attempt, timeout_s=timeout_s)

    def _metadata(
        self, topics: tuple[str, ...] | None, *, schemas: bool = True, internal: bool = False
    ) -> MetadataReply:
        def attempt() -> MetadataReply:
            reply = self._link.ask_metadata(Metadata(0, topics, schemas, internal))
            if schemas:
                self._link.metadata.update(reply)
            return reply

        return self._link.retrying("metadata", attempt)

    def _describe_broker(self, address: Any) -> BrokerDescription:
        if address.broker_id not in self._link.metadata.brokers:
            self._link.retrying("metadata", self._link.refresh)
        try:
            reply = self._link.ask_broker(address.broker_id, DescribeBroker(0), DescribeBrokerReply)
        except BrokerError as error:
            return BrokerDescription(address, error=str(error))
        return describe_broker(address, reply)
