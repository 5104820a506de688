"""The paths of nodes in ZooKeeper, which follow Kafka's layout, under the connect string's chroot.

``/brokers/incarnations/<id>`` is persistent. Its znode version is the broker's incarnation, and it keeps that
incarnation's registration after its session has ended. ``/brokers/untrusted/<id>`` exists until a controller has seen
the end of that broker's void ISR memberships. ``/brokers/retired/<id>`` has the broker's last incarnation that the
supervisor of its process proved dead. ``/brokers/topic_ids/<id>`` exists exactly as long as the topic. A recreated
topic's nodes have the same paths and may have the same versions, so only this node distinguishes a write for the old
topic.
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
#: ids of the newest deleted topics, as names of the child nodes
DELETED_TOPICS = "/brokers/deleted_topics"
#: the driver's directive to a generation of the barrier job, and the report of that generation
DIRECTIVE = "/cluster/directive"
GENERATION = "/cluster/generation"
#: created when the driver closes its embedded ZooKeeper to sessions without the cluster's secret; its data are the ids
#: of the secrets for which that is finished
PROTECTED = "/cluster/protected"
#: created after every broker proves the cluster's secret, and never deleted: from then on each broker has to
PROOF_REQUIRED = "/cluster/proof_required"
CONTROLLER = "/controller"
CONTROLLER_EPOCH = "/controller_epoch"
CONFIG = "/config"
ISR_CHANGES = "/isr_change_notification"
DELETE_TOPICS = "/admin/delete_topics"
STOPPING = "/admin/stopping"
#: requests to elect leaders, ephemeral; the controller deletes each after it is finished
ELECTIONS = "/admin/elections"
#: replicas that refuse to truncate committed records that their leaders lack; each node is ephemeral
CUT_REFUSALS = "/admin/cut_refusals"
DRIVER = "/driver"
DRIVER_EPOCH = "/driver_epoch"

#: Persistent nodes of every cluster; parents before children.
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
    CUT_REFUSALS,
    DRIVER_EPOCH,
)


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


def cut_refusal(name: str) -> str:
    return f"{CUT_REFUSALS}/{name}"


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
