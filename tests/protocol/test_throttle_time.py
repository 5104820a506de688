"""Tests that the replies to clients have a throttle time, and that older peers read them."""

from __future__ import annotations

from typing import get_args

import msgspec
import pytest

from sparklog.protocol.connection import encode_reply, with_throttle_time
from sparklog.protocol.messages import Ack, ErrorReply, FetchOffsetsReply, Reply, decode_reply, encode_message

#: Replies before the login, and those to brokers and controllers, which quotas do not limit.
WITHOUT = {
    *("HelloReply", "SaslAuthenticateReply", "UnixSocketReply"),
    *("ControlUpdateReply", "VerifyTransactionReply", "WriteMarkersReply", "ListParticipantsReply"),
}


def test_every_reply_to_a_client_has_a_throttle_time() -> None:
    kinds = get_args(Reply)
    without = {kind.__name__ for kind in kinds if "throttle_time_ms" not in kind.__struct_fields__}
    assert without == WITHOUT


@pytest.mark.parametrize(
    "kind", [one for one in get_args(Reply) if one.__name__ not in WITHOUT], ids=lambda one: one.__name__
)
def test_the_throttle_time_is_optional(kind: type[Reply]) -> None:
    """A peer of an earlier release neither sends nor reads the field: it has a default, and no required one follows."""
    field = next(one for one in msgspec.structs.fields(kind) if one.name == "throttle_time_ms")
    assert field.default == 0
    names = kind.__struct_fields__
    later = names[names.index("throttle_time_ms") :]
    assert not [one.name for one in msgspec.structs.fields(kind) if one.name in later and one.required]


class EarlierAck(msgspec.Struct, array_like=True, tag="ack"):
    """An Ack, as release 0.1.0 declares it."""

    cid: int


def test_a_peer_of_an_earlier_release_ignores_the_field() -> None:
    sent = encode_message(Ack(5, throttle_time_ms=70_000))
    assert msgspec.msgpack.decode(sent, type=EarlierAck) == EarlierAck(5)
    assert decode_reply(msgspec.msgpack.encode(EarlierAck(5))) == Ack(5)


def test_the_longer_wait_counts() -> None:
    assert with_throttle_time(Ack(1), 0) == Ack(1)
    assert with_throttle_time(Ack(1), 7) == Ack(1, throttle_time_ms=7)
    assert with_throttle_time(Ack(1, throttle_time_ms=9), 7).throttle_time_ms == 9  # type: ignore[union-attr]
    assert with_throttle_time(FetchOffsetsReply(1, ()), 7).throttle_time_ms == 7  # type: ignore[union-attr]


def test_a_shortened_error_keeps_its_throttle_time() -> None:
    whole = encode_reply(ErrorReply(1, 2, "x" * 10_000, throttle_time_ms=7))
    shortened = decode_reply(memoryview(b"".join(map(bytes, whole)))[8:])
    assert isinstance(shortened, ErrorReply) and shortened.throttle_time_ms == 7 and len(shortened.detail) < 10_000
