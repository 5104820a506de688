"""Messages about logs that brokers keep without serving them. A broker of 0.1.0 does not know them: one that does has
``log.set.aside.retention.ms`` among the settings of its DescribeBrokerReply."""

from __future__ import annotations

import msgspec

from sparklog.protocol.fields import Entries, Listed, Message, Name

#: The setting by which a broker shows that it knows these messages.
KNOWN_BY = "log.set.aside.retention.ms"


class ListSetAside(Message, frozen=True, tag="list_set_aside"):
    """The set-aside logs of the broker asked. ``details`` are for the broker that restores a topic."""

    details: bool = False


class SetAsideLog(msgspec.Struct, frozen=True, array_like=True):
    """One set-aside log. ``intact``: it could be opened when it was set aside, and its offsets are known. ``copy``:
    with details, a ``LogCopy`` as JSON."""

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
    """``notes``: with details, what the broker was told of the topics of these logs, ``TopicNote``s as JSON."""

    broker_id: int
    logs: Listed[SetAsideLog]
    notes: bytes = b""


class RestoreSetAside(Message, frozen=True, tag="restore_set_aside"):
    """Make the topic of this id again, out of the logs that brokers have set aside. Waits for the leaders."""

    topic_id: Name
    timeout_ms: int


class RestoreSetAsideReply(Message, frozen=True, tag="restore_set_aside_reply"):
    """``findings``: what an operator should know of the topic as it is now."""

    topic: str
    partitions: int
    findings: Listed[str] = ()


class RemoveSetAside(Message, frozen=True, tag="remove_set_aside"):
    """Delete these set-aside logs of the broker asked, for good. A name that is not there is fine."""

    names: Entries[Name]
