"""The committed offsets of consumer groups, for which retention waits (``retention.wait.for.groups``).

A leader asks each group's coordinator before it deletes records. Records above a group's committed offset stay, but
only until they are older than ``retention.hard.ms``. While the coordinator does not respond, all records stay until
that age. The leader does not use an earlier response, because the group may have been reset to lower offsets since. A
group without a committed offset in a partition counts as being at offset 0. If an offset has grown since the response,
retention keeps more records than necessary, never fewer.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping

from sparklog.broker.context import BrokerContext
from sparklog.broker.groups.group_host import GroupHost
from sparklog.broker.inter_broker_client import InterBrokerClient
from sparklog.broker.internal_topics import OFFSETS, coordinator_of
from sparklog.broker.transactions.hosted_coordinators import HostedCoordinators
from sparklog.errors import BrokerError
from sparklog.model import TopicPartition
from sparklog.protocol.messages import FetchOffsets, FetchOffsetsReply, GroupOffset

_log = logging.getLogger(__name__)

_ANSWER_TIMEOUT_S = 5.0

Committed = Mapping[TopicPartition, GroupOffset]


class RetentionHolds:
    """A client that asks groups' coordinators for committed offsets, before retention deletes records.

    A part of ``LogMaintenance``. Not thread-safe: use it only on the broker's event loop.
    """

    def __init__(self, context: BrokerContext, groups: HostedCoordinators[GroupHost]) -> None:
        self._context = context
        self._groups = groups
        #: Created at the first request, because few topics use ``retention.wait.for.groups``.
        self._peers: InterBrokerClient | None = None

    def close(self) -> None:
        if self._peers is not None:
            self._peers.close()

    async def ask(self, groups: Iterable[str]) -> dict[str, Committed]:
        """Return the committed offsets of each group. Omit groups whose coordinator does not respond."""
        found: dict[str, Committed] = {}
        for group in groups:
            try:
                offsets = await self._offsets(group)
            except BrokerError as error:  # noqa: PERF203 - the other groups are asked too
                self._context.counters["retention.groups.not.asked"] += 1
                _log.warning("retention waits for group %s, whose coordinator does not respond: %s", group, error)
            else:
                found[group] = {TopicPartition(one.topic, one.partition): one for one in offsets}
        return found

    async def _offsets(self, group: str) -> Iterable[GroupOffset]:
        context = self._context
        if context.cache.topic(OFFSETS) is None:
            return ()  # no group has ever committed an offset
        coordinator = coordinator_of(context.cache, OFFSETS, group)
        if coordinator == context.broker_id:
            return self._groups.of(group).groups.offsets(group).values()
        self._peers = self._peers or InterBrokerClient(context, "retention")
        reply = await self._peers.ask(
            -1 if coordinator is None else coordinator,
            FetchOffsets(0, group),
            timeout_s=_ANSWER_TIMEOUT_S,
            still=lambda: coordinator_of(context.cache, OFFSETS, group) == coordinator,
        )
        assert isinstance(reply, FetchOffsetsReply)
        return reply.offsets


def read_to(tp: TopicPartition, topic_id: str, groups: Iterable[str], known: Mapping[str, Committed]) -> int:
    """Return the lowest committed offset of these groups in a partition.

    A group without a known offset counts as being at offset 0.
    """
    ends = []
    for group in groups:
        committed = known.get(group, {}).get(tp)
        same_topic = committed is not None and committed.topic_id in {"", topic_id}
        ends.append(committed.offset if committed is not None and same_topic else 0)
    return min(ends, default=0)
