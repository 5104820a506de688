"""The paths of nodes in ZooKeeper, below the chroot of the connect string. The paths follow Kafka's layout.

``/brokers/incarnations/<id>`` is persistent. Its znode version is the broker's incarnation, and it keeps the
registration of that incarnation after the session has ended. ``/brokers/untrusted/<id>`` marks a broker whose logs may
lack acknowledged records, so the controller ignores its earlier ISR memberships. The node exists until a controller
finds that no such membership is left. ``/brokers/retired/<id>`` has the incarnation of a broker process that a
supervisor proved dead. ``/brokers/topic_ids/<id>`` exists exactly as long as the topic. A recreated topic's nodes have
the same paths and may have the same versions, so only a check of this node makes a late write for the old topic fail.
"""

from __future__ import annotations

from sparklog.model import TopicPartition

CLUSTER_ID = "/cluster/id"
BROKER_IDS = "/brokers/ids"
INCARNATIONS = "/brokers/incarnations"
UNTRUSTED = "/brokers/untrusted"
RETIRED = "/brokers/retired"
BROKER_ID_SEQUENCE = "/brokers/seqid"
PRODUCER_IDS = "/brokers/producer_ids"
TOPICS = "/brokers/topics"
TOPIC_IDS = "/brokers/topic_ids"
#: The ids of the most recently deleted topics, as names of the child nodes.
DELETED_TOPICS = "/brokers/deleted_topics"
#: The driver's instructions to a generation (one run of the barrier job), and the report of that generation.
DIRECTIVE = "/cluster/directive"
GENERATION = "/cluster/generation"
#: A node that is created when the driver protects its embedded ZooKeeper against sessions without the cluster's secret.
#: Its data are the ids of the secrets for which the protection is complete.
PROTECTED = "/cluster/protected"
#: A node that is created when all brokers prove that they know the cluster's secret. It is never deleted. From then on
#: every broker must prove that it knows the secret.
PROOF_REQUIRED = "/cluster/proof_required"
CONTROLLER = "/controller"
CONTROLLER_EPOCH = "/controller_epoch"
CONFIG = "/config"
#: Credentials and quotas of users, and quotas of client ids and addresses, as Kafka stores them.
USERS = "/config/users"
QUOTAS_OF_CLIENTS = "/config/clients"
QUOTAS_OF_ADDRESSES = "/config/ips"
#: The index of all quotas, see ``quota_store``.
QUOTAS = "/config/quotas"
ISR_CHANGES = "/isr_change_notification"
DELETE_TOPICS = "/admin/delete_topics"
STOPPING = "/admin/stopping"
#: Requests to elect leaders. Each is an ephemeral node, which the controller deletes when the request is finished.
ELECTIONS = "/admin/elections"
#: Replicas that refuse to truncate committed records that their leaders lack. Each is an ephemeral node.
TRUNCATION_REFUSALS = "/admin/cut_refusals"
#: The ACLs of the cluster, one node for each resource pattern, and the names of the nodes that changed last.
ACLS = "/acls"
ACL_CHANGES = "/acls_changes"
DRIVER = "/driver"
DRIVER_EPOCH = "/driver_epoch"

#: The delegation tokens.
TOKENS = "/config/tokens"
#: Only sessions that have proved an identity to ZooKeeper may read these nodes and all nodes below them.
_SECRET = (USERS, TOKENS, ACLS, ACL_CHANGES, QUOTAS)

#: The persistent nodes that every cluster has, parents before children.
BASE = (
    "/cluster",
    "/brokers",
    BROKER_IDS,
    INCARNATIONS,
    UNTRUSTED,
    RETIRED,
    BROKER_ID_SEQUENCE,
    PRODUCER_IDS,
    TOPICS,
    TOPIC_IDS,
    DELETED_TOPICS,
    CONTROLLER_EPOCH,
    CONFIG,
    ISR_CHANGES,
    "/admin",
    DELETE_TOPICS,
    STOPPING,
    ELECTIONS,
    TRUNCATION_REFUSALS,
    DRIVER_EPOCH,
)
#: The nodes of a cluster that have no parent but the root.
TOP = frozenset("/" + path.split("/")[1] for path in (*BASE, *_SECRET, CONTROLLER, DRIVER))


def is_secret(path: str) -> bool:
    """Return whether sessions without the cluster's credentials must not even read this node."""
    return path.startswith(_SECRET) and any(path == root or path.startswith(f"{root}/") for root in _SECRET)


def broker(broker_id: int) -> str:
    return f"{BROKER_IDS}/{broker_id}"


def incarnation(broker_id: int) -> str:
    return f"{INCARNATIONS}/{broker_id}"


def untrusted(broker_id: int) -> str:
    return f"{UNTRUSTED}/{broker_id}"


def retired(broker_id: int) -> str:
    return f"{RETIRED}/{broker_id}"


def stopping(broker_id: int) -> str:
    return f"{STOPPING}/{broker_id}"


def election(request_id: str) -> str:
    return f"{ELECTIONS}/{request_id}"


def truncation_refusal(name: str) -> str:
    return f"{TRUNCATION_REFUSALS}/{name}"


def isr_change(broker_id: int) -> str:
    return f"{ISR_CHANGES}/{broker_id}"


def topic(name: str) -> str:
    return f"{TOPICS}/{name}"


def topic_id(identity: str) -> str:
    return f"{TOPIC_IDS}/{identity}"


def deleted_topic(identity: str) -> str:
    return f"{DELETED_TOPICS}/{identity}"


def partitions(name: str) -> str:
    return f"{TOPICS}/{name}/partitions"


def partition(tp: TopicPartition) -> str:
    return f"{TOPICS}/{tp.topic}/partitions/{tp.partition}"


def state(tp: TopicPartition) -> str:
    return f"{TOPICS}/{tp.topic}/partitions/{tp.partition}/state"


def delete_topic(name: str) -> str:
    return f"{DELETE_TOPICS}/{name}"
