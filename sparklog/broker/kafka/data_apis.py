"""The handlers of Kafka's APIs that write, read and locate records."""

from __future__ import annotations

from sparklog.broker.kafka.call import Handler
from sparklog.broker.kafka.data_topics import DataTopics
from sparklog.broker.kafka.fetch import KafkaFetches
from sparklog.broker.kafka.list_offsets import KafkaListOffsets
from sparklog.broker.kafka.permissions import Permissions
from sparklog.broker.kafka.produce import KafkaProduce
from sparklog.broker.kafka.sent_batches import SentBatches
from sparklog.broker.lifecycle.broker import Broker
from sparklog.kafka.wire import ApiKey


def data_handlers(broker: Broker) -> dict[int, Handler]:
    """Return the handlers of Produce, Fetch, ListOffsets and OffsetForLeaderEpoch."""
    context, partitions, slices = broker.context, broker.partitions, broker.slices
    topics = DataTopics(context, partitions, Permissions(broker))
    sent = SentBatches(context.config.kafka_batch_cache_bytes)
    broker.effects.role_listeners.append(sent.drop)
    produce = KafkaProduce(
        context,
        topics,
        slices=slices,
        fetches=broker.fetches,
        quotas=broker.quotas,
        verifications=broker.verifications,
    )
    produce.on_appended = sent.add
    fetch = KafkaFetches(
        context, topics, partitions, sent=sent, slices=slices, fetches=broker.fetches, quotas=broker.quotas
    )
    offsets = KafkaListOffsets(topics, slices)
    return {
        ApiKey.PRODUCE: produce.handle,
        ApiKey.FETCH: fetch.handle,
        ApiKey.LIST_OFFSETS: offsets.list_offsets,
        ApiKey.OFFSET_FOR_LEADER_EPOCH: offsets.end_offsets,
    }
