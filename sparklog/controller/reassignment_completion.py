"""Finished reassignments of one evaluation, combined into one write per topic."""

from __future__ import annotations

from sparklog.controller import election, reassignments
from sparklog.controller.cluster_state import Partition, Topic
from sparklog.controller.effects import CREATE, StateWrite, WriteTopic


class ReassignmentCompletion:
    """The finished reassignments that one evaluation finds."""

    def __init__(self) -> None:
        self._found: dict[Topic, dict[Partition, StateWrite | None]] = {}

    def check(self, partition: Partition, standing: election.IsrLiveness) -> None:
        """Note the partition if its reassignment is finished, with its final state; None: the state stays as it is.

        A partition whose topic is being written is skipped. It is evaluated again after that.
        """
        move, topic = partition.move, partition.topic
        if move is None or topic.pending is not None or topic.rereading:
            return
        if reassignments.only_reorders(partition.replicas, move):
            self._found.setdefault(topic, {})[partition] = None
        elif partition.stored is not None:
            end = reassignments.finish(move, partition.stored, standing, unfit=partition.unfit, min_isr=topic.min_isr)
            if end is not None:
                self._found.setdefault(topic, {})[partition] = state_write(partition, end)

    def orders(self) -> list[tuple[Topic, WriteTopic]]:
        """Return one write per topic, each of at most ``MAX_FINISHED`` partitions."""
        orders = []
        for topic, found in self._found.items():
            ended = dict(list(found.items())[: reassignments.MAX_FINISHED])
            numbers = tuple(partition.tp.partition for partition in ended)
            record = reassignments.finished_record(topic.record, numbers)
            writes = tuple(write for write in ended.values() if write is not None)
            orders.append((topic, WriteTopic(record, topic.version, writes, numbers)))
        return orders


def state_write(partition: Partition, decision: election.Decision) -> StateWrite:
    stored = partition.stored
    return StateWrite(
        partition.tp,
        partition.topic.record.topic_id,
        decision.state,
        decision.leader_incarnation,
        CREATE if stored is None else stored.version,
        decision.reason,
    )
