"""The performer of the effects of a term's ``Controller``: reads and writes in ZooKeeper, and requests to brokers.

It makes no decisions. The results of effects return to the controller as events.
"""

from __future__ import annotations

import logging
import time

from sparklog.cluster.broker_connections import BrokerConnections
from sparklog.cluster.core_runner import CoreRunner
from sparklog.cluster.partition_state_io import PartitionStateIo
from sparklog.cluster.topic_io import TopicIo
from sparklog.controller.effects import (
    ControllerReport,
    DeleteTopicNodes,
    DropDeletionRequest,
    DropElection,
    Effect,
    RaiseCounters,
    ReadStates,
    ReadTopic,
    RequestLogEnds,
    Resign,
    SendUpdate,
    TrustBroker,
    WriteStates,
    WriteTopic,
)
from sparklog.controller.events import LogEndsRead, UpdateLost, UpdateReplied
from sparklog.errors import BrokerError
from sparklog.model import TopicPartition, assert_never, believed_producer_ids
from sparklog.protocol.messages import ControlUpdateReply, DescribeBroker, DescribeBrokerReply
from sparklog.zk.controller_store import ControllerStore

log = logging.getLogger(__name__)


class EffectPerformer:
    """The performer of the effects that the ``Controller`` of one term returns. Its tasks end with the term."""

    def __init__(
        self,
        runner: CoreRunner,
        store: ControllerStore,
        *,
        topics: TopicIo,
        states: PartitionStateIo,
        connections: BrokerConnections,
    ) -> None:
        self._runner = runner
        self._store = store
        self._topics = topics
        self._states = states
        self._connections = connections

    def perform(self, effect: Effect) -> None:
        """Perform an effect at once, or start a task of the term that performs it."""
        run, store = self._runner, self._store
        match effect:
            case WriteStates():
                self._states.write(effect)
            case ReadStates():
                run.start(self._states.read(effect.partitions), "read states")
            case WriteTopic():
                run.start(self._topics.write(effect), f"write topic {effect.record.name}")
            case ReadTopic():
                run.start(self._topics.read(effect.name), f"read topic {effect.name}")
            case DropElection():
                run.start(run.retry(lambda: store.drop_election(effect.name)), "drop election")
            case SendUpdate():
                run.start(self._send_update(effect), f"update broker {effect.broker.broker_id}")
            case DeleteTopicNodes():
                self._topics.delete(effect)
            case DropDeletionRequest(name, topic_id):
                run.start(run.retry(lambda: store.drop_deletion_request(name, topic_id)), "drop request")
            case TrustBroker():
                run.start(run.retry(lambda: store.trust_broker(effect.broker_id, effect.incarnation)), "trust")
            case RequestLogEnds():
                run.start(self._ask_log_ends(effect), f"ask broker {effect.broker.broker_id}")
            case ControllerReport():
                run.counters[effect.kind] += effect.count
                log.log(logging.WARNING if effect.grave else logging.INFO, "%s: %s", effect.kind, effect.detail)
            case RaiseCounters():
                run.start(self._raise_counters(effect), "raise counters")
            case Resign():
                run.finish(effect.detail)
            case _:
                assert_never(effect)

    async def _send_update(self, effect: SendUpdate) -> None:
        broker_id = effect.broker.broker_id
        try:
            reply = await self._connections.request(effect.broker, effect.update)
        except BrokerError as error:
            log.info("could not notify broker %d: %s", broker_id, error)
            self._runner.step(UpdateLost(broker_id, effect.update_id))
            return
        assert isinstance(reply, ControlUpdateReply)
        self._runner.step(UpdateReplied(broker_id, effect.update_id, reply.code, reply.failed, reply.detail))

    async def _ask_log_ends(self, effect: RequestLogEnds) -> None:
        try:
            reply = await self._connections.request(effect.broker, DescribeBroker(0))
        except BrokerError as error:
            log.info("could not query broker %d for its log end offsets: %s", effect.broker.broker_id, error)
            return
        assert isinstance(reply, DescribeBrokerReply)
        wanted = set(effect.partitions)
        ends = {
            TopicPartition(found.topic, found.partition): (found.last_epoch, found.log_end_offset)
            for found in reply.replicas
            if (found.topic, found.partition) in wanted
        }
        self._runner.step(LogEndsRead(effect.broker.broker_id, reply.incarnation, ends))

    async def _raise_counters(self, effect: RaiseCounters) -> None:
        await self._runner.retry(
            lambda: self._store.raise_counters(
                effect.controller_epoch, producer_ids=believed_producer_ids(effect.producer_ids, time.time())
            )
        )
        self._runner.finish(effect.detail)
