"""ListSetAside, RestoreSetAside and RemoveSetAside requests, with which an operator handles set-aside logs.

RestoreSetAside recreates a topic with its old id. The broker that gets the request collects information about the
set-aside logs from all live brokers. It writes the topic, with the states of its partitions, to ZooKeeper. Then the
controller elects leaders, and each broker with a replica of the topic id continues with its own set-aside log.
"""

from __future__ import annotations

import logging

import msgspec

from sparklog.broker.context import BrokerContext
from sparklog.broker.internal_topics import refuse_internal
from sparklog.broker.lifecycle.zk_registration import ZkRegistration
from sparklog.broker.replication.set_aside import SetAsideLogs
from sparklog.broker.requests.delayed_replies import reply_later, wait_for_leaders
from sparklog.controller.rebuild import rebuild_topics
from sparklog.errors import BrokerError, ErrorCode
from sparklog.model import LogCopy, TopicNote
from sparklog.net.server_connection import ServerConnection
from sparklog.protocol.messages import (
    Ack,
    DescribeBroker,
    DescribeBrokerReply,
    ListSetAside,
    ListSetAsideReply,
    RemoveSetAside,
    Reply,
    RestoreSetAside,
    RestoreSetAsideReply,
    SetAsideLog,
)
from sparklog.protocol.set_aside_messages import KNOWN_BY

_log = logging.getLogger(__name__)


class SetAsideRequests:
    """The handlers of requests that list, restore and remove set-aside logs."""

    def __init__(self, context: BrokerContext, set_aside: SetAsideLogs, registry: ZkRegistration) -> None:
        self._context = context
        self._set_aside = set_aside
        self._registry = registry

    def list_logs(self, connection: ServerConnection, request: ListSetAside, body: memoryview) -> None:
        reply_later(self._context, connection, request, self._list(request))

    async def _list(self, request: ListSetAside) -> Reply:
        logs, notes = await self._set_aside.listed(details=request.details)
        return ListSetAsideReply(request.cid, self._context.broker_id, tuple(logs), notes)

    def remove(self, connection: ServerConnection, request: RemoveSetAside, body: memoryview) -> None:
        reply_later(self._context, connection, request, self._remove(request))

    async def _remove(self, request: RemoveSetAside) -> Reply:
        for name in request.names:
            if "/" in name or name in {"", ".", ".."}:
                raise BrokerError(ErrorCode.INVALID_REQUEST, f"{name[:80]!r} is not the name of a set-aside log")
            try:
                self._set_aside.remove(name)
            except OSError as error:
                raise BrokerError(ErrorCode.KAFKA_STORAGE_ERROR, f"{name}: {error}") from error
        return Ack(request.cid)

    def restore(self, connection: ServerConnection, request: RestoreSetAside, body: memoryview) -> None:
        reply_later(self._context, connection, request, self._restore(request))

    async def _restore(self, request: RestoreSetAside) -> Reply:
        findings: list[str] = []
        copies, notes, asked = await self._collected(request.topic_id, findings)
        if not copies:
            detail = f"no live broker has set aside an intact log of topic id {request.topic_id!r}"
            raise BrokerError(ErrorCode.UNKNOWN_TOPIC_ID, detail)
        [topic] = rebuild_topics(copies, notes, asked=asked, findings=findings)
        record = topic.record
        refuse_internal(record.name, "not restored")
        known = self._context.cache.topic(record.name)
        if known is not None:
            same = known.change.topic_id == record.topic_id
            what = "its brokers serve it" if same else f"with id {known.change.topic_id}: delete that topic first"
            raise BrokerError(ErrorCode.TOPIC_ALREADY_EXISTS, f"topic {record.name} exists, {what}")
        await self._registry.restore_topic(record, topic.states)
        _log.warning("recreating topic %s with id %s from set-aside logs", record.name, record.topic_id)
        if not await wait_for_leaders(self._context, record, request.timeout_ms):
            detail = f"topic {record.name} exists again, but not every partition has a leader yet"
            raise BrokerError(ErrorCode.REQUEST_TIMED_OUT, detail)
        return RestoreSetAsideReply(request.cid, record.name, len(record.assignment), tuple(findings))

    async def _collected(self, topic_id: str, findings: list[str]) -> tuple[list[LogCopy], list[TopicNote], set[int]]:
        """Return the topic's set-aside logs on all live brokers, and these brokers' notes on the topic.

        The third item of the result has the ids of the brokers that responded.
        """
        copies: list[LogCopy] = []
        notes: list[TopicNote] = []
        asked: set[int] = set()
        for broker_id in sorted(self._context.cache.incarnations):
            try:
                logs, noted = await self._listed_by(broker_id)
            except BrokerError as error:
                findings.append(f"broker {broker_id} did not return its set-aside logs: {error}")
                continue
            asked.add(broker_id)
            # Use the newest log of each partition, because the broker continues with that log.
            newest = {log.partition: log for log in logs if log.intact and log.topic_id == topic_id and log.copy}
            copies += [msgspec.json.decode(log.copy, type=LogCopy) for log in newest.values()]
            if noted:
                notes += [
                    note for note in msgspec.json.decode(noted, type=list[TopicNote]) if note.topic_id == topic_id
                ]
        return copies, notes, asked

    async def _listed_by(self, broker_id: int) -> tuple[list[SetAsideLog], bytes]:
        """Return a broker's set-aside logs, oldest first, and its notes on their topics. Raise BrokerError."""
        if broker_id == self._context.broker_id:
            return await self._set_aside.listed(details=True)
        described = await self._set_aside.ask(broker_id, DescribeBroker(0))
        assert isinstance(described, DescribeBrokerReply)
        if KNOWN_BY not in described.settings:
            raise BrokerError(
                ErrorCode.UNSUPPORTED_VERSION,
                f"it runs release {described.version}, which does not support set-aside logs",
            )
        reply = await self._set_aside.ask(broker_id, ListSetAside(0, details=True))
        assert isinstance(reply, ListSetAsideReply)
        return list(reply.logs), reply.notes
