"""The restart of all brokers, one at a time, without refused requests.

Each broker is restarted only when all brokers are alive and all replicas are in sync (see ``cluster_health``). So with
f+1 replicas, any f-1 other brokers may fail during a restart. After the restart, the broker is elected again for the
partitions whose preferred leader it is. Without this election, the broker that restarts last would lead no partition
afterwards.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from sparklog.client.admin.cluster_health import ClusterSnapshot, wait_until_whole
from sparklog.client.admin.reassignment import elect
from sparklog.client.cluster.blocking_cluster import BlockingCluster
from sparklog.client.errors import ClientTimeout
from sparklog.errors import BrokerError, ErrorCode
from sparklog.model import TopicPartition
from sparklog.protocol.messages import Ack, RestartBroker

Tell = Callable[[str], None]


def restart(cluster: BlockingCluster, broker_id: int) -> int:
    """Request a controlled shutdown of a broker, after which its supervisor starts the broker again.

    Return the broker's incarnation (the number of its registration) before the restart. This function waits neither for
    the shutdown nor for the restart.

    Raises:
        BrokerError: BROKER_NOT_AVAILABLE if the broker is not registered; INVALID_REQUEST if it has no supervisor;
            BROKER_STOPPING.
        ClientTimeout: the broker does not respond.
    """
    cluster.retrying("metadata", cluster.refresh)
    if broker_id not in cluster.metadata.brokers:
        raise BrokerError(
            ErrorCode.BROKER_NOT_AVAILABLE,
            f"broker {broker_id} is not live; the live brokers are {sorted(cluster.metadata.brokers)}",
        )
    incarnation = cluster.metadata.brokers[broker_id].incarnation

    def attempt() -> None:
        now = cluster.metadata.brokers.get(broker_id)
        if now is None or now.incarnation != incarnation:
            return  # the request took effect, and its response was lost
        try:
            cluster.ask_broker(broker_id, RestartBroker(0, incarnation), Ack)
        except BrokerError as error:
            if error.code == ErrorCode.NETWORK_EXCEPTION:
                cluster.refresh()
            raise

    cluster.retrying(f"restarting broker {broker_id}", attempt)
    return incarnation


def roll(cluster: BlockingCluster, brokers: Sequence[int] | None, *, timeout_s: float, tell: Tell) -> list[int]:
    """Restart ``brokers`` one at a time, and return the brokers that were restarted.

    If ``brokers`` is None, restart all brokers. ``timeout_s`` bounds each wait. ``tell`` is called with a line of text
    about each step.

    Raises:
        BrokerError: for the same reasons as in ``restart``.
        ClientTimeout: a broker was not alive or a replica was not in sync before a restart, or a restarted broker did
            not come back. The message has the problems. The remaining brokers were not restarted.
    """
    cluster.retrying("metadata", cluster.refresh)
    everyone = sorted(cluster.metadata.brokers)
    order = everyone if brokers is None else list(dict.fromkeys(brokers))
    for number, broker_id in enumerate(order, 1):
        name = f"broker {broker_id} ({number} of {len(order)})"
        snapshot = wait_until_whole(
            cluster, expected=everyone, timeout_s=timeout_s, what=f"waiting to restart {name}: the cluster whole"
        )
        only_replicas = sum(part.replicas == (broker_id,) for part in snapshot.newest.values())
        if only_replicas:
            tell(
                f"{name}: has the only replica of {only_replicas} partitions, which are unavailable during its restart"
            )
        before = restart(cluster, broker_id)
        tell(f"{name}: restarting; incarnation {before} ends")

        def came_back(snapshot: ClusterSnapshot, broker_id: int = broker_id, before: int = before) -> str:
            now = cluster.metadata.brokers.get(broker_id)
            if now is None or now.incarnation <= before:
                return f"broker {broker_id} has not registered again"
            return ""

        wait_until_whole(
            cluster, expected=everyone, timeout_s=timeout_s, what=f"{name}: restarted and in sync", also=came_back
        )
        moved = _give_leaderships_back(cluster, broker_id, timeout_s=timeout_s)
        incarnation = cluster.metadata.brokers[broker_id].incarnation
        tell(f"{name}: back as incarnation {incarnation}, in sync, {moved} leaderships returned")
    wait_until_whole(cluster, expected=everyone, timeout_s=timeout_s, what="after the last restart: the cluster whole")
    return order


def _give_leaderships_back(cluster: BlockingCluster, broker_id: int, *, timeout_s: float) -> int:
    """Elect ``broker_id`` wherever it is the preferred leader. Return the number of these partitions.

    Raises:
        ClientTimeout: some elections failed; the message names the first partition.
    """
    snapshot = cluster.retrying("metadata", lambda: cluster.refresh(None))
    wanted = [
        TopicPartition(topic.name, part.partition)
        for topic in snapshot.topics
        for part in topic.partitions
        if part.replicas[:1] == (broker_id,) and part.leader != broker_id
    ]

    def attempt() -> None:
        failed = elect(cluster, wanted, unclean=False, timeout_ms=_timeout_ms(cluster)).values()
        for error in failed:
            if error.code != ErrorCode.UNKNOWN_TOPIC_OR_PARTITION:  # the topic was deleted in the meantime
                raise error

    if wanted:
        try:
            cluster.retrying(f"returning leaderships to broker {broker_id}", attempt, timeout_s=timeout_s)
        except BrokerError as error:
            raise ClientTimeout(f"returning leaderships to broker {broker_id}: {error}") from error
    return len(wanted)


def _timeout_ms(cluster: BlockingCluster) -> int:
    """Return the timeout to send to a broker, so that its response arrives before the client's timeout."""
    return max(1, int(cluster.request_timeout_s * 800))
