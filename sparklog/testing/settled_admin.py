"""An admin client that sees each change: it waits until all live brokers have the same metadata.

A broker responds to a change when that broker knows the result. The other brokers learn the result from the controller
at about the same time, so a client that asks another broker next may see the state before the change, as in Kafka.
Tests that change metadata with one client and read it with another one use this admin client.
"""

from __future__ import annotations

from typing import Any

import msgspec

from sparklog.client.admin.admin import Admin
from sparklog.client.admin.descriptions import TopicDescription
from sparklog.errors import BrokerError, ErrorCode
from sparklog.protocol.messages import Metadata, MetadataReply


class SettledAdmin(Admin):
    """An Admin whose methods for topics return only when all live brokers agree."""

    def create_topic(self, *args: Any, **kwargs: Any) -> Any:
        created = super().create_topic(*args, **kwargs)
        self.settle()
        return created

    def delete_topic(self, *args: Any, **kwargs: Any) -> None:
        super().delete_topic(*args, **kwargs)
        self.settle()

    def create_partitions(self, *args: Any, **kwargs: Any) -> Any:
        created = super().create_partitions(*args, **kwargs)
        self.settle()
        return created

    def alter_topic(self, *args: Any, **kwargs: Any) -> Any:
        altered = super().alter_topic(*args, **kwargs)
        self.settle()
        return altered

    def describe_topic(self, name: str) -> TopicDescription:
        self.settle()
        return super().describe_topic(name)

    def settle(self) -> None:
        """Wait until all live brokers have the same metadata of all topics.

        Raises:
            ClientTimeout: the brokers did not agree within the timeout of a request.
        """
        self._metadata(None)

    def _metadata(
        self, topics: tuple[str, ...] | None, *, schemas: bool = True, internal: bool = False
    ) -> MetadataReply:
        def attempt() -> MetadataReply:
            request = Metadata(0, topics, schemas, internal)
            found = self._cluster.ask_metadata(request)
            self._cluster.metadata.update(found)
            for broker in found.brokers:
                other = self._cluster.ask_metadata(request, broker.broker_id)
                if _state(other) != _state(found):
                    raise BrokerError(
                        ErrorCode.BROKER_NOT_AVAILABLE, f"the metadata of broker {broker.broker_id} differs"
                    )
            return found

        return self._cluster.retrying("metadata that all brokers agree on", attempt)


def _state(reply: MetadataReply) -> Any:
    topics = [msgspec.structs.replace(topic, order=0) for topic in reply.topics]  # a broker may not know the order
    return sorted(reply.brokers, key=lambda broker: broker.broker_id), sorted(topics, key=lambda topic: topic.name)
