"""The list and the deletion of set-aside logs, which this broker keeps without serving them.

The broker deletes a set-aside log in two cases. First: ZooKeeper lists the topic id as deleted. Second: the log was set
aside more than ``log.set.aside.retention.ms`` ago, and the partition's leader confirms that its own log has all records
of the set-aside log. The broker checks this whenever a log is set aside, and at the interval of retention checks. In
every other case the log may be the last copy, and an operator decides.
"""

from __future__ import annotations

import asyncio
import logging
import time
from contextlib import suppress

import msgspec

from sparklog.broker.context import BrokerContext
from sparklog.broker.inter_broker_client import InterBrokerClient
from sparklog.broker.lifecycle.zk_registration import ZkRegistration
from sparklog.errors import BrokerError, ClusterError, ErrorCode, SparklogError
from sparklog.model import NO_LEADER, LogCopy, TopicPartition
from sparklog.protocol.messages import (
    CONSUMER,
    Fetch,
    FetchedPartition,
    FetchPartition,
    FetchReply,
    Reply,
    Request,
    SetAsideLog,
)
from sparklog.storage.log_directory import LogDirectory
from sparklog.storage.set_aside import SetAsideEntry

_log = logging.getLogger(__name__)

_ANSWER_TIMEOUT_S = 5.0


class SetAsideLogs:
    """The component that lists, checks and deletes the set-aside logs of one broker.

    Not thread-safe: use it on the broker's event loop. ``start`` begins the checks, and ``close`` closes the
    connections to other brokers.
    """

    def __init__(self, context: BrokerContext, directory: LogDirectory, registry: ZkRegistration) -> None:
        self._context = context
        self._registry = registry
        self._directory = directory
        self._peers = InterBrokerClient(context, "set-aside logs")
        self._wanted = asyncio.Event()

    def start(self) -> None:
        self._wanted.set()
        self._context.spawn(self._repeat(), "set-aside logs")

    def check_soon(self) -> None:
        """Check all set-aside logs soon, because another log was set aside."""
        self._wanted.set()

    def close(self) -> None:
        self._peers.close()

    async def listed(self, *, details: bool) -> tuple[list[SetAsideLog], bytes]:
        """Return the set-aside logs and this broker's notes on their topics (JSON, empty without ``details``)."""
        return await asyncio.get_running_loop().run_in_executor(None, self._listed, details)

    def _listed(self, details: bool) -> tuple[list[SetAsideLog], bytes]:
        entries = self._directory.kept_aside.entries()
        logs = [self._described(entry, details) for entry in entries]
        if not details:
            return logs, b""
        kept = {entry.mark.topic_id for entry in entries}
        notes = [note for topic_id, note in self._directory.topic_notes().items() if topic_id in kept]
        return logs, msgspec.json.encode(notes)

    def _described(self, entry: SetAsideEntry, details: bool) -> SetAsideLog:
        mark = entry.mark
        copy = b""
        if details and mark.intact:
            schemas = self._directory.kept_aside.schemas(entry.name)
            found = LogCopy(
                self._context.broker_id,
                *entry.tp,
                mark.topic_id,
                schemas,
                mark.last_epoch,
                mark.log_end_offset,
                set_aside=entry.name,
            )
            copy = msgspec.json.encode(found)
        return SetAsideLog(
            entry.name,
            mark.topic,
            mark.partition,
            mark.topic_id,
            mark.reason,
            mark.since_ms,
            entry.size_bytes,
            mark.intact,
            mark.log_start_offset,
            mark.high_watermark,
            mark.log_end_offset,
            mark.last_epoch,
            copy,
        )

    async def ask(self, broker_id: int, request: Request) -> Reply:
        """Send a request to another broker and return its response. Raises BrokerError."""
        return await self._peers.ask(broker_id, request, timeout_s=_ANSWER_TIMEOUT_S, still=lambda: True)

    def remove(self, name: str) -> None:
        """Delete one set-aside log permanently. A missing log is not an error. Raises OSError."""
        with suppress(FileNotFoundError):
            self._directory.remove_set_aside(name)
            _log.warning("deleting set-aside log %s on an operator's request", name)
        self._wanted.set()

    async def _repeat(self) -> None:
        pause_s = self._context.config.retention_check_interval_ms / 1000
        while True:
            with suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._wanted.wait(), pause_s)
            self._wanted.clear()
            try:
                await self._check()
            except (SparklogError, OSError) as error:
                self._context.counters["set.aside.failed"] += 1
                _log.warning("could not check set-aside logs, retrying later: %s", error)

    async def _check(self) -> None:
        self._context.counters["set.aside.looks"] += 1
        await asyncio.get_running_loop().run_in_executor(None, self._directory.kept_aside.sync)
        entries = await self._entries()
        deleted = await self._deleted({entry.mark.topic_id for entry in entries if entry.mark.topic_id})
        kept = []
        for entry in entries:
            if entry.mark.topic_id in deleted:
                self._remove(entry, "ZooKeeper names the topic as deleted")
            elif self._is_old(entry) and await self._is_elsewhere(entry):
                self._remove(entry, "it is old, and the partition's leader holds all of it")
            else:
                kept.append(entry)
        self._context.counters["set.aside.logs"] = len(kept)
        self._context.counters["set.aside.bytes"] = sum(entry.size_bytes for entry in kept)

    async def _entries(self) -> list[SetAsideEntry]:
        return await asyncio.get_running_loop().run_in_executor(None, self._directory.kept_aside.entries)

    async def _deleted(self, topic_ids: set[str]) -> set[str]:
        """Return the topic ids that ZooKeeper lists as deleted; an empty set while ZooKeeper does not respond."""
        if not topic_ids:
            return set()
        try:
            return await self._registry.deleted_topics(topic_ids)
        except (BrokerError, ClusterError) as error:
            _log.info("unknown which topics are deleted: %s", error)
            return set()

    def _is_old(self, entry: SetAsideEntry) -> bool:
        keep_ms = self._context.config.set_aside_retention_ms
        return 0 <= keep_ms <= time.time_ns() // 1_000_000 - entry.mark.since_ms

    async def _is_elsewhere(self, entry: SetAsideEntry) -> bool:
        """Return whether the partition's leader has every record of this log, and the records are committed.

        The result is also true if retention has deleted all of these records at the leader.
        """
        mark = entry.mark
        if not mark.intact and mark.last_epoch < 0:  # the content of the log is unknown
            return False
        known = self._context.cache.partition(entry.tp)
        if known is None or known.topic_id != mark.topic_id or known.state.leader == NO_LEADER:
            return False
        wanted = FetchPartition(
            mark.topic, mark.partition, mark.topic_id, -1, mark.log_end_offset, 1, mark.last_epoch, columns=()
        )
        request = Fetch(0, CONSUMER, -1, 0, 0, 1, 0, 0, -1, (wanted,))
        try:
            found = await self._ask(known.state.leader, request)
        except BrokerError as error:
            _log.info("%s stays set aside: %s", entry.name, error)
            return False
        if found.log_start_offset >= mark.log_end_offset:
            # If recovery set the log aside, the leader may have had other records at these offsets.
            return mark.intact
        has_all = found.code == ErrorCode.NONE and found.diverging is None
        return has_all and found.high_watermark >= mark.log_end_offset

    async def _ask(self, leader: int, request: Fetch) -> FetchedPartition:
        tp = TopicPartition(request.partitions[0].topic, request.partitions[0].partition)

        def still() -> bool:
            known = self._context.cache.partition(tp)
            return known is not None and known.state.leader == leader

        reply = await self._peers.ask(leader, request, timeout_s=_ANSWER_TIMEOUT_S, still=still)
        assert isinstance(reply, FetchReply)
        if not reply.partitions:
            raise BrokerError(ErrorCode(reply.code), f"broker {leader} returned nothing about {tp}")
        return reply.partitions[0]

    def _remove(self, entry: SetAsideEntry, why: str) -> None:
        _log.warning("deleting set-aside log %s of topic id %s: %s", entry.name, entry.mark.topic_id, why)
        self._directory.remove_set_aside(entry.name)
        self._context.counters["set.aside.deleted"] += 1
