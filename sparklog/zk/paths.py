"""Where things stand in ZooKeeper: Kafka's layout, under the connect string's chroot.

Pure names. ``/brokers/incarnations/<id>`` is persistent, its znode version is the broker's incarnation, and it keeps
that one's registration when its session has ended;
``/brokers/untrusted/<id>`` stays until a controller has seen the end of that broker's void in-sync claims;
``/brokers/retired/<id>`` names the broker's last incarnation that was proved dead by whoever saw its process end.
``/brokers/topic_ids/<id>`` lives exactly as long as the topic: a re-created topic's nodes have the same paths and may
have the same versions, so a write meant for the old one is told apart by this node only.
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
#: the driver's word to a generation of the barrier job, and what that generation reported
DIRECTIVE = "/cluster/directive"
GENERATION = "/cluster/generation"
CONTROLLER = "/controller"
CONTROLLER_EPOCH = "/controller_epoch"
CONFIG = "/config"
ISR_CHANGES = "/isr_change_notification"
DELETE_TOPICS = "/admin/delete_topics"
STOPPING = "/admin/stopping"
#: requests to elect leaders, ephemeral; each is deleted by the controller once it is carried out
ELECTIONS = "/admin/elections"
DRIVER = "/driver"
DRIVER_EPOCH = "/driver_epoch"

#: Persistent nodes every cluster has; parents before children.
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
    CONTROLLER_EPOCH,
    CONFIG,
    ISR_CHANGES,
    "/admin",
    DELETE_TOPICS,
    STOPPING,
    ELECTIONS,
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


def isr_change(broker_id: int) -> str:
    return f"{ISR_CHANGES}/{broker_id}"


def topic(name: str) -> str:
    return f"{TOPICS}/{name}"


def topic_id(identity: str) -> str:
    return f"{TOPIC_IDS}/{identity}"


def partitions(name: str) -> str:
    return f"{TOPICS}/{name}/partitions"


def partition(tp: TopicPartition) -> str:
    return f"{TOPICS}/{tp.topic}/partitions/{tp.partition}"


def state(tp: TopicPartition) -> str:
    return f"{TOPICS}/{tp.topic}/partitions/{tp.partition}/state"


def delete_topic(name: str) -> str:
    return f"{DELETE_TOPICS}/{name}"
