"""Tests that multis are encoded and decoded as kazoo does it."""

from __future__ import annotations

import struct

import pytest
from kazoo.exceptions import BadVersionError, RolledBackError
from kazoo.protocol import serialization
from kazoo.security import OPEN_ACL_UNSAFE

from sparklog.zk.kazoo_patches import Multi
from sparklog.zk.ops import Check, Create, Delete, Op, SetData

OPS: list[Op] = [
    Check("/controller_epoch", 7),
    Create("/brokers/ids/1", b"here", ephemeral=True),
    Create("/topics/größe", b""),
    SetData("/topics/t/0/state", b"{}", 3),
    SetData("/sequence", b"", -1),
    Delete("/gone", 2),
]
STAT = struct.pack("!qqqqiiiqiiq", 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11)


def test_requests_equal_those_of_kazoo() -> None:
    theirs = serialization.Transaction(
        [
            serialization.CheckVersion("/root/controller_epoch", 7),
            serialization.Create("/root/brokers/ids/1", b"here", OPEN_ACL_UNSAFE, 1),
            serialization.Create("/root/topics/größe", b"", OPEN_ACL_UNSAFE, 0),
            serialization.SetData("/root/topics/t/0/state", b"{}", 3),
            serialization.SetData("/root/sequence", b"", -1),
            serialization.Delete("/root/gone", 2),
        ]
    )
    ours = Multi(OPS, "/root")
    assert ours.serialize() == bytes(theirs.serialize())
    assert ours.type == theirs.type


def _result(kind: int, content: bytes = b"") -> bytes:
    return struct.pack("!iBi", kind, False, 0 if kind >= 0 else struct.unpack("!i", content)[0]) + content


END = struct.pack("!iBi", -1, True, -1)


def test_responses_are_decoded_as_kazoo_decodes_them() -> None:
    path = struct.pack("!i", 8) + "/größe".encode()
    answer = b"head" + _result(13) + _result(1, path) + _result(5, STAT) + _result(2) + END
    found = Multi.deserialize(answer, 4)
    theirs = serialization.Transaction.deserialize(answer, 4)
    assert found == [None, "/größe", 5, None]
    assert theirs[1] == found[1] and theirs[2].version == found[2] and len(theirs) == len(found)


@pytest.mark.parametrize("failed", [0, 1])
def test_each_refused_operation_of_a_multi_has_its_error(failed: int) -> None:
    codes = [-2, -2]
    codes[failed] = BadVersionError.code
    codes[1 - failed] = RolledBackError.code
    answer = b"".join(_result(-1, struct.pack("!i", code)) for code in codes) + END
    found = Multi.deserialize(answer, 0)
    assert isinstance(found[failed], BadVersionError) and isinstance(found[1 - failed], RolledBackError)
    assert [type(one) for one in found] == [type(one) for one in serialization.Transaction.deserialize(answer, 0)]
