"""The handlers of all requests of Kafka's protocol about consumer groups."""

from __future__ import annotations

from sparklog.broker.kafka.call import Handler
from sparklog.broker.kafka.groups.classic_members import ClassicMemberHandlers
from sparklog.broker.kafka.groups.committed_offsets import CommittedOffsetsHandlers
from sparklog.broker.kafka.groups.consumer_groups import ConsumerGroupHandlers
from sparklog.broker.kafka.groups.fetched_offsets import FetchedOffsetsHandler
from sparklog.broker.kafka.groups.group_access import GroupAccess
from sparklog.broker.kafka.groups.group_listings import GroupListings
from sparklog.broker.lifecycle.broker import Broker
from sparklog.kafka.wire.api_keys import ApiKey


def group_handlers(broker: Broker) -> dict[int, Handler]:
    """Return the handler of each API of consumer groups, by its API key."""
    access = GroupAccess(broker)
    members = ClassicMemberHandlers(broker, access)
    offsets = CommittedOffsetsHandlers(broker, access)
    listings = GroupListings(broker, access)
    consumers = ConsumerGroupHandlers(broker, access)
    return {
        ApiKey.JOIN_GROUP: members.join,
        ApiKey.SYNC_GROUP: members.sync,
        ApiKey.HEARTBEAT: members.heartbeat,
        ApiKey.LEAVE_GROUP: members.leave,
        ApiKey.OFFSET_COMMIT: offsets.commit,
        ApiKey.OFFSET_DELETE: offsets.delete,
        ApiKey.OFFSET_FETCH: FetchedOffsetsHandler(broker, access).fetch,
        ApiKey.LIST_GROUPS: listings.list_groups,
        ApiKey.DESCRIBE_GROUPS: listings.describe,
        ApiKey.DELETE_GROUPS: listings.delete,
        ApiKey.CONSUMER_GROUP_HEARTBEAT: consumers.heartbeat,
        ApiKey.CONSUMER_GROUP_DESCRIBE: consumers.describe,
    }
