"""One broker's state without its process.

Metadata and the parts for transactions are real. The replicas only record appends, and other brokers respond as the
test says.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, cast

from sparklog.broker.context import BrokerContext
from sparklog.broker.groups.group_host import GroupHost
from sparklog.broker.internal_topics import TRANSACTIONS
from sparklog.broker.lifecycle.broker import Broker
from sparklog.broker.lifecycle.request_table import request_handlers
from sparklog.broker.replication.partition import Answer, AppendRules, Batches, PendingProduce
from sparklog.config import broker_config
from sparklog.errors import BrokerError, ErrorCode
from sparklog.model import BrokerEndpoint, LeaderAndIsr, OffsetRange, TopicPartition, TopicSchema
from sparklog.protocol.messages import ControlUpdate, PartitionDecision, Reply, Request, TopicChange
from sparklog.record.schema import DEFAULT_SCHEMA, schema_message
from sparklog.storage.transactions import OpenTransaction, TransactionState, TransactionTable

TP = TopicPartition("t", 0)
TOPIC_ID = "t-id"
Ask = Callable[[int, Request], Coroutine[Any, Any, Reply]]


@dataclass
class Offsets:
    log_start: int = 10
    log_end: int = 10


@dataclass
class Log:
    open: dict[int, OpenTransaction] = field(default_factory=dict)
    offsets: Offsets = field(default_factory=Offsets)
    #: The first sequences of batches that are in the log already.
    in_log: set[int] = field(default_factory=set)

    def known(self, batches: Batches, *, begins_anywhere: bool = False) -> list[OffsetRange]:
        return [OffsetRange(0, 1) for header, _ in batches if header.first_sequence in self.in_log]

    @property
    def log_start_offset(self) -> int:
        return self.offsets.log_start

    @property
    def log_end_offset(self) -> int:
        return self.offsets.log_end

    @property
    def transactions(self) -> TransactionTable:
        return TransactionTable(TransactionState(self.open, (), ()))


@dataclass
class Replica:
    is_leader: bool = True
    leader_epoch: int = 1
    high_watermark: int = 10


@dataclass
class Hosted:
    """A replica that leads here. ``fails`` is the error that the next produce raises."""

    tp: TopicPartition = TP
    topic_id: str = TOPIC_ID
    log: Log = field(default_factory=Log)
    replica: Replica = field(default_factory=Replica)
    rules: AppendRules = field(default_factory=lambda: AppendRules(DEFAULT_SCHEMA, 0, 1 << 20, None))
    offline: str | None = None
    appended: list[PendingProduce] = field(default_factory=list)
    fails: Exception | None = None

    def require_leader(self, leader_epoch: int) -> None:
        if not self.replica.is_leader:
            raise BrokerError(ErrorCode.NOT_LEADER_OR_FOLLOWER, str(self.tp))

    def produce(self, pending: PendingProduce, *, acks: int, deadline_ms: int) -> None:
        if self.fails is not None:
            raise self.fails
        self.appended.append(pending)
        pending.on_result(Answer(ErrorCode.NONE, 0, 0, ""))


class Hosting(dict[TopicPartition, Hosted]):
    """A stand-in for ``Partitions``."""

    def require(self, tp: TopicPartition, topic_id: str = "") -> Hosted:
        if tp not in self:
            raise BrokerError(ErrorCode.UNKNOWN_TOPIC_OR_PARTITION, str(tp))
        if topic_id and self[tp].topic_id != topic_id:
            raise BrokerError(ErrorCode.INCONSISTENT_TOPIC_ID, str(tp))
        return self[tp]

    directory: Any = SimpleNamespace(topic_notes=dict)

    def __iter__(self) -> Any:
        return iter(self.values())

    @property
    def maintenance_index(self) -> Hosting:
        return self

    def in_transaction(self) -> list[Hosted]:
        return [hosted for hosted in self.values() if hosted.log.open]


class InterBrokerClient:
    """A stand-in for other brokers."""

    def __init__(self, ask: Ask) -> None:
        self._ask = ask

    async def ask(self, broker_id: int, message: Request, *, timeout_s: float, still: Callable[[], bool]) -> Reply:
        return await self._ask(broker_id, message)

    def close(self) -> None:
        """Close nothing: there are no connections."""


class Registry:
    """A stand-in for the registry with the responses ``answers``. Without them the broker is not registered yet."""

    def __init__(self) -> None:
        self.answers: object = None
        self.session_listeners: list[object] = []

    def __getattr__(self, name: str) -> Any:
        if self.answers is None:
            raise BrokerError(ErrorCode.BROKER_NOT_AVAILABLE, "broker 0 is still starting")
        return getattr(self.answers, name)


class Stage:
    """Broker 0, which leads ``TP``. Created and used in a running loop."""

    def __init__(self, ask: Ask | None = None, *, coordinator: int = 1, settings: dict[str, str] | None = None) -> None:
        self.context = BrokerContext(0, "c", log_dir="", config=broker_config(settings or {}))
        self.hosted = Hosted()
        self.partitions = Hosting({TP: self.hosted})
        self.registry = Registry()
        self.told = 0
        self.broker = Broker(
            self.context,
            cast(Any, self.partitions),
            cast(Any, self.registry),
            log_failed=_unexpected,
            restart=_unexpected,
        )
        self.handlers = request_handlers(self.broker)
        for part in (self.broker.verifications, self.broker.marker_sender, self.broker.hanging):
            part._peers = cast(Any, InterBrokerClient(ask or _nobody))
        self.tell(coordinator=coordinator)

    def tell(self, *, coordinator: int = 1, epoch: int = 5, topics: bool = True, topic_id: str = TOPIC_ID) -> None:
        """Apply the controller's update: the leader of the transactions topic's only partition, and that ``TP`` is
        here."""
        self.told += 1
        schemas = (TopicSchema(0, schema_message(DEFAULT_SCHEMA)),)
        named = [(TRANSACTIONS, "tx-id", coordinator, epoch)] + ([("t", topic_id, 0, 1)] if topics else [])
        update = ControlUpdate(
            0,
            "controller",
            1,
            1,
            True,
            tuple(BrokerEndpoint(number, "host", 9092 + number, 1) for number in range(3)),
            tuple(TopicChange(name, name_id, schemas, (), None, {}) for name, name_id, *_ in named),
            tuple(
                PartitionDecision(name, name_id, 0, LeaderAndIsr(leader, leads, (leader,), 1), leads, (leader,))
                for name, name_id, leader, leads in named
            ),
            sequence=self.told,
        )
        self.context.cache.apply(update)
        self.context.metadata_changed()

    def handle(self, connection: object, request: Request) -> None:
        """Give the request to its handler, as the connection would."""
        self.handlers[type(request)](cast(Any, connection), request, memoryview(b""))

    def group_host(self) -> GroupHost:
        """Return a coordinator of groups with its own replica."""
        return GroupHost(
            self.context,
            cast(Any, Hosted()),
            registry=cast(Any, self.registry),
            takes_part=self.broker.hanging.takes_part,
            log_start_moved=self.broker.fetches.log_start_moved,
        )


async def until(true: Callable[[], object]) -> None:
    """Let the loop turn until the condition holds."""
    end = time.monotonic() + 30
    while not true():
        assert time.monotonic() < end, "the condition did not hold in time"
        await asyncio.sleep(0.001)


async def _nobody(broker_id: int, message: Request) -> Reply:
    raise BrokerError(ErrorCode.NETWORK_EXCEPTION, f"broker {broker_id} is not there")


def _unexpected(*_: object) -> None:
    raise AssertionError("no task may fail here")
