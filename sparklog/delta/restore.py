"""The restore of a deleted topic from its Delta table, with every record at its original offset.

The new topic is created in the state ``restoring``, in which brokers accept records with offsets and refuse producers.
A setting of the topic names the table and its version. The logs themselves show the progress of the restore: a later
run continues at the end of each log. A partition whose log ends where the table ends is complete. The restored records
are read back and compared with the table. Then the topic is opened for producers.

Data outside the table is not restored: groups' offsets, producers' ids and sequences, transactions, leader epochs, and
the boundaries of batches.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from sparklog.client.admin.admin import Admin
from sparklog.client.admin.descriptions import TopicDescription
from sparklog.client.cluster.blocking_cluster import BlockingCluster
from sparklog.client.producer.restore_produce import restore_batches
from sparklog.config import topic_config
from sparklog.delta.archive_progress import read_progress
from sparklog.delta.archive_reader import Archive, open_archive
from sparklog.delta.compare import compare
from sparklog.delta.restore_batches import RestoreBatches
from sparklog.errors import BrokerError, ConfigError, ErrorCode
from sparklog.model import TopicPartition
from sparklog.record.codec import COMPRESSIONS, EncodedBatch

#: The topic settings that only a restore sets.
RESTORING, RESTORED_FROM = "restoring", "restored.from"
#: The maximum bytes of one request. It is lower if brokers accept only smaller frames. A single batch may be larger.
_REQUEST_BYTES = 4 << 20
#: The maximum number of consecutive requests after which a log ends at an unexpected offset, because of a concurrent
#: restore or a change of the leader.
_MOST_SURPRISES = 50


class RestoredPartition(NamedTuple):
    """The result of restoring one partition: the restored offsets ``[start, end)``, and the number of records.

    ``records`` counts only the records that this run sent.
    """

    partition: int
    start: int
    end: int
    records: int


@dataclass(frozen=True, slots=True)
class Restored:
    """The result of a restore.

    ``was_there`` is true if an earlier call had completed the restore, so that this call changed nothing.
    """

    topic: TopicDescription
    archive: Archive
    partitions: tuple[RestoredPartition, ...]
    was_there: bool
    #: The number of records that were read back and compared, or None if that was not requested.
    compared: int | None

    @property
    def records(self) -> int:
        return sum(found.records for found in self.partitions)


def restore_topic(
    bootstrap: str,
    name: str,
    archive: Archive,
    *,
    partitions: int | None = None,
    replication_factor: int | None = None,
    config: Mapping[str, str] | None = None,
    compression: str | None = None,
    check: bool = True,
    timeout_s: float = 60.0,
    tell: Callable[[str], None] = lambda line: None,
) -> Restored:
    """Recreate topic ``name`` from ``archive``, or continue an earlier restore from the same table.

    An earlier restore continues with the table version with which it began.

    Args:
        partitions: the number of partitions. The default, and the minimum, is the number of the archived topic.
        replication_factor: the default is the factor of the archived topic.
        config: settings that override the settings of the archived topic.
        compression: the compression of the batches: none, lz4 or zstd.
        check: read back all restored records and compare them with the table, before producers can write.
        timeout_s: maximum time without progress.
        tell: a function that is called with a line of text at each step.

    Raises:
        ConfigError: an argument does not match the archive.
        BrokerError: TOPIC_ALREADY_EXISTS if the topic exists and is not a restore of this table; the errors of
            ``Admin.create_topic``.
        RestoreDiffersError: the restored records differ from the table. The topic still refuses producers.
        ClientTimeout: the restore made no progress for ``timeout_s``. Call this function again to continue.
    """
    if compression not in {None, "none", *COMPRESSIONS}:
        raise ConfigError(f"compression {compression}: expected none, {', '.join(COMPRESSIONS)}")
    with Admin(bootstrap, timeout_s=timeout_s) as admin, BlockingCluster(bootstrap, timeout_s=timeout_s) as link:
        plan = _RestorePlan(archive, partitions, replication_factor, dict(config or {}))
        topic, archive = _made(admin, name, plan)
        run = _Run(admin, link, topic, archive, compression=compression, timeout_s=timeout_s, tell=tell)
        if not _is_restoring(topic):
            return Restored(topic, archive, run.found_there(), was_there=True, compared=None)
        done = tuple(run.partition(partition) for partition in range(len(topic.partitions)))
        run.begin_where_they_began(done)
        compared = sum(compare(link, topic, archive, found.partition) for found in done) if check else None
        run.check_ends(done)
        run.check_table()
        return Restored(admin.alter_topic(name, unset=[RESTORING]), archive, done, was_there=False, compared=compared)


class _RestorePlan(NamedTuple):
    archive: Archive
    partitions: int | None
    replication_factor: int | None
    config: dict[str, str]


def _made(admin: Admin, name: str, plan: _RestorePlan) -> tuple[TopicDescription, Archive]:
    """Create the topic, or find that of an earlier run; return it with the archive at the version to restore."""
    archive, described = plan.archive, plan.archive.topic
    partitions = archive.partitions if plan.partitions is None else plan.partitions
    if partitions < archive.partitions:
        raise ConfigError(f"{partitions} partitions requested, but {archive.table} has {archive.partitions}")
    if own := sorted({RESTORING, RESTORED_FROM} & plan.config.keys()):
        raise ConfigError(f"{own[0]} cannot be set: the restore sets it")
    try:
        topic = admin.create_topic(
            name,
            partitions=partitions,
            replication_factor=plan.replication_factor or described.replication_factor or None,
            schema=None if described.is_default else described.columns,
            key=None if described.is_default else described.key_columns,
            event_time=None if described.is_default else described.event_time,
            config=described.config | plan.config | {RESTORING: "true", RESTORED_FROM: archive.name},
        )
    except BrokerError as error:
        if error.code != ErrorCode.TOPIC_ALREADY_EXISTS:
            raise
        topic = admin.describe_topic(name)
    found = topic.config.get(RESTORED_FROM, "")
    if found == archive.name:
        return topic, archive
    if f"/{archive.table_id}@" not in found:
        raise BrokerError(
            ErrorCode.TOPIC_ALREADY_EXISTS,
            f"topic {name!r} was {f'restored from {found}' if found else 'not created by a restore'},"
            f" but {archive.name} is to be restored: delete the topic, or restore to another name",
        )
    return topic, open_archive(archive.table, int(found.rpartition("@")[2]))


def _is_restoring(topic: TopicDescription) -> bool:
    return topic_config(topic.config).restoring


class _Run:
    """One run of a restore."""

    def __init__(
        self,
        admin: Admin,
        link: BlockingCluster,
        topic: TopicDescription,
        archive: Archive,
        *,
        compression: str | None,
        timeout_s: float,
        tell: Callable[[str], None],
    ) -> None:
        settings = topic_config(topic.config)
        self._admin = admin
        self._link = link
        self._topic = topic
        self._archive = archive
        self._timeout_s = timeout_s
        self._tell = tell
        self._placing = RestoreBatches(
            topic.schema,
            topic.schema_id,
            None if settings.timestamp_type == "LogAppendTime" else topic.event_time,
            settings.max_message_bytes,
            compression,
        )

    def partition(self, partition: int) -> RestoredPartition:
        """Restore one partition up to the archived end of its log."""
        tp = TopicPartition(self._topic.name, partition)
        first, end = self._archive.first_offset(partition), self._archive.end(partition)
        at = began_at = self._admin.list_offsets([tp], isolation="read_uncommitted")[tp]
        records = surprises = 0
        while at < end:
            expected = at
            for batches in self._requests(partition, at, first):
                expected = batches[-1].header.next_offset
                at = restore_batches(self._link, tp, self._topic.topic_id, batches, timeout_s=self._timeout_s)
                if at != expected:
                    break
                surprises = 0
                records += sum(batch.header.record_count for batch in batches)
            surprises += at != expected
            if at > end or surprises > _MOST_SURPRISES:
                raise BrokerError(
                    ErrorCode.OFFSET_OUT_OF_RANGE, f"{tp}: the log ends at {at}, expected {expected} to {end}"
                )
        self._tell(f"{tp}: offsets {first} to {end}, sent {records} records from offset {began_at} on")
        return RestoredPartition(partition, first, end, records)

    def _requests(self, partition: int, at: int, first: int) -> Iterator[list[EncodedBatch]]:
        """Yield the batches of a partition from offset ``at`` on, in groups that fit into one request."""
        batches = self._batches(partition, at, first)
        limit = min(_REQUEST_BYTES, self._link.any_connection().hello.max_frame_bytes // 2)
        return _grouped(batches, limit)

    def _batches(self, partition: int, at: int, first: int) -> Iterator[EncodedBatch]:
        if at < first:
            yield from self._placing.nothing(at, first)
            at = first
        for rows in self._archive.rows(partition, at):
            yield from self._placing.batches(rows, at)
            at = int(rows.offsets[-1]) + 1
        yield from self._placing.nothing(at, self._archive.end(partition))

    def begin_where_they_began(self, done: Sequence[RestoredPartition]) -> None:
        """Set the log start offsets to the first records, because earlier records were never archived."""
        starts = {TopicPartition(self._topic.name, found.partition): found.start for found in done if found.start}
        if starts:
            self._admin.delete_records(starts)

    def check_ends(self, done: Sequence[RestoredPartition]) -> None:
        """Raise BrokerError OFFSET_OUT_OF_RANGE if the committed records of a partition have the wrong start or end."""
        by_partition = {TopicPartition(self._topic.name, found.partition): found for found in done}
        starts = self._admin.list_offsets(list(by_partition), at="earliest")
        ends = self._admin.list_offsets(list(by_partition), at="latest")
        for tp, found in by_partition.items():
            if (starts[tp], ends[tp]) != (found.start, found.end):
                detail = f"{tp}: expected offsets {found.start} to {found.end}, found {starts[tp]} to {ends[tp]}"
                raise BrokerError(ErrorCode.OFFSET_OUT_OF_RANGE, detail)

    def check_table(self) -> None:
        """Raise ConfigError if the archive has new rows. New records would get the same offsets."""
        said = read_progress(self._archive.table)
        if said is not None and said.progress.batch > self._archive.progress.batch >= 0:
            raise ConfigError(
                f"{self._archive.table} has new records since version {self._archive.version}, which"
                f" {self._topic.name} was restored from: delete the topic and restore it again"
            )

    def found_there(self) -> tuple[RestoredPartition, ...]:
        """Return the ranges that an earlier run has restored. This changes nothing.

        Raises:
            BrokerError: OFFSET_OUT_OF_RANGE if a partition has lost records.
        """
        wanted = self._topic.topic_partitions()
        starts = self._admin.list_offsets(wanted, at="earliest")
        ends = self._admin.list_offsets(wanted, at="latest", isolation="read_uncommitted")
        for tp in wanted:
            if ends[tp] < (end := self._archive.end(tp.partition)):
                raise BrokerError(
                    ErrorCode.OFFSET_OUT_OF_RANGE, f"{tp}: was restored up to offset {end}, but now ends at {ends[tp]}"
                )
        return tuple(RestoredPartition(tp.partition, starts[tp], ends[tp], 0) for tp in wanted)


def _grouped(batches: Iterable[EncodedBatch], limit: int) -> Iterator[list[EncodedBatch]]:
    """Group batches in order. A group has at most ``limit`` bytes, but at least one batch."""
    group: list[EncodedBatch] = []
    size = 0
    for batch in batches:
        if group and size + batch.header.stored_bytes > limit:
            yield group
            group, size = [], 0
        group.append(batch)
        size += batch.header.stored_bytes
    if group:
        yield group
