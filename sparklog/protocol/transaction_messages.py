"""Messages about transactions, from clients to coordinators, and between coordinators and the partitions' leaders."""

from __future__ import annotations

import msgspec

from sparklog.model import BrokerEndpoint, Int31
from sparklog.protocol.fields import Entries, Listed, Message, Name, PartitionResult, PeerEntries, Plain
from sparklog.protocol.group_messages import GroupOffset


class FindCoordinator(Message, frozen=True, tag="find_coordinator"):
    """A request for the coordinator of a transaction or group. Any broker can reply.

    ``kind`` is "transaction" or "group". The first request of a kind creates its internal topic.
    """

    kind: str
    key: Name


class FindCoordinatorReply(Message, frozen=True, tag="find_coordinator_reply"):
    """The reply to FindCoordinator.

    ``partition`` is a partition of the internal topic for transactions or groups. Its leader, ``broker``, is the
    coordinator.
    """

    broker: BrokerEndpoint
    partition: int
    throttle_time_ms: int = 0


class BeginTransaction(Message, frozen=True, tag="begin_transaction"):
    """A request to begin a transaction of ``key``, or to join it. Each reply has a different producer id.

    ``key`` is the transactional id of a producer, or the key of a Spark sink. ``run_id`` identifies a run: the time
    from the start of a producer, or of a Spark query, to its end. A new run id fences all earlier runs of the key, and
    aborts their open transactions. A fenced run gets INVALID_PRODUCER_EPOCH.

    - ``version`` -1: a transaction of a producer. If the run has an open transaction, the request ends it.
    - ``version`` >= 0: a transaction of a Spark sink. The version is the batch id (or txnVersion) that it writes. Many
      tasks of one run join it. If this version or a later one is already committed, this is a replay, and the reply has
      ``committed``.
    - ``timeout_ms``: the coordinator aborts the transaction if its run sends no request for this time.
    - ``turn``: the number of a producer's transaction in its run, from 0 on. It is 0 for a sink, whose transactions
      differ by their version. Key, run, version and turn identify a transaction in all requests about it. After another
      transaction has begun, the coordinator refuses a late request with INVALID_TXN_STATE.
    - ``by_topic``: the coordinator keeps a separate last committed version for each topic (by its topic id) that the
      transaction writes to. Then the reply never reports a replay; SettleVersion returns the version of one topic.
    """

    key: Name
    run_id: Name
    version: int
    timeout_ms: int
    turn: int = 0
    by_topic: bool = False


class BeginTransactionReply(Message, frozen=True, tag="begin_transaction_reply"):
    """The reply to BeginTransaction.

    ``committed`` means that the requested version or a later one is already committed. Then the sender must not write
    anything, and the producer id is -1. ``run`` is the number of the sender's run (see BeginTransaction) among all runs
    of the key, in the order in which they began.
    """

    committed: bool
    last_version: int
    producer_id: int
    producer_epoch: int
    run: int
    throttle_time_ms: int = 0


class SettleVersion(Message, frozen=True, tag="settle_version"):
    """A request for the last version that was committed under ``key``, the key of a Spark sink.

    The version is a batch id (or txnVersion). It must not change after the reply. If ``topic_id`` is not empty, the
    request is for the version of this topic (see ``by_topic`` of BeginTransaction).

    The sender is the run ``run_id`` (see BeginTransaction) of this key, or of another key that must not commit at the
    same time as this one. The coordinator fences all other runs of ``key`` and aborts their open transactions. It
    replies when the transactions whose commit or abort was already decided have ended. So after the reply only a run
    that begins later can commit. If the sender's run is fenced, it gets INVALID_PRODUCER_EPOCH.
    """

    key: Name
    run_id: Name
    topic_id: Name = ""


class SettleVersionReply(Message, frozen=True, tag="settle_version_reply"):
    """The reply to SettleVersion. ``last_version`` is -1 if no version is committed."""

    last_version: int
    throttle_time_ms: int = 0


class AddToTransaction(Message, frozen=True, tag="add_to_transaction"):
    """A request to add partitions or consumer offsets to a transaction.

    ``producer_id`` may append to ``partitions`` only after the reply. ``offsets`` are committed for ``group`` when the
    transaction commits. The coordinator replies with an Ack when the addition is durable. The request also keeps the
    transaction alive.
    """

    key: Name
    run_id: Name
    producer_id: int
    producer_epoch: int
    partitions: Entries[tuple[str, int]] = ()
    group: Name = ""
    offsets: Entries[GroupOffset] = ()
    version: int = -1
    turn: int = 0


class TouchTransaction(Message, frozen=True, tag="touch_transaction"):
    """A request that keeps a transaction alive: its timeout starts again.

    The reply is an Ack, or an error if the transaction has ended.
    """

    key: Name
    run_id: Name
    version: int = -1
    turn: int = 0


class EndTransaction(Message, frozen=True, tag="end_transaction"):
    """A request to commit or abort a transaction.

    With ``commit`` the records of the producer ids in ``winners`` are committed, and those of all other producer ids of
    the transaction are aborted. (Of a Spark task's attempts, only one is a winner. A producer is its own winner.)

    The first durable decision to commit or abort a transaction is final. The same run (see BeginTransaction) may repeat
    the request; another run gets INVALID_PRODUCER_EPOCH. The coordinator replies when all markers are written. If the
    decision is durable and some markers are not written yet, it replies after ``timeout_ms``.
    """

    key: Name
    run_id: Name
    version: int
    commit: bool
    winners: Plain[int]
    timeout_ms: int
    turn: int = 0


class EndTransactionReply(Message, frozen=True, tag="end_transaction_reply"):
    """The reply to EndTransaction, after the decision is durable.

    ``complete`` means that every partition has its marker. ``replayed`` means that the version of a Spark sink's
    transaction was already committed before this request.
    """

    complete: bool
    replayed: bool = False
    throttle_time_ms: int = 0


class ListTransactions(Message, frozen=True, tag="list_transactions"):
    """A request for the transactions that this broker coordinates, by transactional id or key of a Spark sink.

    The reply also has the ids and keys without an open transaction. Their state is "empty".
    """


class DescribedTransaction(msgspec.Struct, frozen=True, array_like=True):
    """One transaction, in a ListTransactionsReply.

    ``state`` is "empty", "open", "committing" or "aborting". Times are in ms since the Unix epoch. Each of the
    ``participants`` has a producer id, a producer epoch and partitions. The last two fields are the producer id and
    epoch of the Kafka producer that has the transactional id, or -1.
    """

    key: str
    state: str
    run_id: str
    run: int
    version: int
    last_version: int
    began_ms: int
    deadline_ms: int
    participants: Listed[tuple[int, int, Listed[tuple[str, int]]]]
    kafka_producer_id: int = -1
    kafka_producer_epoch: int = -1


class ListTransactionsReply(Message, frozen=True, tag="list_transactions_reply"):
    """The reply to ListTransactions: the transactions that the broker coordinates."""

    transactions: Listed[DescribedTransaction]
    throttle_time_ms: int = 0


class AbortTransaction(Message, frozen=True, tag="abort_transaction"):
    """An operator's request to abort the open transaction of a key.

    The coordinator also fences the producer or the Spark query that has begun the transaction.
    """

    key: Name


class VerifyTransaction(Message, frozen=True, tag="verify_transaction"):
    """A leader's request to the coordinator to confirm that a producer may append to a partition in a transaction.

    With ``adds`` the coordinator first adds the partition to the transaction of a Kafka producer, and begins the
    transaction if none is open. With a ``group`` the coordinator adds the group's ``offsets`` instead of the partition.
    If ``adds`` is false, the group must already be part of the open transaction. Source: KIP-890.
    """

    key: Name
    producer_id: int
    producer_epoch: int
    topic: str
    partition: int
    topic_id: str = ""
    adds: bool = False
    group: Name = ""
    offsets: Entries[GroupOffset] = ()


class VerifyTransactionReply(Message, frozen=True, tag="verify_transaction_reply"):
    """The reply to VerifyTransaction if the producer may append. Otherwise the reply is an ErrorReply.

    ``coordinator_epoch`` is the leader epoch of the coordinator's partition of the internal topic. A leader that knows
    a later epoch ignores the reply. ``decision`` is the number of commits and aborts that the coordinator has decided
    for the key so far. ``decision`` is -1 if the producer is not a Kafka producer.
    """

    coordinator_epoch: Int31
    decision: int = -1


class TransactionMarker(msgspec.Struct, frozen=True, array_like=True):
    """A marker that ends one transaction in one partition.

    ``committed`` and ``aborted`` have the producer ids and producer epochs whose records are committed or aborted. A
    producer id without an open transaction in this partition is only fenced.

    ``topic_id`` is the id of the topic that the transaction has written to. If it is empty, the marker is valid for any
    topic with this name. ``coordinator`` is the coordinator's partition of the internal topic, and
    ``coordinator_epoch`` is the leader epoch of that partition. Both are -1 if no coordinator has sent the marker.
    ``decision`` is the number of this commit or abort among all decisions about transactions of the key, or -1.
    """

    topic: str
    partition: int
    committed: PeerEntries[tuple[int, int]]
    aborted: PeerEntries[tuple[int, int]]
    topic_id: str = ""
    coordinator: Int31 = -1
    coordinator_epoch: Int31 = -1
    decision: int = -1


class WriteMarkers(Message, frozen=True, tag="write_markers"):
    """A coordinator's request to a leader to write markers of transactions.

    The decisions to commit or abort are already durable. The request is idempotent.
    """

    markers: PeerEntries[TransactionMarker]


class WriteMarkersReply(Message, frozen=True, tag="write_markers_reply"):
    """The reply to WriteMarkers: one result per marker. The code NONE means that the marker is committed in the log."""

    results: Listed[PartitionResult]


class ListParticipants(Message, frozen=True, tag="list_participants"):
    """A request to find out which of these producer ids take part in transactions that the broker coordinates."""

    producer_ids: Plain[int]


class ListParticipantsReply(Message, frozen=True, tag="list_participants_reply"):
    """The reply to ListParticipants.

    ``coordinators`` has the partition of the internal topic and the leader epoch for each coordinator on this broker.
    ``participants`` has each producer id that takes part in an open or ending transaction, with the transactional key.
    """

    coordinators: Listed[tuple[int, int]]
    participants: Listed[tuple[int, str]]


class FindHanging(Message, frozen=True, tag="find_hanging"):
    """A request for the hanging transactions of the partitions that this broker leads.

    A hanging transaction has been open for at least ``open_ms``, and no coordinator knows the transaction. So the
    transaction never ends, and ``read_committed`` consumers stop before its first record.
    """

    open_ms: int


class FoundHangingTransaction(msgspec.Struct, frozen=True, array_like=True):
    """A hanging transaction in one partition.

    ``first_offset`` is the offset of its first batch in this partition. ``began_ms`` is the append time of that batch,
    in ms since the Unix epoch.
    """

    topic: str
    partition: int
    producer_id: int
    producer_epoch: int
    first_offset: int
    began_ms: int


class FindHangingReply(Message, frozen=True, tag="find_hanging_reply"):
    """The reply to FindHanging: the hanging transactions that the broker has found."""

    transactions: Listed[FoundHangingTransaction]
    throttle_time_ms: int = 0


class AbortHanging(Message, frozen=True, tag="abort_hanging"):
    """A request to a partition's leader to abort the open transaction of this producer id in this partition.

    If a coordinator knows the transaction, the leader refuses the request with INVALID_TXN_STATE, because the
    coordinator will end the transaction. The leader replies with an Ack when the abort marker is committed.
    """

    topic: str
    partition: int
    producer_id: int
