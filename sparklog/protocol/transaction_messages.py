"""Messages about transactions: of clients to a coordinator, and between coordinators and the partitions' leaders."""

from __future__ import annotations

import msgspec

from sparklog.model import BrokerEndpoint, Int31
from sparklog.protocol.fields import Entries, Listed, Message, Name, PartitionResult, PeerEntries, Plain
from sparklog.protocol.group_messages import GroupOffset


class FindCoordinator(Message, frozen=True, tag="find_coordinator"):
    """Which broker coordinates this transaction or group. ``kind``: "transaction" or "group". Any broker answers; the
    internal topic is made on first use."""

    kind: str
    key: Name


class FindCoordinatorReply(Message, frozen=True, tag="find_coordinator_reply"):
    """``partition``: of the kind's internal topic; its leader is the coordinator."""

    broker: BrokerEndpoint
    partition: int


class BeginTransaction(Message, frozen=True, tag="begin_transaction"):
    """Begin, or join, the transaction of ``key`` as run ``run_id``; each call gives a producer id of its own.

    ``version`` -1: a producer's, ``run_id`` names one life of it; a begin ends what it has open. ``version`` >= 0: a
    sink's (batch id, or txnVersion); many tasks of one run join; a version at or below the last committed one is a
    replay and only told so. A run id not seen before fences all earlier ones of the key, and aborts what they have
    open; a fenced run gets INVALID_PRODUCER_EPOCH.
    ``timeout_ms``: without a sign of life for so long the transaction is aborted.
    ``turn``: which transaction of its run a producer means, counted up from 0; of a sink 0, the version says it. Key,
    run, version and turn name one transaction in all requests about it: one that comes late, when another is open,
    is refused with INVALID_TXN_STATE.
    ``by_topic``: versions count for each topic that the transaction writes to, by the topic's id. No begin is a replay
    then; which topics have the version already is asked with SettleVersion.
    """

    key: Name
    run_id: Name
    version: int
    timeout_ms: int
    turn: int = 0
    by_topic: bool = False


class BeginTransactionReply(Message, frozen=True, tag="begin_transaction_reply"):
    """``committed``: this version, or a later one, is committed already: nothing is to be written (ids are -1).
    ``run``: number of the run, counted by key in order of appearance."""

    committed: bool
    last_version: int
    producer_id: int
    producer_epoch: int
    run: int


class SettleVersion(Message, frozen=True, tag="settle_version"):
    """Which version of ``key`` is committed, of those that count for the topic ``topic_id`` if that is not empty?

    Asked by run ``run_id`` of this key, or of another one that is not to be committed beside it: what any other run has
    open under ``key`` is aborted and that run fenced, and what is decided is waited for, so that nothing is committed
    after the answer but by a run that began after it. A fenced run gets INVALID_PRODUCER_EPOCH.
    """

    key: Name
    run_id: Name
    topic_id: Name = ""


class SettleVersionReply(Message, frozen=True, tag="settle_version_reply"):
    """``last_version`` -1: none."""

    last_version: int


class AddToTransaction(Message, frozen=True, tag="add_to_transaction"):
    """Register before use: partitions that ``producer_id`` will append to, and offsets that ``group`` gets when the
    transaction commits. Durable when answered with an Ack. A sign of life."""

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
    """A sign of life; answered by an Ack, or by what the transaction has become."""

    key: Name
    run_id: Name
    version: int = -1
    turn: int = 0


class EndTransaction(Message, frozen=True, tag="end_transaction"):
    """Decide. With ``commit`` the ``winners`` (producer ids; of a producer: its own) are committed and every other
    registered one is aborted. The first durable decision about a version counts: repeating it succeeds, another run's
    gets INVALID_PRODUCER_EPOCH. Answered when all markers are written, or after ``timeout_ms`` when the decision is
    durable and they are still on their way."""

    key: Name
    run_id: Name
    version: int
    commit: bool
    winners: Plain[int]
    timeout_ms: int
    turn: int = 0


class EndTransactionReply(Message, frozen=True, tag="end_transaction_reply"):
    """``complete``: the markers are in every partition. ``replayed``: the version had been committed before."""

    complete: bool
    replayed: bool = False


class ListTransactions(Message, frozen=True, tag="list_transactions"):
    """Transactions that this broker coordinates, and keys whose last committed version is kept."""


class TransactionDescription(msgspec.Struct, frozen=True, array_like=True):
    """``state``: empty, open, committing, aborting. Times in ms since the epoch. ``participants``: producer id, epoch
    and partitions."""

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
    transactions: Listed[TransactionDescription]


class AbortTransaction(Message, frozen=True, tag="abort_transaction"):
    """An operator ends an open transaction; its run is fenced."""

    key: Name


class VerifyTransaction(Message, frozen=True, tag="verify_transaction"):
    """A leader asks: may this producer append to this partition for this transaction? Source: KIP-890."""

    key: Name
    producer_id: int
    producer_epoch: int
    topic: str
    partition: int
    topic_id: str = ""


class VerifyTransactionReply(Message, frozen=True, tag="verify_transaction_reply"):
    """It may, says the coordinator of this epoch: of the leader of its partition of the internal topic. Who knows of a
    later one does not believe it."""

    coordinator_epoch: Int31


class TransactionMarker(msgspec.Struct, frozen=True, array_like=True):
    """The end of one transaction in one partition: (producer id, epoch) of those committed and those aborted. Ids
    that have nothing open there are only fenced.

    ``topic_id``: of the topic that was written to; empty: whatever has this name. ``coordinator``: who says so, the
    partition of the internal topic and its leader epoch; -1: nobody.
    """

    topic: str
    partition: int
    committed: PeerEntries[tuple[int, int]]
    aborted: PeerEntries[tuple[int, int]]
    topic_id: str = ""
    coordinator: Int31 = -1
    coordinator_epoch: Int31 = -1


class WriteMarkers(Message, frozen=True, tag="write_markers"):
    """A coordinator tells a leader durable decisions. Writing one twice is writing it once."""

    markers: PeerEntries[TransactionMarker]


class WriteMarkersReply(Message, frozen=True, tag="write_markers_reply"):
    """NONE: the marker is committed."""

    results: Listed[PartitionResult]


class ListParticipants(Message, frozen=True, tag="list_participants"):
    """Which of these producer ids take part in transactions that this broker coordinates?"""

    producer_ids: Plain[int]


class ListParticipantsReply(Message, frozen=True, tag="list_participants_reply"):
    """``coordinators``: (partition of the internal topic, leader epoch) of all that were looked at. ``participants``:
    producer id and key; their transactions are open, or being ended."""

    coordinators: Listed[tuple[int, int]]
    participants: Listed[tuple[int, str]]


class FindHanging(Message, frozen=True, tag="find_hanging"):
    """Transactions open in partitions that this broker leads, for ``open_ms`` or longer, which no coordinator knows:
    nobody will end them, and readers of committed records wait below them."""

    open_ms: int


class HangingTransaction(msgspec.Struct, frozen=True, array_like=True):
    """``first_offset`` and ``began_ms`` (of the log's append times, ms since the epoch): of its first batch here."""

    topic: str
    partition: int
    producer_id: int
    producer_epoch: int
    first_offset: int
    began_ms: int


class FindHangingReply(Message, frozen=True, tag="find_hanging_reply"):
    transactions: Listed[HangingTransaction]


class AbortHanging(Message, frozen=True, tag="abort_hanging"):
    """To the partition's leader: end what this producer id has open there. Refused with INVALID_TXN_STATE when a
    coordinator knows it: that one ends it. Answered by an Ack when the marker is committed."""

    topic: str
    partition: int
    producer_id: int
