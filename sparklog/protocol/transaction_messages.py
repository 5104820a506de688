"""Messages about transactions: of clients to a coordinator, and between coordinators and the partitions' leaders."""

from __future__ import annotations

import msgspec

from sparklog.model import BrokerEndpoint, Int31
from sparklog.protocol.fields import Entries, Listed, Message, Name, PartitionResult, PeerEntries, Plain
from sparklog.protocol.group_messages import GroupOffset


class FindCoordinator(Message, frozen=True, tag="find_coordinator"):
    """A request for the coordinator of a transaction or group, which any broker serves.

    ``kind`` is "transaction" or "group". The internal topic is created on first use.
    """

    kind: str
    key: Name


class FindCoordinatorReply(Message, frozen=True, tag="find_coordinator_reply"):
    """The reply to FindCoordinator.

    ``partition`` is the partition of the internal topic for this kind; its leader ``broker`` is the coordinator.
    """

    broker: BrokerEndpoint
    partition: int


class BeginTransaction(Message, frozen=True, tag="begin_transaction"):
    """A request to begin, or join, the transaction of ``key`` as run ``run_id``.

    Each call returns a different producer id.

    - ``version`` -1 is a producer's transaction, and ``run_id`` names one life of the producer; a begin ends its open
      transaction.
    - ``version`` >= 0 is a sink's (batch id, or txnVersion), and many tasks of one run join. A version at or below the
      last committed one is a replay: the reply only reports that.
    - A run id that was not seen before fences all earlier ones of the key, and aborts their open transactions; a fenced
      run gets INVALID_PRODUCER_EPOCH.
    - ``timeout_ms``: without a request of its run for this time the transaction is aborted.
    - ``turn``: the number of a producer's transaction in its run, from 0; 0 for a sink, which has the version. Key,
      run, version and turn name one transaction in all requests about it: a late request, after another transaction was
      begun, is refused with INVALID_TXN_STATE.
    - ``by_topic``: versions count for each topic that the transaction writes to, by the topic's id. Then no begin is a
      replay; SettleVersion returns the version of each topic.
    """

    key: Name
    run_id: Name
    version: int
    timeout_ms: int
    turn: int = 0
    by_topic: bool = False


class BeginTransactionReply(Message, frozen=True, tag="begin_transaction_reply"):
    """The reply to BeginTransaction.

    ``committed`` means that this version, or a later one, is already committed: nothing has to be written (ids are -1).
    ``run`` is the number of the run, counted by key in order of appearance.
    """

    committed: bool
    last_version: int
    producer_id: int
    producer_epoch: int
    run: int


class SettleVersion(Message, frozen=True, tag="settle_version"):
    """A request for the committed version of ``key``, or of those that count for ``topic_id`` if that is not empty.

    The sender is run ``run_id`` of this key, or of another key that must not commit beside this one. The open
    transaction of any other run of ``key`` is aborted and that run fenced, and the reply waits for decided
    transactions. So after the reply only a run that begins later can commit. A fenced run gets INVALID_PRODUCER_EPOCH.
    """

    key: Name
    run_id: Name
    topic_id: Name = ""


class SettleVersionReply(Message, frozen=True, tag="settle_version_reply"):
    """The reply to SettleVersion. ``last_version`` -1 means none."""

    last_version: int


class AddToTransaction(Message, frozen=True, tag="add_to_transaction"):
    """A registration before use, which also keeps the transaction alive.

    It names partitions that ``producer_id`` will append to, and offsets that ``group`` gets when the transaction
    commits. It is durable at its reply, an Ack.
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
    """A request that keeps the transaction alive. The reply is an Ack, or an error with the transaction's end."""

    key: Name
    run_id: Name
    version: int = -1
    turn: int = 0


class EndTransaction(Message, frozen=True, tag="end_transaction"):
    """A decision about a transaction.

    With ``commit`` the ``winners`` (producer ids; a producer's own) are committed and every other registered one is
    aborted. The first durable decision about a version counts: its repetition succeeds, and another run's decision gets
    INVALID_PRODUCER_EPOCH. The reply follows after all markers are written, or after ``timeout_ms`` if the decision is
    durable and some markers are not.
    """

    key: Name
    run_id: Name
    version: int
    commit: bool
    winners: Plain[int]
    timeout_ms: int
    turn: int = 0


class EndTransactionReply(Message, frozen=True, tag="end_transaction_reply"):
    """The reply to EndTransaction.

    ``complete`` means that every partition has its marker. ``replayed`` means that the version had been committed
    before.
    """

    complete: bool
    replayed: bool = False


class ListTransactions(Message, frozen=True, tag="list_transactions"):
    """A request for the transactions that this broker coordinates, and for keys with a committed version."""


class DescribedTransaction(msgspec.Struct, frozen=True, array_like=True):
    """A transaction.

    ``state`` is empty, open, committing or aborting.

    Times are in ms since the Unix epoch. ``participants`` have producer id, epoch and partitions.
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


class ListTransactionsReply(Message, frozen=True, tag="list_transactions_reply"):
    transactions: Listed[DescribedTransaction]


class AbortTransaction(Message, frozen=True, tag="abort_transaction"):
    """An operator's request to abort an open transaction; its run is fenced."""

    key: Name


class VerifyTransaction(Message, frozen=True, tag="verify_transaction"):
    """A leader's request to verify that a producer may append to this partition in this transaction.

    Source: KIP-890.
    """

    key: Name
    producer_id: int
    producer_epoch: int
    topic: str
    partition: int
    topic_id: str = ""


class VerifyTransactionReply(Message, frozen=True, tag="verify_transaction_reply"):
    """The permission of a transaction's coordinator to append.

    ``coordinator_epoch`` is the leader epoch of the coordinator's partition of the internal topic. A leader that knows
    a later epoch ignores the reply.
    """

    coordinator_epoch: Int31


class TransactionMarker(msgspec.Struct, frozen=True, array_like=True):
    """The end of one transaction in one partition: (producer id, epoch) of those committed and those aborted.

    Ids without an open transaction there are only fenced.

    ``topic_id`` is that of the written topic; empty means any topic with this name. ``coordinator`` is the sender: the
    partition of the internal topic, with its leader epoch; -1 means none.
    """

    topic: str
    partition: int
    committed: PeerEntries[tuple[int, int]]
    aborted: PeerEntries[tuple[int, int]]
    topic_id: str = ""
    coordinator: Int31 = -1
    coordinator_epoch: Int31 = -1


class WriteMarkers(Message, frozen=True, tag="write_markers"):
    """A coordinator's durable decisions for a leader. The request is idempotent."""

    markers: PeerEntries[TransactionMarker]


class WriteMarkersReply(Message, frozen=True, tag="write_markers_reply"):
    """The reply to WriteMarkers. NONE means that the marker is committed."""

    results: Listed[PartitionResult]


class ListParticipants(Message, frozen=True, tag="list_participants"):
    """A request for those of these producer ids that take part in transactions that this broker coordinates."""

    producer_ids: Plain[int]


class ListParticipantsReply(Message, frozen=True, tag="list_participants_reply"):
    """The reply to ListParticipants.

    ``coordinators`` are (partition of the internal topic, leader epoch) of all examined coordinators. ``participants``
    are producer id and key of open or ending transactions.
    """

    coordinators: Listed[tuple[int, int]]
    participants: Listed[tuple[int, str]]


class FindHanging(Message, frozen=True, tag="find_hanging"):
    """A request for hanging transactions of partitions that this broker leads, open for at least ``open_ms``.

    No coordinator knows them, so they never end, and read_committed consumers wait below them.
    """

    open_ms: int


class FoundHangingTransaction(msgspec.Struct, frozen=True, array_like=True):
    """A hanging transaction.

    ``first_offset`` and ``began_ms`` (by the log's append times, ms since the Unix epoch) are those of its first batch
    here.
    """

    topic: str
    partition: int
    producer_id: int
    producer_epoch: int
    first_offset: int
    began_ms: int


class FindHangingReply(Message, frozen=True, tag="find_hanging_reply"):
    transactions: Listed[FoundHangingTransaction]


class AbortHanging(Message, frozen=True, tag="abort_hanging"):
    """A request to the partition's leader to end the transaction that this producer id has open there.

    It is refused with INVALID_TXN_STATE if a coordinator knows the transaction, because that one ends it. The reply is
    an Ack after the marker is committed.
    """

    topic: str
    partition: int
    producer_id: int
