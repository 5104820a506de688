"""Tests that the table of senders has every request, and that numbers that ZooKeeper cannot reach are not decoded."""

from __future__ import annotations

from typing import get_args

import msgspec
import pytest

from sparklog.protocol.messages import (
    CONSUMER,
    CommitOffsets,
    Fetch,
    Request,
    TransactionMarker,
    WriteMarkers,
    decode_request,
    encode_message,
)
from sparklog.protocol.senders import SENDERS, SenderKind, sender_of


def test_every_request_is_classified() -> None:
    assert SENDERS.keys() == set(get_args(Request))


def test_only_these_requests_need_an_authenticated_sender() -> None:
    by_type = {kind.__name__: sender for kind, sender in SENDERS.items() if sender is not SenderKind.CLIENT}
    assert by_type == {
        "VerifyTransaction": SenderKind.BROKER,
        "ListParticipants": SenderKind.BROKER,
        "WriteMarkers": SenderKind.BROKER,
        "ControlUpdate": SenderKind.CONTROLLER,
    }


def test_the_content_distinguishes_followers_from_consumers() -> None:
    def fetch(replica_id: int) -> Fetch:
        return Fetch(0, replica_id, -1, 0, 1, 1, 0, 0, -1, ())

    assert [sender_of(fetch(replica_id)) for replica_id in (CONSUMER, 0, -2)] == [
        SenderKind.CLIENT,
        SenderKind.BROKER,
        SenderKind.BROKER,
    ]
    assert sender_of(CommitOffsets(0, "group", ())) is SenderKind.CLIENT
    assert sender_of(CommitOffsets(0, "group", (), ("key", 1))) is SenderKind.BROKER


@pytest.mark.parametrize("number", [2**31, 2**62, -2])
def test_an_impossible_zookeeper_number_is_not_decoded(number: int) -> None:
    marker = TransactionMarker("t", 0, (), (), "", 0, number)
    for request in (Fetch(0, 1, number, 0, 1, 1, 0, 0, -1, ()), WriteMarkers(0, (marker,))):
        with pytest.raises(msgspec.ValidationError):
            decode_request(encode_message(request))
