"""The topics that a producer writes to, by the newest metadata, and the callers that wait for a topic.

The I/O thread owns the state. Any thread may read ``topics``, which is replaced as a whole. This module decides nothing
about batches: it reports changed and unknown topics to the sender.
"""

from __future__ import annotations

import time
from concurrent.futures import Future
from typing import NamedTuple

from sparklog.client.cluster.loop_cluster import LoopCluster
from sparklog.client.cluster.metadata import topic_error
from sparklog.client.errors import ClientTimeout
from sparklog.client.producer.partitioning import ProducerTopic
from sparklog.errors import BrokerError
from sparklog.protocol.messages import TopicMetadata

#: "Unknown topic" may mean for this time that the broker does not know the topic yet.
_UNKNOWN_TOPIC_GRACE_S = 2.0


class TopicRequest(NamedTuple):
    """A caller that waits for a topic. Times are of the monotonic clock."""

    name: str
    deadline_ms: float
    unknown_until_ms: float
    future: Future[ProducerTopic]

    @classmethod
    def of(cls, name: str, timeout_s: float) -> TopicRequest:
        now_ms = time.monotonic() * 1000
        return cls(name, now_ms + timeout_s * 1000, now_ms + _UNKNOWN_TOPIC_GRACE_S * 1000, Future())


class ProducerMetadata:
    """The topics of one producer. Owner: the sender."""

    def __init__(self, link: LoopCluster) -> None:
        self.topics: dict[str, ProducerTopic] = {}
        self._link = link
        self._wishes: list[TopicRequest] = []
        self._unknown_since_ms: dict[str, float] = {}
        self._seen_version = -1

    def wish(self, wish: TopicRequest) -> None:
        """Request a topic. ``grant`` completes the request."""
        self._link.topic_errors.pop(wish.name, None)  # an error of an earlier request may be out of date
        self._wishes.append(wish)
        self._link.want_metadata([wish.name])

    @property
    def settled(self) -> bool:
        """Return whether no caller waits and the metadata has no news, so that all other methods have nothing to do."""
        return (
            self._seen_version == self._link.version
            and not self._wishes
            and not self._unknown_since_ms
            and not self._link.topic_errors
        )

    def follow(self) -> list[ProducerTopic]:
        """Update ``topics`` from the metadata. Return the changed topics, to which batches may have to be adapted."""
        if self._seen_version == self._link.version and not self._wishes:
            return []
        self._seen_version = self._link.version
        changed = []
        # This includes all topics of the metadata: a deleted and recreated topic was missing from ``topics`` in the
        # meantime.
        for name in dict.fromkeys((*self.topics, *self._link.metadata.topic_names())):
            metadata = self._link.metadata.topic(name)
            known = self.topics.get(name)
            if metadata is None:
                if known is not None:
                    self.topics = {other: topic for other, topic in self.topics.items() if other != name}
            elif known is None or known.metadata is not metadata:
                try:
                    now = ProducerTopic(metadata) if known is None else known.continued_by(metadata)
                except BrokerError as error:  # for example a schema of a newer Arrow: it must not affect other topics
                    self._link.topic_errors[name] = TopicMetadata(int(error.code), name, detail=error.detail)
                    continue
                if now is not known:
                    self.topics = {**self.topics, name: now}
                    changed.append(now)
        return changed

    def grant(self, now_ms: float) -> None:
        """Complete the requests whose topic is known, does not exist, or that have waited long enough."""
        if not self._wishes:
            return
        waiting = []
        for wish in self._wishes:
            unusable = self._link.topic_errors.get(wish.name)
            error = topic_error(unusable) if unusable else None
            if wish.name in self.topics:
                wish.future.set_result(self.topics[wish.name])
            elif error is not None and (not error.retriable or now_ms >= wish.unknown_until_ms):
                wish.future.set_exception(error)
            elif now_ms >= wish.deadline_ms:
                last = self._link.last_problem or "no broker responded"
                wish.future.set_exception(
                    ClientTimeout(f"metadata of topic {wish.name!r}: not received in time, last: {last}")
                )
            else:
                self._link.want_metadata([wish.name])
                waiting.append(wish)
        self._wishes = waiting

    def gone(self, now_ms: float) -> list[tuple[str, BrokerError]]:
        """Return the topics that were unknown for the grace period, with their errors."""
        errors = self._link.topic_errors
        if not errors and not self._unknown_since_ms:
            return []
        for name in self._unknown_since_ms.keys() - errors.keys():
            del self._unknown_since_ms[name]
        found = []
        for name, unusable in errors.items():
            since_ms = self._unknown_since_ms.setdefault(name, now_ms)
            error = topic_error(unusable)
            if error is not None and now_ms >= since_ms + _UNKNOWN_TOPIC_GRACE_S * 1000:
                found.append((name, error))
        return found

    def next_times_ms(self, now_ms: float) -> list[float]:
        """Return the times at which a request or a grace period ends."""
        if not self._wishes and not self._unknown_since_ms:
            return []
        times = [wish.deadline_ms for wish in self._wishes]
        times += [wish.unknown_until_ms for wish in self._wishes]
        times += [since + _UNKNOWN_TOPIC_GRACE_S * 1000 for since in self._unknown_since_ms.values()]
        return [at for at in times if at > now_ms]

    def fail_all(self, error: BaseException) -> None:
        """Fail all requests at the end of the producer."""
        wishes, self._wishes = self._wishes, []
        for wish in wishes:
            wish.future.set_exception(error)
