"""The handlers of all administrative requests of Kafka's protocol."""

from __future__ import annotations

from sparklog.broker.kafka.admin import acls, quotas, tokens, users
from sparklog.broker.kafka.admin.alter_configs import AlterConfigsHandlers
from sparklog.broker.kafka.admin.config_resources import ListConfigResourcesHandler
from sparklog.broker.kafka.admin.describe_configs import DescribeConfigsHandler, TopicConfigs
from sparklog.broker.kafka.admin.describe_topics import DescribeTopicsHandler
from sparklog.broker.kafka.admin.elections import elect_leaders
from sparklog.broker.kafka.admin.log_dirs import describe_log_dirs
from sparklog.broker.kafka.admin.reassignments import ReassignmentHandlers
from sparklog.broker.kafka.admin.records import delete_records
from sparklog.broker.kafka.admin.topics import TopicHandlers
from sparklog.broker.kafka.admin.transactions import TransactionHandlers
from sparklog.broker.kafka.call import Handler
from sparklog.broker.kafka.permissions import Permissions
from sparklog.broker.lifecycle.broker import Broker
from sparklog.kafka.wire.api_keys import ApiKey


def admin_handlers(broker: Broker) -> dict[int, Handler]:
    """Return the handler of each administrative API, by its API key."""
    permissions = Permissions(broker)
    return {**_of_topics(broker, permissions), **_of_cluster(broker, permissions), **_of_security()}


def _of_topics(broker: Broker, permissions: Permissions) -> dict[int, Handler]:
    topic_configs = TopicConfigs(broker.context.config.topic_defaults)
    topics = TopicHandlers(broker, permissions, topic_configs)
    alterations = AlterConfigsHandlers(broker, permissions)
    return {
        ApiKey.CREATE_TOPICS: topics.create,
        ApiKey.DELETE_TOPICS: topics.delete,
        ApiKey.CREATE_PARTITIONS: topics.create_partitions,
        ApiKey.DELETE_RECORDS: delete_records,
        ApiKey.DESCRIBE_TOPIC_PARTITIONS: DescribeTopicsHandler(broker, permissions).handle,
        ApiKey.DESCRIBE_CONFIGS: DescribeConfigsHandler(broker, permissions, topic_configs).handle,
        ApiKey.LIST_CONFIG_RESOURCES: ListConfigResourcesHandler(broker, permissions).handle,
        ApiKey.INCREMENTAL_ALTER_CONFIGS: alterations.alter_incrementally,
        ApiKey.ALTER_CONFIGS: alterations.alter,
    }


def _of_cluster(broker: Broker, permissions: Permissions) -> dict[int, Handler]:
    reassignments, transactions = ReassignmentHandlers(broker), TransactionHandlers(broker, permissions)
    return {
        ApiKey.DESCRIBE_LOG_DIRS: describe_log_dirs,
        ApiKey.ELECT_LEADERS: elect_leaders,
        ApiKey.ALTER_PARTITION_REASSIGNMENTS: reassignments.alter,
        ApiKey.LIST_PARTITION_REASSIGNMENTS: reassignments.list_moves,
        ApiKey.DESCRIBE_PRODUCERS: transactions.describe_producers,
        ApiKey.DESCRIBE_TRANSACTIONS: transactions.describe,
        ApiKey.LIST_TRANSACTIONS: transactions.list_transactions,
    }


def _of_security() -> dict[int, Handler]:
    return {
        ApiKey.DESCRIBE_ACLS: acls.describe_acls,
        ApiKey.CREATE_ACLS: acls.create_acls,
        ApiKey.DELETE_ACLS: acls.delete_acls,
        ApiKey.DESCRIBE_CLIENT_QUOTAS: quotas.describe_client_quotas,
        ApiKey.ALTER_CLIENT_QUOTAS: quotas.alter_client_quotas,
        ApiKey.DESCRIBE_USER_SCRAM_CREDENTIALS: users.describe_users,
        ApiKey.ALTER_USER_SCRAM_CREDENTIALS: users.alter_users,
        ApiKey.CREATE_DELEGATION_TOKEN: tokens.create_token,
        ApiKey.RENEW_DELEGATION_TOKEN: tokens.renew_token,
        ApiKey.EXPIRE_DELEGATION_TOKEN: tokens.expire_token,
        ApiKey.DESCRIBE_DELEGATION_TOKEN: tokens.describe_tokens,
    }
