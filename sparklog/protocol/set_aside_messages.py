"""Messages about set-aside logs, which brokers keep without serving them.

A broker of release 0.1.0 does not know these messages. A broker that knows them has ``log.set.aside.retention.ms`` in
the settings of its DescribeBrokerReply.
"""

from __future__ import annotations

import msgspec

from sparklog.protocol.fields import Entries, Listed, Message, Name

#: The setting that shows that a broker knows these messages.
KNOWN_BY = "log.set.aside.retention.ms"


class ListSetAside(Message, frozen=True, tag="list_set_aside"):
    """A request for the set-aside logs of the receiving broker.

    A broker that restores a topic also requests ``details``.
    """

    details: bool = False


class SetAsideLog(msgspec.Struct, frozen=True, array_like=True):
    """A log that a broker has set aside: the broker keeps the files, but does not serve the log.

    ``intact`` means that the log was open when the broker set it aside, so its offsets are known. If details were
    requested, ``copy`` is the broker's description of the log (``LogCopy``), as JSON.
    """

    name: str
    topic: str
    partition: int
    topic_id: str
    reason: str
    since_ms: int
    size_bytes: int
    intact: bool
    log_start_offset: int
    high_watermark: int
    log_end_offset: int
    last_epoch: int
    copy: bytes = b""


class ListSetAsideReply(Message, frozen=True, tag="list_set_aside_reply"):
    """The reply to ListSetAside: the set-aside logs of one broker.

    If details were requested, ``notes`` has the broker's copies of the metadata of these logs' topics (``TopicNote``),
    as JSON.
    """

    broker_id: int
    logs: Listed[SetAsideLog]
    notes: bytes = b""
    throttle_time_ms: int = 0


class RestoreSetAside(Message, frozen=True, tag="restore_set_aside"):
    """A request to recreate the topic with this id from the logs that brokers have set aside.

    The broker replies when the partitions have leaders.
    """

    topic_id: Name
    timeout_ms: int


class RestoreSetAsideReply(Message, frozen=True, tag="restore_set_aside_reply"):
    """The reply to RestoreSetAside. ``findings`` are sentences for the operator about the restored topic."""

    topic: str
    partitions: int
    findings: Listed[str] = ()
    throttle_time_ms: int = 0


class RemoveSetAside(Message, frozen=True, tag="remove_set_aside"):
    """A request to delete these set-aside logs of the receiving broker permanently.

    The broker ignores unknown names.
    """

    names: Entries[Name]
