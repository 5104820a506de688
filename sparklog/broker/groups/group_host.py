"""A group coordinator in a broker. It learns of new and deleted topics from the cluster's metadata."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine, Iterable
from typing import Any

from sparklog.broker.context import BrokerContext
from sparklog.broker.lifecycle.zk_registration import ZkRegistration
from sparklog.broker.metadata_cache import MetadataCache
from sparklog.broker.replication.partition import Partition
from sparklog.broker.transactions.coordinator_runtime import CoordinatorRuntime
from sparklog.config import BrokerConfig
from sparklog.coordinator.assignor import TopicView
from sparklog.coordinator.effects import ComputeTarget, Resume
from sparklog.coordinator.group_events import HoldEnded, Resumed, TargetComputed, TopicsGone, TopicsSeen
from sparklog.coordinator.group_records import Hold
from sparklog.coordinator.group_state import GroupSettings
from sparklog.coordinator.groups import Groups
from sparklog.errors import BrokerError, ClusterError
from sparklog.model import is_internal
from sparklog.zk.session import PAUSE_S

_log = logging.getLogger(__name__)

#: The delay for which changes of topics are gathered, because many topics change at the same time. The delay grows in
#: large clusters, so that applying the changes takes at most 1/50 of the broker's time.
_TOGETHER_S = 0.1
_SMALL_PART = 50
#: The maximum pause between two attempts while ZooKeeper does not respond.
_LONGEST_PAUSE_S = 10.0


#: A function that returns whether a producer takes part in a transaction of a key, and the leader epoch of the
#: coordinator that responded. Raises BrokerError if no coordinator has responded.
TakesPart = Callable[[str, int], Coroutine[Any, Any, tuple[bool, int]]]


class GroupHost(CoordinatorRuntime):
    """The coordinator of the groups in one partition of ``__consumer_offsets`` that this broker leads."""

    def __init__(
        self,
        context: BrokerContext,
        partition: Partition,
        *,
        registry: ZkRegistration,
        takes_part: TakesPart,
        log_start_moved: Callable[[Partition], None],
    ) -> None:
        self._registry = registry
        self._takes_part = takes_part
        self.groups = Groups(_settings(context.config))
        #: The id of the topic that was deleted last, as of the last check.
        self._newest_deleted = ""
        self._update_timer: asyncio.TimerHandle | None = None
        self._update_after_s = _TOGETHER_S
        #: The topics (name, id) whose existence is being checked in ZooKeeper. The value is the number of the last run
        #: of ``_drop_deleted`` that did not know the topic.
        self._in_question: dict[tuple[str, str], int] = {}
        self._checks = 0
        #: The holds that are being checked: (group, key of the transaction).
        self._asking: set[tuple[str, str]] = set()
        super().__init__(context, partition, self.groups, log_start_moved=log_start_moved)

    def perform(self, effect: Any) -> None:
        match effect:
            case ComputeTarget():
                self.context.spawn(self._compute_target(effect), f"target of group {effect.group}")
            case Resume():
                asyncio.get_running_loop().call_soon(self.step, Resumed(effect.group))
            case _:
                raise AssertionError(f"not an order of a group coordinator: {effect!r}")

    async def _compute_target(self, effect: ComputeTarget) -> None:
        """Compute a group's target assignment in a thread. An error ends this coordinator."""
        try:
            target = await asyncio.get_running_loop().run_in_executor(None, effect.inputs.compute)
        except Exception:
            _log.exception("%s: cannot compute the target of group %s", self.partition.tp, effect.group)
            self._fail()
            return
        self.step(TargetComputed(effect.group, effect.inputs, target))

    async def load(self) -> None:
        await super().load()
        if not self.not_ready_reason:
            self._update_topics()
            self._drop_deleted()
            self.context.metadata_listeners.append(self._metadata_changed)

    def end(self) -> None:
        super().end()
        if self._update_timer is not None:
            self._update_timer.cancel()
            self._update_timer = None
        if self._metadata_changed in self.context.metadata_listeners:
            self.context.metadata_listeners.remove(self._metadata_changed)

    def check_holds(self, group: str, holds: Iterable[tuple[str, Hold]]) -> None:
        """Ask transaction coordinators whether the transactions that block offsets of this group have ended.

        A ``Hold`` blocks the offsets that an open transaction may still commit, and a member of the group waits for
        these offsets. The group coordinator must ask, because a transaction coordinator does not notify groups of
        aborted transactions. If a transaction has ended, its hold ends.
        """
        for key, hold in holds:
            if (group, key) not in self._asking:
                self._asking.add((group, key))
                self.context.spawn(self._check_hold(group, key, hold), f"transaction {key}, waited for by {group}")

    async def _check_hold(self, group: str, key: str, hold: Hold) -> None:
        try:
            takes_part, epoch = await self._takes_part(key, hold.producer_id)
            # A transaction coordinator of an earlier leader epoch may not know the transaction. One of this epoch or a
            # later one does: it has read the transaction's records.
            if not takes_part and epoch >= hold.coordinator_epoch and not self.not_ready_reason:
                self.step(HoldEnded(group, key, hold.producer_id))
        except BrokerError as error:  # the member asks again
            _log.info("%s: unknown whether transaction %s has ended: %s", self.partition.tp, key, error)
        finally:
            self._asking.discard((group, key))

    def _metadata_changed(self) -> None:
        newest = next(reversed(self.context.cache.forgotten), "")
        if newest != self._newest_deleted:
            self._drop_deleted()
        if self._update_timer is None:
            self._update_timer = asyncio.get_running_loop().call_later(self._update_after_s, self._update_topics)

    def _update_topics(self) -> None:
        self._update_timer = None
        if not self.not_ready_reason:
            began = time.monotonic()
            self.step(TopicsSeen(_views(self.context.cache)))
            self._update_after_s = max(_TOGETHER_S, _SMALL_PART * (time.monotonic() - began))

    def _drop_deleted(self) -> None:
        """Drop the offsets of topics that were deleted or recreated.

        The controller's updates name deleted topics. A topic that this broker does not know may also be new, so ask
        ZooKeeper about it.
        """
        forgotten = self.context.cache.forgotten
        self._newest_deleted = next(reversed(forgotten), "")
        unknown = []
        # The topics without an id are checked first: if they waited, another topic might be created with their name.
        for topic, topic_id in sorted(self.groups.topics(), key=lambda one: (one[1], one[0])):
            known = self.context.cache.topic(topic)
            if known is None or topic_id not in {"", known.change.topic_id}:
                unknown.append((topic, topic_id))
        told = [one for one in unknown if one[1] in forgotten]
        if told:
            self.step(TopicsGone(tuple(told)))
        asked = [one for one in unknown if one[1] not in forgotten]
        if asked:
            begun = bool(self._in_question)
            self._checks += 1
            self._in_question.update(dict.fromkeys(asked, self._checks))
            if not begun:
                self.context.spawn(self._drop_deleted_topics(), f"topics of {self.partition.tp}")

    async def _drop_deleted_topics(self) -> None:
        """Ask ZooKeeper about each topic in question until it has responded, and drop the offsets of deleted topics.

        Without these retries the next check would be at the next deletion of a topic or the next start of a
        coordinator, which may be much later.
        """
        pause_s = PAUSE_S
        try:
            while self._in_question and not self.ended:
                gone, error = await self._find_deleted()
                if gone:
                    self.step(TopicsGone(tuple(gone)))
                if error is None:
                    pause_s = PAUSE_S
                    continue
                _log.info("%s: unknown whether topics are deleted: %s", self.partition.tp, error)
                await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
        finally:
            self._in_question.clear()  # after any error the next deletion checks again

    async def _find_deleted(self) -> tuple[list[tuple[str, str]], Exception | None]:
        """Return which topics in question are deleted, and the error that ended the check early, or None."""
        gone: list[tuple[str, str]] = []
        for one, check in list(self._in_question.items()):
            try:
                lives = await self._registry.topic_lives(*one)
            except (BrokerError, ClusterError) as error:
                # This topic moves to the end: the error may concern it alone.
                self._in_question[one] = self._in_question.pop(one)
                return gone, error
            if not lives and not one[1]:
                # Drop the offsets of a topic without an id at once: later a new topic of this name may exist and have
                # offsets.
                self.step(TopicsGone((one,)))
            elif not lives:
                gone.append(one)
            elif self._in_question[one] != check:
                continue  # a later check asked for this topic again: it may have been deleted since
            del self._in_question[one]
        return gone, None


def _views(cache: MetadataCache) -> dict[str, TopicView]:
    """Return the topics that groups may read, as this broker knows them."""
    racks = {one.broker_id: one.rack for one in cache.brokers if one.rack}
    views = {}
    for name in cache.topics():
        topic = cache.topic(name)
        if topic is None or is_internal(name) or not topic.partitions:
            continue
        count = len(topic.partitions)
        # partition numbers have no gaps, but updates may bring partitions one by one
        if count - 1 not in topic.partitions:
            count = next(number for number in range(count) if number not in topic.partitions)
        near: tuple[frozenset[str], ...] = ()
        if racks:
            replicas = (topic.partitions[number].replicas for number in range(count))
            near = tuple(frozenset(racks[one] for one in found if one in racks) for found in replicas)
        views[name] = TopicView(topic.change.topic_id, count, near)
    return views


def _settings(config: BrokerConfig) -> GroupSettings:
    """Return the settings of groups.

    A group remembers the decision of a transaction (commit or abort) for a shorter time than the transaction
    coordinator remembers the transaction's key. Once the coordinator has dropped the key, its decisions are numbered
    from the beginning again.
    """
    return GroupSettings(
        retention_ms=config.offsets_retention_ms,
        max_size=config.group_max_size,
        initial_delay_ms=config.group_initial_rebalance_delay_ms,
        max_groups=max(1, config.groups_max // config.offsets_partitions),
        hold_ms=2 * config.transaction_max_timeout_ms,
        handover_ms=min(86_400_000, config.transactional_id_expiration_ms // 2, config.sink_id_expiration_ms // 2),
    )
