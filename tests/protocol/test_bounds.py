"""Tests that decoding bounds every list of every message: a peer chooses a list's length, and the broker has one
thread for all peers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, get_args

import msgspec
import msgspec.inspect as inspection
import pytest

from sparklog.errors import ErrorCode
from sparklog.model import LeaderAndIsr
from sparklog.net.greeting import Credentials
from sparklog.protocol import local_reads
from sparklog.protocol.connection import ImmediateAnswer, ServerEnd, hello
from sparklog.protocol.fields import (
    MAX_COLUMNS,
    MAX_ENTRIES,
    MAX_LISTED,
    MAX_PEER_ENTRIES,
    MAX_PLAIN,
    MAX_SETTINGS,
)
from sparklog.protocol.frames import encode_frame
from sparklog.protocol.header_limits import MAX_HEADER_BYTES, MIB, beginning_of
from sparklog.protocol.messages import (
    CONSUMER,
    CommitOffsets,
    ControlUpdate,
    ErrorReply,
    Fetch,
    FetchPartition,
    GroupOffset,
    HelloReply,
    Metadata,
    PartitionDecision,
    Prove,
    Reply,
    Request,
    TransactionMarker,
    WriteMarkers,
    decode_request,
    encode_message,
)
from sparklog.protocol.proof import Authenticator, Identity, KeyRing, Secret, check, offer
from sparklog.protocol.received import ReceivedRequest
from sparklog.protocol.senders import SenderKind

REQUESTS: tuple[type, ...] = get_args(Request)
OTHERS: tuple[type, ...] = (*get_args(Reply), local_reads.OpenSegment, local_reads.OpenedSegment)
#: Requests that only a controller sends. They grow with the cluster.
OF_CONTROLLERS = {"ControlUpdate"}
#: Lists of requests that may be longer than ``MAX_ENTRIES``: brokers send them, or they contain names or numbers.
OF_BROKERS = {
    "Fetch.partitions",
    "Fetch.forgotten",
    "CommitOffsets.offsets",
    "WriteMarkers.markers",
    "WriteMarkers.markers[].committed",
    "WriteMarkers.markers[].aborted",
}
OF_PLAIN = {
    "Metadata.topics",
    "EndTransaction.winners",
    "ListParticipants.producer_ids",
    "Heartbeat.owned",
    "Heartbeat.owned[].partitions",
    "Heartbeat.topics",
}


class Bound:
    """One list or mapping of a message type. ``path`` leads to it: a field of the message, then the fields inside
    it."""

    def __init__(self, path: str, bound: int | None) -> None:
        self.path = path
        self.bound = bound


def bounds_of(message: type) -> list[Bound]:
    return list(_bounds(inspection.type_info(message), message.__name__, ()))


def _bounds(found: Any, path: str, inside: tuple[type, ...]) -> Iterator[Bound]:
    match found:
        case inspection.StructType(cls=cls, fields=fields):
            assert cls not in inside, f"{path}: a recursive message has no bound"
            for field in fields:
                yield from _bounds(field.type, f"{path}.{field.name}", (*inside, cls))
        case inspection.UnionType(types=types):
            for one in types:
                yield from _bounds(one, path, inside)
        case inspection.TupleType(item_types=types):
            for number, one in enumerate(types):
                yield from _bounds(one, f"{path}[{number}]", inside)
        case inspection.Metadata(type=one):
            yield from _bounds(one, path, inside)
        case inspection.VarTupleType() | inspection.ListType() | inspection.SetType() | inspection.FrozenSetType():
            yield Bound(path, found.max_length)
            yield from _bounds(found.item_type, f"{path}[]", inside)
        case inspection.DictType():
            yield Bound(path, found.max_length)
            yield from _bounds(found.key_type, f"{path}[key]", inside)
            yield from _bounds(found.value_type, f"{path}[value]", inside)
        case _:
            plain = (inspection.IntType, inspection.StrType, inspection.BytesType, inspection.BoolType)
            assert isinstance(found, (*plain, inspection.FloatType, inspection.NoneType)), f"{path}: {found}"


@pytest.mark.parametrize("message", (*REQUESTS, *OTHERS), ids=lambda message: message.__name__)
def test_every_list_of_a_message_is_bounded(message: type) -> None:
    unbounded = [bound.path for bound in bounds_of(message) if bound.bound is None]
    assert not unbounded, "a list has no bound: declare it with a type from sparklog.protocol.fields"


@pytest.mark.parametrize(
    "message", [one for one in REQUESTS if one.__name__ not in OF_CONTROLLERS], ids=lambda message: message.__name__
)
def test_the_lists_of_a_request_have_the_bounds_of_requests(message: type) -> None:
    too_long = {bound.path for bound in bounds_of(message) if bound.bound and bound.bound > MAX_ENTRIES}
    assert too_long <= OF_BROKERS | OF_PLAIN
    assert not [bound for bound in bounds_of(message) if bound.path in OF_PLAIN and bound.bound != MAX_PLAIN]
    assert not [bound for bound in bounds_of(message) if bound.path in OF_BROKERS and bound.bound != MAX_PEER_ENTRIES]


def test_the_walk_finds_lists_at_any_depth() -> None:
    """Without this the tests above would pass for messages that the walk does not understand."""
    paths = {bound.path: bound.bound for message in (*REQUESTS, *OTHERS) for bound in bounds_of(message)}
    assert paths["Fetch.partitions[].columns"] == MAX_COLUMNS
    assert paths["CreateTopic.assignment[]"] == 1000
    assert paths["AlterReassignments.moves[].target"] == 1000
    assert paths["WriteMarkers.markers[].committed"] == MAX_PEER_ENTRIES
    assert paths["CommitOffsets.offsets"] == MAX_PEER_ENTRIES
    assert paths["ListOffsets.partitions"] == MAX_ENTRIES
    assert paths["CreateTopic.config"] == MAX_SETTINGS
    assert paths["ControlUpdate.partitions[].state.isr"] == 1000
    assert paths["ListTransactionsReply.transactions[].participants[][2]"] == MAX_LISTED


@pytest.mark.parametrize(
    ("header", "bound"),
    [
        (["create_topic", 1, "t", 1, 1, 1000, b"", ["c"] * (MAX_COLUMNS + 1)], MAX_COLUMNS),
        (["create_topic", 1, "t", 1, 1, 1000, b"", [], None, {}, [[1] * 1001]], 1000),
        (["alter_reassignments", 1, [["t", 0, [1] * 1001]], 1000], 1000),
        (["alter_reassignments", 1, [["t", 0, [1]]] * (MAX_ENTRIES + 1), 1000], MAX_ENTRIES),
        (["write_markers", 1, [["t", 0, [[1, 1]] * (MAX_PEER_ENTRIES + 1), []]]], MAX_PEER_ENTRIES),
        (
            ["fetch", 1, -1, 0, 1, 1, 1, 0, 0, -1, [["t", 0, "", -1, 0, 1, -1, -1, ["c"] * (MAX_COLUMNS + 1)]]],
            MAX_COLUMNS,
        ),
    ],
    ids=["key columns", "replicas", "target", "moves", "producers of a marker", "columns of a fetch"],
)
def test_a_longer_list_is_refused_by_the_decoder(header: list[Any], bound: int) -> None:
    with pytest.raises(msgspec.ValidationError, match=f"<= {bound}"):
        decode_request(msgspec.msgpack.encode(header))


# --- headers ----------------------------------------------------------------------------------------------------------


def _end(authenticator: Authenticator | None = None) -> ServerEnd:
    def describe(cid: int, version: int) -> HelloReply:
        return HelloReply(cid, version, 1, 1, "c", 1)

    return ServerEnd(describe, 64 * MIB, authenticator)


def _received(end: ServerEnd, header: bytes) -> ReceivedRequest | ImmediateAnswer:
    left = b"".join(map(bytes, encode_frame(header)))
    while True:
        buffer = end.get_buffer()
        count = min(len(buffer), len(left))
        buffer[:count] = left[:count]
        left = left[count:]
        found = end.buffer_updated(count)
        if found:
            return found[0]


def _refusal(end: ServerEnd, header: bytes) -> ErrorReply:
    answer = _received(end, header)
    assert isinstance(answer, ImmediateAnswer) and not answer.close
    assert isinstance(answer.reply, ErrorReply)
    return answer.reply


@pytest.mark.parametrize("cid", [1, 200, 60_000, 2**20, 2**40, 2**64 - 1])
def test_a_clients_header_has_its_own_bound(cid: int) -> None:
    end = _end(Credentials(KeyRing([Secret(b"s" * 32)]), lambda: Identity(SenderKind.BROKER, 1, 1)))
    _received(end, encode_message(hello("test")))
    commit = CommitOffsets(cid, "g", tuple(GroupOffset("t" * 100, number, 0) for number in range(MAX_ENTRIES)))
    assert isinstance(_received(end, encode_message(commit)), ReceivedRequest)
    wide = CommitOffsets(cid, "g", tuple(GroupOffset("t", number, 0, metadata="m" * 4000) for number in range(600)))
    refused = _refusal(end, encode_message(wide))
    assert (refused.cid, refused.code) == (cid, ErrorCode.FRAME_TOO_LARGE)
    assert "commit_offsets" in refused.detail and str(MAX_HEADER_BYTES) in refused.detail
    assert isinstance(_received(end, encode_message(Metadata(7, ()))), ReceivedRequest), (
        "the connection must stay usable"
    )


def test_brokers_and_controllers_may_send_larger_headers() -> None:
    end = _end()
    _received(end, encode_message(hello("test")))
    wanted = tuple(FetchPartition("t" * 100, number, "i" * 32, 7, 0, 1 << 20) for number in range(20_000))
    fetch = Fetch(1, CONSUMER, -1, 0, 1, 1, 0, 0, 0, wanted)
    assert len(encode_message(fetch)) > MAX_HEADER_BYTES
    assert _refusal(end, encode_message(fetch)).cid == 1
    for replica in (0, 5, 300):
        received = _received(end, encode_message(msgspec.structs.replace(fetch, replica_id=replica)))
        assert isinstance(received, ReceivedRequest)
    state = LeaderAndIsr(1, 1, (1, 2, 3), 1)
    decisions = tuple(PartitionDecision("t" * 60, "i" * 32, number, state, 1, (1, 2, 3)) for number in range(60_000))
    markers = WriteMarkers(1, tuple(TransactionMarker("t", 0, ((7, 1),) * 100_000, ()) for _ in range(20)))
    assert len(encode_message(markers)) > MAX_HEADER_BYTES
    assert isinstance(_received(end, encode_message(markers)), ReceivedRequest)
    update = ControlUpdate(1, "c", 1, 1, True, None, (), decisions)
    assert len(encode_message(update)) > MAX_HEADER_BYTES
    assert isinstance(_received(end, encode_message(update)), ReceivedRequest)
    stranger = _end(Credentials(KeyRing([Secret(b"s" * 32)]), lambda: Identity(SenderKind.BROKER, 1, 1)))
    _received(stranger, encode_message(hello("test")))
    for message in (markers, update, fetch):
        assert _refusal(stranger, encode_message(message)).code == ErrorCode.FRAME_TOO_LARGE
    old = msgspec.structs.replace(fetch, replica_id=2)  # a follower of release 0.1.0
    assert len(encode_message(old)) < 4 * MIB
    assert isinstance(_received(stranger, encode_message(old)), ReceivedRequest)
    many = msgspec.structs.replace(old, partitions=wanted * 2)
    assert _refusal(stranger, encode_message(many)).code == ErrorCode.FRAME_TOO_LARGE


def test_a_large_update_is_decoded_only_after_authentication() -> None:
    keys = KeyRing([Secret(b"s" * 32)])
    end = _end(Credentials(keys, lambda: Identity(SenderKind.BROKER, 1, 1)))
    said = offer(hello("test"), keys, Identity(SenderKind.CONTROLLER, -1, 7), b"n" * 32)
    greeted = _received(end, encode_message(said))
    assert isinstance(greeted, ImmediateAnswer) and isinstance(greeted.reply, HelloReply)
    state = LeaderAndIsr(1, 1, (1, 2, 3), 1)
    decisions = tuple(PartitionDecision("t" * 60, "i" * 32, number, state, 1, (1, 2, 3)) for number in range(60_000))
    update = encode_message(ControlUpdate(1, "c", 7, 1, True, None, (), decisions))
    assert _refusal(end, update).code == ErrorCode.FRAME_TOO_LARGE
    _received(end, encode_message(Prove(2, check(said, greeted.reply, keys, expected=1, required=True))))
    assert isinstance(_received(end, update), ReceivedRequest)


@pytest.mark.parametrize("header", [b"", b"\x90", b"\x93\xa5hello", b"\xdd\x00\x00\x00\x02\xa1\xff\x01", b"\xff" * 100])
def test_a_header_that_does_not_begin_as_a_message_is_refused(header: bytes) -> None:
    assert beginning_of(header).cid == -1


@pytest.mark.parametrize("number", [2**31, 2**62, -2])
def test_an_impossible_zookeeper_number_is_not_decoded(number: int) -> None:
    marker = TransactionMarker("t", 0, (), (), "", 0, number)
    for request in (Fetch(0, 1, number, 0, 1, 1, 0, 0, -1, ()), WriteMarkers(0, (marker,))):
        with pytest.raises(msgspec.ValidationError):
            decode_request(encode_message(request))
