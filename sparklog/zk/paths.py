"""Where things stand in ZooKeeper: Kafka's layout, under the connect string's chroot.

Pure names. ``/brokers/incarnations/<id>`` is persistent and its znode version is the broker's incarnation;
``/brokers/untrusted/<id>`` stays until a controller has stripped that broker's void in-sync claims.
"""

from __future__ import annotations

from sparklog.model import TopicPartition

CLUSTER_ID = "/cluster/id"
BROKER_IDS = "/brokers/ids"
INCARNATIONS = "/brokers/incarnations"
UNTRUSTED = "/brokers/untrusted"
BROKER_ID_SEQUENCE = "/brokers/seqid"
PRODUCER_IDS = "/brokers/producer_ids"
TOPICS = "/brokers/topics"
CONTROLLER = "/controller"
CONTROLLER_EPOCH = "/controller_epoch"
CONFIG = "/config"
ISR_CHANGES = "/isr_change_notification"
DELETE_TOPICS = "/admin/delete_topics"
STOPPING = "/admin/stopping"
DRIVER = "/driver"
DRIVER_EPOCH = "/driver_epoch"

#: Persistent nodes every cluster has; parents before children.
BASE = (
    "/cluster",
    "/brokers",
    BROKER_IDS,
    INCARNATIONS,
    UNTRUSTED,
    BROKER_ID_SEQUENCE,
    PRODUCER_IDS,
    TOPICS,
    CONTROLLER_EPOCH,
    CONFIG,
    ISR_CHANGES,
    "/admin",
    DELETE_TOPICS,
    STOPPING,
    DRIVER_EPOCH,
)


def broker(broker_id: int) -> str:
    return f"{BROKER_IDS}/{broker_id}"


def incarnation(broker_id: int) -> str:
    return f"{INCARNATIONS}/{broker_id}"


def untrusted(broker_id: int) -> str:
    return f"{UNTRUSTED}/{broker_id}"


def stopping(broker_id: int) -> str:
    return f"{STOPPING}/{broker_id}"


def topic(name: str) -> str:
    return f"{TOPICS}/{name}"


def partitions(name: str) -> str:
    return f"{TOPICS}/{name}/partitions"


def partition(tp: TopicPartition) -> str:
    return f"{TOPICS}/{tp.topic}/partitions/{tp.partition}"


def state(tp: TopicPartition) -> str:
    return f"{TOPICS}/{tp.topic}/partitions/{tp.partition}/state"


def delete_topic(name: str) -> str:
    return f"{DELETE_TOPICS}/{name}"
