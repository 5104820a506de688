"""A topic whose brokers are gone, made again out of its Delta table: every record at the offset it had.

The new topic is made in the state ``restoring``, in which brokers take records with offsets and refuse producers, and
names the table and its version. What is in the log is all that is remembered of how far the restore has come: whoever
runs it again goes on where each partition ends, and finds nothing to do where that is the table's end. When all
partitions hold what the table holds, which is read back and compared, the topic is opened for producers.

Not restored, because it is not in the table: groups' offsets, producers' ids and sequences, transactions, leader
epochs, and where one batch ended and the next began.
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
from sparklog.delta.archive_progress import read_seam
from sparklog.delta.archive_reader import Archive, open_archive
from sparklog.delta.compare import compare
from sparklog.delta.restore_batches import RestoreBatches
from sparklog.errors import BrokerError, ConfigError, ErrorCode
from sparklog.model import TopicPartition
from sparklog.record.codec import COMPRESSIONS, EncodedBatch

#: Settings that a restore gives a topic, and nobody else.
RESTORING, RESTORED_FROM = "restoring", "restored.from"
#: Bytes of one request, at most; less where brokers take smaller frames. A single batch may be larger.
_REQUEST_BYTES = 4 << 20
#: Times in a row that a log may turn out to end elsewhere without having grown: somebody else restores it, or leaders
#: change. More is no accident.
_MOST_SURPRISES = 50


class RestoredPartition(NamedTuple):
    """Offsets ``[start, end)`` of a partition hold what the table has of it. ``records``: those sent by this run."""

    partition: int
    start: int
    end: int
    records: int


@dataclass(frozen=True, slots=True)
class Restored:
    """What a restore has done. ``was_there``: an earlier run had finished, and nothing was changed."""

    topic: TopicDescription
    archive: Archive
    partitions: tuple[RestoredPartition, ...]
    was_there: bool
    #: records that were read back and compared; None: not asked for
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
    """Make topic ``name`` out of ``archive``, or go on where an earlier run for the same table was stopped: then with
    the table's version of that time.

    Args:
        partitions: at least as many as the archive has, which is the default.
        replication_factor: left out, what the topic had.
        config: settings that differ from those the topic had.
        compression: of the batches: none, lz4 or zstd.
        check: read back all that was restored and compare it with the table, before producers may write.
        timeout_s: the longest time without any progress.
        tell: is given a line at each step.

    Raises:
        ConfigError: an argument does not fit the archive.
        BrokerError: TOPIC_ALREADY_EXISTS when the topic is not a restore of this table; as ``Admin.create_topic``.
        RestoreDiffersError: what was read back is not what the table holds; producers are still refused.
        ClientTimeout: no progress; running it again goes on from there.
    """
    if compression not in {None, "none", *COMPRESSIONS}:
        raise ConfigError(f"compression {compression}: expected none, {', '.join(COMPRESSIONS)}")
    with Admin(bootstrap, timeout_s=timeout_s) as admin, BlockingCluster(bootstrap, timeout_s=timeout_s) as link:
        plan = _Plan(archive, partitions, replication_factor, dict(config or {}))
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


class _Plan(NamedTuple):
    archive: Archive
    partitions: int | None
    replication_factor: int | None
    config: dict[str, str]


def _made(admin: Admin, name: str, plan: _Plan) -> tuple[TopicDescription, Archive]:
    """The topic, made now or by an earlier run, and the archive at the version that it is made from."""
    archive, described = plan.archive, plan.archive.topic
    partitions = archive.partitions if plan.partitions is None else plan.partitions
    if partitions < archive.partitions:
        raise ConfigError(f"{partitions} partitions asked for, {archive.partitions} are in {archive.table}")
    if own := sorted({RESTORING, RESTORED_FROM} & plan.config.keys()):
        raise ConfigError(f"{own[0]} is set by the restore itself")
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
            f"topic {name!r} was {f'restored from {found}' if found else 'made by no restore'},"
            f" {archive.name} is to be restored: delete it, or restore to another name",
        )
    return topic, open_archive(archive.table, int(found.rpartition("@")[2]))


def _is_restoring(topic: TopicDescription) -> bool:
    return topic_config(topic.config).restoring


class _Run:
    """One restore at work."""

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
        """Bring one partition to where its log ended."""
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
                    ErrorCode.OFFSET_OUT_OF_RANGE, f"{tp}: the log ends at {at}, {expected} to {end} expected"
                )
        self._tell(f"{tp}: offsets {first} to {end}, {records} records sent from offset {began_at} on")
        return RestoredPartition(partition, first, end, records)

    def _requests(self, partition: int, at: int, first: int) -> Iterator[list[EncodedBatch]]:
        """All that a partition lacks from offset ``at`` on, a request at a time."""
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
        """What lies below the first record was gone before the archive looked."""
        starts = {TopicPartition(self._topic.name, found.partition): found.start for found in done if found.start}
        if starts:
            self._admin.delete_records(starts)

    def check_ends(self, done: Sequence[RestoredPartition]) -> None:
        """Raises BrokerError OFFSET_OUT_OF_RANGE: a partition does not begin and end, committed, where it should."""
        by_partition = {TopicPartition(self._topic.name, found.partition): found for found in done}
        starts = self._admin.list_offsets(list(by_partition), at="earliest")
        ends = self._admin.list_offsets(list(by_partition), at="latest")
        for tp, found in by_partition.items():
            if (starts[tp], ends[tp]) != (found.start, found.end):
                detail = f"{tp}: offsets {starts[tp]} to {ends[tp]} found, {found.start} to {found.end} expected"
                raise BrokerError(ErrorCode.OFFSET_OUT_OF_RANGE, detail)

    def check_table(self) -> None:
        """Raises ConfigError when the archive has gone on meanwhile: what it added would get its offsets twice."""
        said = read_seam(self._archive.table)
        if said is not None and said.seam.batch > self._archive.seam.batch >= 0:
            raise ConfigError(
                f"{self._archive.table} has got records since version {self._archive.version}, which"
                f" {self._topic.name} was restored from: delete the topic and restore it again"
            )

    def found_there(self) -> tuple[RestoredPartition, ...]:
        """Where partitions begin and end that an earlier run has restored. Nothing is changed.

        Raises:
            BrokerError: OFFSET_OUT_OF_RANGE when one has lost what it had.
        """
        wanted = self._topic.topic_partitions()
        starts = self._admin.list_offsets(wanted, at="earliest")
        ends = self._admin.list_offsets(wanted, at="latest", isolation="read_uncommitted")
        for tp in wanted:
            if ends[tp] < (end := self._archive.end(tp.partition)):
                raise BrokerError(
                    ErrorCode.OFFSET_OUT_OF_RANGE, f"{tp}: was restored up to offset {end}, ends at {ends[tp]} now"
                )
        return tuple(RestoredPartition(tp.partition, starts[tp], ends[tp], 0) for tp in wanted)


def _grouped(batches: Iterable[EncodedBatch], limit: int) -> Iterator[list[EncodedBatch]]:
    """In order, as many as take ``limit`` bytes, and at least one."""
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
