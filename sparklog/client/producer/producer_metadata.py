"""The newest metadata of the topics that a producer writes to, and the callers that wait for a topic's metadata.

The I/O thread owns the state. Any thread may read ``topics``, which is replaced as a whole. This module decides nothing
about batches: it reports changed and unknown topics to the sender.
"""

from __future__ import annotations

import time
from concurrent.futures import Future
from typing import NamedTuple

from sparklog.client.cluster.loop_cluster import LoopCluster
from sparklog.client.cluster.metadata import topic_error
from sparklog.client.cluster.retry import UNKNOWN_TOPIC_GRACE_S
from sparklog.client.errors import ClientTimeout
from sparklog.client.producer.partitioning import ProducerTopic
from sparklog.errors import BrokerError
from sparklog.protocol.messages import TopicMetadata


class TopicRequest(NamedTuple):
    """A caller's request for a topic's metadata. Times are of the monotonic clock.

    Before ``unknown_until_ms``, a retriable error, such as an unknown topic, does not end the wait.
    """

    name: str
    deadline_ms: float
    unknown_until_ms: float
    future: Future[ProducerTopic]

    @classmethod
    def of(cls, name: str, timeout_s: float) -> TopicRequest:
        now_ms = time.monotonic() * 1000
        return cls(name, now_ms + timeout_s * 1000, now_ms + UNKNOWN_TOPIC_GRACE_S * 1000, Future())


class ProducerMetadata:
    """A part of the ``Sender`` that knows the newest metadata of the producer's topics."""

    def __init__(self, cluster: LoopCluster) -> None:
        self.topics: dict[str, ProducerTopic] = {}
        self._cluster = cluster
        self._requests: list[TopicRequest] = []
        self._unknown_since_ms: dict[str, float] = {}
        self._seen_version = -1

    def request(self, request: TopicRequest) -> None:
        """Request a topic's metadata. Later, ``complete_requests`` resolves the future of ``request``."""
        self._cluster.topic_errors.pop(request.name, None)  # an error of an earlier request may be out of date
        self._requests.append(request)
        self._cluster.request_metadata([request.name])

    @property
    def settled(self) -> bool:
        """Return whether no caller waits and the metadata is unchanged, so that the other methods have no work."""
        return (
            self._seen_version == self._cluster.version
            and not self._requests
            and not self._unknown_since_ms
            and not self._cluster.topic_errors
        )

    def update(self) -> list[ProducerTopic]:
        """Update ``topics`` from the cluster's metadata. Return the topics that have changed.

        The caller must check the waiting batches of these topics.
        """
        if self._seen_version == self._cluster.version and not self._requests:
            return []
        self._seen_version = self._cluster.version
        changed = []
        # All topics of the metadata are checked, because a deleted topic is missing in ``topics`` and may be recreated.
        for name in dict.fromkeys((*self.topics, *self._cluster.metadata.topic_names())):
            metadata = self._cluster.metadata.topic(name)
            known = self.topics.get(name)
            if metadata is None:
                if known is not None:
                    self.topics = {other: topic for other, topic in self.topics.items() if other != name}
            elif known is None or known.metadata is not metadata:
                try:
                    now = ProducerTopic(metadata) if known is None else known.continued_by(metadata)
                except BrokerError as error:  # for example a schema of a newer Arrow; other topics still work
                    self._cluster.topic_errors[name] = TopicMetadata(int(error.code), name, detail=error.detail)
                    continue
                if now is not known:
                    self.topics = {**self.topics, name: now}
                    changed.append(now)
        return changed

    def complete_requests(self, now_ms: float) -> None:
        """Complete the metadata requests whose topic is known or does not exist, or that have timed out."""
        if not self._requests:
            return
        waiting = []
        for request in self._requests:
            unusable = self._cluster.topic_errors.get(request.name)
            error = topic_error(unusable) if unusable else None
            if request.name in self.topics:
                request.future.set_result(self.topics[request.name])
            elif error is not None and (not error.retriable or now_ms >= request.unknown_until_ms):
                request.future.set_exception(error)
            elif now_ms >= request.deadline_ms:
                last = self._cluster.last_problem or "no broker responded"
                request.future.set_exception(
                    ClientTimeout(f"metadata of topic {request.name!r}: not received in time, last: {last}")
                )
            else:
                self._cluster.request_metadata([request.name])
                waiting.append(request)
        self._requests = waiting

    def unknown_topics(self, now_ms: float) -> list[tuple[str, BrokerError]]:
        """Return the topics for which brokers have returned an error during the whole grace period, with the errors."""
        errors = self._cluster.topic_errors
        if not errors and not self._unknown_since_ms:
            return []
        for name in self._unknown_since_ms.keys() - errors.keys():
            del self._unknown_since_ms[name]
        found = []
        for name, unusable in errors.items():
            since_ms = self._unknown_since_ms.setdefault(name, now_ms)
            error = topic_error(unusable)
            if error is not None and now_ms >= since_ms + UNKNOWN_TOPIC_GRACE_S * 1000:
                found.append((name, error))
        return found

    def next_times_ms(self, now_ms: float) -> list[float]:
        """Return the times at which a request times out or a grace period ends."""
        if not self._requests and not self._unknown_since_ms:
            return []
        times = [request.deadline_ms for request in self._requests]
        times += [request.unknown_until_ms for request in self._requests]
        times += [since + UNKNOWN_TOPIC_GRACE_S * 1000 for since in self._unknown_since_ms.values()]
        return [at for at in times if at > now_ms]

    def fail_all(self, error: BaseException) -> None:
        """Fail all open requests for a topic's metadata when the producer ends."""
        wishes, self._requests = self._requests, []
        for request in wishes:
            request.future.set_exception(error)
