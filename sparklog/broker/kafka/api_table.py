"""The table of the APIs that the Kafka listener serves, and their handlers.

Each family of APIs has a module that returns its handlers. ApiVersions names exactly the APIs of this table.
"""

from __future__ import annotations

from sparklog.broker.kafka.admin.handlers import admin_handlers
from sparklog.broker.kafka.call import Handler
from sparklog.broker.kafka.cluster_apis import cluster_handlers
from sparklog.broker.kafka.data_apis import data_handlers
from sparklog.broker.kafka.groups.handlers import group_handlers
from sparklog.broker.kafka.transactions import transaction_handlers
from sparklog.broker.lifecycle.broker import Broker


def kafka_handlers(broker: Broker) -> dict[int, Handler]:
    """Return the handler of each API, by its API key."""
    return {
        **cluster_handlers(broker),
        **admin_handlers(broker),
        **data_handlers(broker),
        **group_handlers(broker),
        **transaction_handlers(broker),
    }
