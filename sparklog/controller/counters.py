"""The names of a controller's counters, each with its description.

Whenever the controller increments a counter, the driver or ``sparklog controller`` logs a line with the counter and the
partitions and brokers concerned. ``docs/reference/metrics.md`` is generated from this table.
"""

from __future__ import annotations

CONTROLLER_COUNTERS: dict[str, str] = {
    "controller.brokers.failed": "brokers whose registration has disappeared",
    "controller.brokers.held": "brokers that disappeared together; the controller waits before they count as failed",
    "controller.brokers.refused": "brokers left out because they have seen epochs far above those in ZooKeeper",
    "controller.partitions.created": "partitions that got their first state",
    "controller.partitions.elected": "partitions that got another leader because theirs failed",
    "controller.partitions.moved": "leaderships that were moved away from a live broker",
    "controller.partitions.reassigned": "states written for a move of replicas",
    "controller.partitions.stripped": "ISRs that lost a replica that cannot be opened or has lost its log",
    "controller.partitions.leaderless": "partitions that lost their leader, with no in-sync replica alive",
    "controller.partitions.unclean": "unclean elections: committed records may be lost",
    "controller.partitions.recovered": "elections among replicas that all lost their page cache; the longest log wins",
    "controller.partitions.raised": "leader epochs raised because a log proves that ZooKeeper was older",
    "controller.partitions.restored": "leaders replaced because a follower has committed records that they lack",
    "controller.partitions.disputed": "partitions taken offline because two replicas each have committed records that"
    " the other lacks",
    "controller.partitions.waiting": "partitions that wait for a broker that may have what all in-sync replicas lost",
    "controller.partitions.refused": "partitions whose logs have leader epochs far above those in ZooKeeper",
    "controller.cuts.refused": "partitions whose follower refused to truncate committed records",
    "controller.replicas.doubted": "replicas whose logs a broker reports as lost or damaged",
    "controller.replicas.failed": "replicas that a broker cannot open",
    "controller.replicas.replaced": "replicas of absent brokers that are rebuilt on other brokers",
    "controller.replicas.irreplaceable": "absent brokers whose replicas no other broker can hold",
    "controller.reassignments.finished": "partitions whose reassignment has ended",
    "controller.requests.repeated": "requests to ZooKeeper that failed and were repeated",
    "controller.topics.refused": "writes of a topic's record that ZooKeeper refused",
    "controller.updates.refused": "updates that a broker refused; they are sent again",
    "controller.writes.refused": "writes of partition states that ZooKeeper refused because the node had changed",
    "controller.zookeeper.older": "times that a broker proved that ZooKeeper's data is older than its own",
    "controller.zookeeper.unreadable": "nodes that cannot be read and are skipped: the current number",
}
