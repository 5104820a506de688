"""What a controller counts: one table of all counters with a sentence for each.

Each count comes with a line in the log of the driver or of ``sparklog controller``, which names the counter, and the
partitions and brokers concerned. ``docs/reference/metrics.md`` is made from this table.
"""

from __future__ import annotations

CONTROLLER_COUNTERS: dict[str, str] = {
    "controller.brokers.failed": "brokers whose registration is gone",
    "controller.brokers.held": "brokers that vanished together; the controller waits before it gives them up",
    "controller.brokers.refused": "brokers left out because they have seen epochs far above those in ZooKeeper",
    "controller.partitions.created": "partitions that got their first state",
    "controller.partitions.elected": "partitions that got another leader because theirs was gone",
    "controller.partitions.moved": "leaderships that were moved from a broker that stands",
    "controller.partitions.reassigned": "states written for a move of replicas",
    "controller.partitions.stripped": "in-sync sets from which a replica was taken that cannot be opened or was lost",
    "controller.partitions.leaderless": "partitions that lost their leader, with no in-sync replica alive",
    "controller.partitions.unclean": "unclean elections: committed records may be lost",
    "controller.partitions.recovered": "elections among replicas that all lost their page cache: the longest log leads",
    "controller.partitions.raised": "leader epochs raised because a log proves that ZooKeeper was older",
    "controller.partitions.restored": "leaders replaced because a follower has committed records that they lack",
    "controller.partitions.disputed": "partitions taken offline because two replicas each have committed records that"
    " the other lacks",
    "controller.partitions.waiting": "partitions that wait for a broker that may have what in-sync replicas lost",
    "controller.partitions.refused": "partitions whose logs have leader epochs far above those in ZooKeeper",
    "controller.cuts.refused": "partitions whose follower refused to cut committed records",
    "controller.replicas.doubted": "replicas whose logs a broker reports as lost or damaged",
    "controller.replicas.failed": "replicas that a broker cannot open",
    "controller.replicas.replaced": "replicas of brokers that stay away which are rebuilt elsewhere",
    "controller.replicas.irreplaceable": "brokers that stay away and for whose replicas there is no other broker",
    "controller.reassignments.finished": "partitions whose move has ended",
    "controller.requests.repeated": "requests to ZooKeeper that failed and were repeated",
    "controller.topics.refused": "writes of a topic's record that ZooKeeper refused",
    "controller.updates.refused": "updates that a broker refused; they are sent again",
    "controller.writes.refused": "writes of partition states that ZooKeeper refused because the node had changed",
    "controller.zookeeper.older": "times that ZooKeeper proved to be older than a broker",
    "controller.zookeeper.unreadable": "nodes that cannot be read and are skipped: the present value",
}
