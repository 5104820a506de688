"""The sender of transactions' outcomes: markers go to the partitions' leaders, offsets to the groups' coordinators.

A decision is final, so the sender retries until it succeeds. Pauses double up to a second, and each attempt goes to the
present leader. While ``_REQUESTS_AT_ONCE`` requests to a broker are in flight, further markers for this broker wait and
then share one request, so a thousand transactions do not need a thousand requests. A request whose response is late,
because a partition cannot commit, does not delay the other requests.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from msgspec.structs import replace

from sparklog.broker.context import BrokerContext
from sparklog.broker.groups.group_host import GroupHost
from sparklog.broker.groups.group_requests import commit_offsets
from sparklog.broker.inter_broker_client import InterBrokerClient
from sparklog.broker.internal_topics import OFFSETS, InternalTopics, coordinator_of
from sparklog.broker.lifecycle.zk_registration import ZkRegistration
from sparklog.broker.metadata_cache import MetadataCache
from sparklog.broker.requests.slices import Slices, Steps
from sparklog.broker.transactions.coordinator_runtime import CoordinatorRuntime
from sparklog.broker.transactions.hosted_coordinators import HostedCoordinators
from sparklog.broker.transactions.marker_append import MarkerAppend
from sparklog.coordinator.effects import SendMarkers, SendOffsets
from sparklog.coordinator.events import MarkersWritten, OffsetsWritten
from sparklog.coordinator.records import PartitionPlace
from sparklog.errors import BrokerError, ClusterError, ErrorCode
from sparklog.model import TopicPartition
from sparklog.protocol.messages import (
    CommitOffsets,
    CommitOffsetsReply,
    PartitionResult,
    TransactionMarker,
    WriteMarkers,
    WriteMarkersReply,
)

_log = logging.getLogger(__name__)

#: The maximum wait for a response. A leader responds earlier, because its own limit is shorter.
_ANSWER_TIMEOUT_S = 10.0
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.02, 1.0
#: The maximum number of markers in one request, and the most producer ids in them.
_MARKERS_AT_ONCE, _IDS_AT_ONCE = 1000, 20_000
#: The maximum number of requests in flight to one broker.
_REQUESTS_AT_ONCE = 4


@dataclass(eq=False, slots=True)
class _PendingMarker:
    """One marker that is not written yet."""

    host: CoordinatorRuntime
    effect: SendMarkers
    marker: TransactionMarker
    attempts: int = 0

    @property
    def key(self) -> str:
        return self.effect.key

    @property
    def tp(self) -> TopicPartition:
        return TopicPartition(self.marker.topic, self.marker.partition)


@dataclass(slots=True)
class _BrokerQueue:
    """Markers that wait for one broker. ``starting`` is whether a task that will send them has been started."""

    queue: list[_PendingMarker] = field(default_factory=list)
    starting: bool = False
    in_flight: int = 0


class MarkerSender:
    """The sender of transactions' outcomes for all coordinators of one broker.

    It sends markers to the leaders of partitions, and offsets to the coordinators of groups. Not thread-safe: use it
    only on the broker's event loop.
    """

    def __init__(
        self,
        context: BrokerContext,
        slices: Slices,
        *,
        registry: ZkRegistration,
        internal_topics: InternalTopics,
        markers: MarkerAppend,
        groups: HostedCoordinators[GroupHost],
    ) -> None:
        self._context = context
        self._slices = slices
        self._registry = registry
        self._internal_topics = internal_topics
        self._markers = markers
        self._groups = groups
        self._peers = InterBrokerClient(context, "transactions")
        self._queues: dict[int, _BrokerQueue] = {}
        #: Markers for topics (name, id) that this broker does not know, while it checks in ZooKeeper whether they
        #: exist.
        self._unknown: dict[tuple[str, str], list[_PendingMarker]] = {}

    def close(self) -> None:
        self._peers.close()

    # --- markers ---------------------------------------------------------------------------------------------------

    def send_markers(self, host: CoordinatorRuntime, effect: SendMarkers) -> None:
        said_by = {"coordinator": host.partition.tp.partition, "coordinator_epoch": host.epoch}
        said_by["decision"] = effect.decision
        due = (_PendingMarker(host, effect, replace(marker, **said_by)) for marker in effect.markers)
        # The dispatch runs later, because a partition may be in the middle of a step, and the marker may be for the
        # same partition.
        asyncio.get_running_loop().call_soon(self._dispatch, due)

    def _dispatch(self, dues: Iterable[_PendingMarker]) -> None:
        """Send the markers in slices.

        This broker may lead many of the partitions, and then appends the markers itself.
        """

        def failed(error: Exception) -> None:
            _log.error("could not send markers", exc_info=error)

        self._slices.start(self._dispatch_all(dues), failed)

    def _dispatch_all(self, dues: Iterable[_PendingMarker]) -> Steps:
        for due in dues:
            if self._slices.over():
                yield None
            if due.host.ended:
                continue
            try:
                self._dispatch_one(due)
            except Exception as error:
                self._failed(due, error)

    def _dispatch_one(self, due: _PendingMarker) -> None:
        known = self._context.cache.partition(due.tp)
        if known is None or due.marker.topic_id not in {"", known.topic_id}:
            self._unknown_here(due)
        elif known.state.leader == self._context.broker_id:
            self._write_here(due)
        elif known.state.leader in self._context.cache.incarnations:
            self._enqueue(known.state.leader, due)
        else:
            self._retry(due)

    def _failed(self, due: _PendingMarker, error: Exception) -> None:
        """Retry after an unexpected error, which must not affect the other markers."""
        self._context.counters["transactions.markers.failed"] += 1
        _log.error("%s: could not send the marker for %s", due.key, due.tp, exc_info=error)
        self._retry(due)

    def _unknown_here(self, due: _PendingMarker) -> None:
        """Check in ZooKeeper whether an unknown topic was deleted or is new."""
        waiting = self._unknown.setdefault((due.marker.topic, due.marker.topic_id), [])
        waiting.append(due)
        if len(waiting) == 1:
            self._context.spawn(self._check_topic(due.marker.topic, due.marker.topic_id), f"topic of {due.tp}")

    async def _check_topic(self, topic: str, topic_id: str) -> None:
        lives = True  # until ZooKeeper reports a deletion
        try:
            lives = await self._registry.topic_lives(topic, topic_id)
        except (BrokerError, ClusterError) as error:
            _log.info("unknown whether topic %s (%s) is deleted: %s", topic, topic_id, error)
        finally:
            waiting = self._unknown.pop((topic, topic_id))
            for due in waiting if lives else ():
                self._retry(due)
        if not lives:
            _log.info("topic %s (%s) is deleted, dropping its %d markers", topic, topic_id, len(waiting))
            self._arrived(waiting)

    def _write_here(self, due: _PendingMarker) -> None:
        def on_result(result: PartitionResult) -> None:
            self._settle(due, result)

        self._markers.write(due.marker, on_result)

    def _enqueue(self, leader: int, due: _PendingMarker) -> None:
        line = self._queues.setdefault(leader, _BrokerQueue())
        line.queue.append(due)
        if not line.starting and line.in_flight < _REQUESTS_AT_ONCE:
            line.starting = True
            self._context.spawn(self._send_to(leader, line), f"markers for broker {leader}")

    async def _send_to(self, leader: int, line: _BrokerQueue) -> None:
        """Send requests, one after the other, until the broker's queue is empty."""
        await asyncio.sleep(0)  # markers that are enqueued at the same time share a request
        line.starting = False
        line.in_flight += 1
        try:
            while line.queue:
                await self._send_batch(leader, _next_batch(line.queue))
        finally:
            line.in_flight -= 1

    async def _send_batch(self, leader: int, batch: list[_PendingMarker]) -> None:
        try:
            await self._ask_to_write(leader, batch)
        except BrokerError as error:
            self._context.counters["transactions.markers.failed"] += len(batch)
            _log.info("could not write %d markers for broker %d: %s", len(batch), leader, error)
            for due in batch:
                self._retry(due)
        except Exception as error:
            for due in batch:
                self._failed(due, error)

    async def _ask_to_write(self, leader: int, batch: list[_PendingMarker]) -> None:
        """Send the markers in one request, and handle their results.

        Raises BrokerError if the broker is unreachable or does not respond.
        """
        if not batch:
            return
        request = WriteMarkers(0, tuple(due.marker for due in batch))
        reply = await self._peers.ask(
            leader, request, timeout_s=_ANSWER_TIMEOUT_S, still=lambda: any(self._leads(leader, due) for due in batch)
        )
        assert isinstance(reply, WriteMarkersReply) and len(reply.results) == len(batch), reply
        written = []
        for due, result in zip(batch, reply.results, strict=True):
            if result.code == ErrorCode.NONE:
                written.append(due)
            else:
                self._settle(due, result)
        self._arrived(written)

    def _leads(self, broker_id: int, due: _PendingMarker) -> bool:
        known = self._context.cache.partition(due.tp)
        return known is not None and known.state.leader == broker_id

    def _settle(self, due: _PendingMarker, result: PartitionResult) -> None:
        if result.code == ErrorCode.NONE:
            self._arrived([due])
            return
        self._context.counters["transactions.markers.failed"] += 1
        _log.info("%s: could not write a marker: %s", due.key, result.detail)
        self._retry(due)

    def _retry(self, due: _PendingMarker) -> None:
        pause_s = min(_FIRST_PAUSE_S * 2 ** min(due.attempts, 10), _LONGEST_PAUSE_S)
        due.attempts += 1
        asyncio.get_running_loop().call_later(pause_s, self._dispatch, [due])

    def _arrived(self, written: Iterable[_PendingMarker]) -> None:
        """Notify the coordinators that markers are written, with one event for each part of a decision."""
        parts: dict[tuple[CoordinatorRuntime, str, int, int], list[PartitionPlace]] = {}
        for due in written:
            place = PartitionPlace(due.marker.topic, due.marker.partition, due.marker.topic_id)
            parts.setdefault((due.host, due.key, due.effect.decision, due.effect.part), []).append(place)
        for (host, key, decision, part), places in parts.items():
            self._context.counters["transactions.markers"] += len(places)
            host.step(MarkersWritten(key, decision, tuple(places), part))

    # --- offsets ---------------------------------------------------------------------------------------------------

    def send_offsets(self, host: CoordinatorRuntime, effect: SendOffsets) -> None:
        self._context.spawn(self._hand_over(host, effect), f"offsets of {effect.key}")

    async def _hand_over(self, host: CoordinatorRuntime, effect: SendOffsets) -> None:
        request = CommitOffsets(0, effect.group, effect.offsets, (effect.key, effect.decision))
        pause_s = _FIRST_PAUSE_S
        while not host.ended and not await self._committed(request):
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
        host.step(OffsetsWritten(effect.key, effect.decision, effect.group))

    async def _committed(self, request: CommitOffsets) -> bool:
        try:
            await self._commit(request)
        except (BrokerError, ClusterError) as error:
            self._context.counters["transactions.offsets.failed"] += 1
            _log.info("%s: could not pass on the offsets of group %s: %s", request.transaction, request.group, error)
            return False
        except Exception as error:
            # As for markers, the sender retries. Otherwise the transaction's offsets would stay pending forever.
            self._context.counters["transactions.offsets.failed"] += 1
            _log.error(
                "%s: could not pass on the offsets of group %s", request.transaction, request.group, exc_info=error
            )
            return False
        return True

    async def _commit(self, request: CommitOffsets) -> None:
        """Commit the offsets at the group's coordinator. Raise BrokerError, ClusterError."""
        cache = self._context.cache
        await self._internal_topics.create(OFFSETS)
        wanted = coordinator_of(cache, OFFSETS, request.group)
        if wanted is None:
            raise BrokerError(
                ErrorCode.COORDINATOR_NOT_AVAILABLE, f"group {request.group}: no coordinator is available"
            )
        if wanted == self._context.broker_id:
            await commit_here(self._groups, cache, request)
            return
        still: Callable[[], bool] = lambda: coordinator_of(cache, OFFSETS, request.group) == wanted  # noqa: E731
        reply = await self._peers.ask(wanted, request, timeout_s=_ANSWER_TIMEOUT_S, still=still)
        assert isinstance(reply, CommitOffsetsReply)
        for result in reply.results:
            if result.code != ErrorCode.NONE:
                raise BrokerError(result.code, result.detail)


def _next_batch(queue: list[_PendingMarker]) -> list[_PendingMarker]:
    """Remove the first markers from the queue, up to the limits of one request.

    Return those that still have to be sent.
    """
    count = ids = 0
    for due in queue[:_MARKERS_AT_ONCE]:
        ids += len(due.marker.committed) + len(due.marker.aborted)
        if count and ids > _IDS_AT_ONCE:
            break
        count += 1
    taken = [due for due in queue[:count] if not due.host.ended]
    del queue[:count]
    return taken


async def commit_here(groups: HostedCoordinators[GroupHost], cache: MetadataCache, request: CommitOffsets) -> None:
    """Commit the offsets with this broker's own group coordinator, and wait for the result. Raises BrokerError."""
    done: asyncio.Future[BrokerError | None] = asyncio.get_running_loop().create_future()

    def on_result(error: BrokerError | None) -> None:
        if not done.done():
            done.set_result(error)

    commit_offsets(groups, cache, request, offsets=request.offsets, on_result=on_result)
    error = await done
    if error is not None:
        raise error
