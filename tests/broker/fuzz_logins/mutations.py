"""Random changes of correct bytes and values, which the targets share."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from typing import Any

from tests.broker.test_jwt_validator import AUDIENCE, ISSUER

#: Texts that have a meaning in the messages.
WORDS = (
    *(b"n,,", b"y,,", b"p=tls-unique,,", b",", b"=", b"=2C", b"=3D", b"a=anna", b"n=bert", b"m=x"),
    *(b"tokenauth=true", b"r=", b"auth=Bearer "),
    *(b"s=", b"i=", b"p=", b"v=", b"e=other-error", b"c=biws", b"c=eSws", b"\x00", b"\x01", b"\xff", b"\xc2\xad"),
    *(b"999999", b"1000001", b"99999999999999999999", b"-1", b"\xd9\xa3", b"none", b"null", b"1e999", b"[" * 2000),
    *(b"\xdd\xff\xff\xff\xff", b"\xc6\xff\xff\xff\xff", b"\x92" * 500, b"\xcf" + b"\xff" * 8, b"A" * 40_000),
)  # fmt: skip


#: Values that a claim or a header of a token may have.
VALUES: tuple[Any, ...] = (
    *(None, True, -1, 0, 2**63, 10**400, 1e308, math.inf, -math.inf, math.nan, "", "0", "anna", "\x00"),
    *("a" * 300, "\ud800"),
    *([], {}, [AUDIENCE], ["x", AUDIENCE], [None], {"a": []}, [[[]]], "none", "HS256", "ES256", ISSUER, AUDIENCE),
)  # fmt: skip


def mutated(good: bytes, dice: random.Random) -> bytes:
    """Return the bytes with one to four changes."""
    found = bytearray(good)
    for _ in range(dice.choice((1, 1, 1, 2, 4))):
        at = dice.randrange(len(found) + 1)
        end = min(len(found), at + dice.choice((1, 1, 2, 4, 16, 64)))
        kind = dice.randrange(8)
        if kind <= 1 and at < len(found):
            found[at] ^= 1 << dice.randrange(8)
        elif kind == 2:
            found[at:end] = dice.randbytes(end - at)
        elif kind == 3:
            found[at:at] = dice.choice(WORDS)
        elif kind == 4:
            found[at:end] = dice.choice(WORDS)
        elif kind == 5:
            del found[at:end]
        elif kind == 6:
            found[at:at] = found[at:end] * dice.choice((1, 1, 3, 50))
        elif dice.random() < 0.3:
            del found[at:]
    return bytes(found)


def maybe(good: bytes, dice: random.Random, often: float = 0.3) -> bytes:
    return mutated(good, dice) if dice.random() < often else good


def pieces(data: bytes, dice: random.Random) -> Iterator[bytes]:
    """Yield the bytes, split at random places."""
    whole = dice.random() < 0.4
    while data:
        count = len(data) if whole else dice.choice((1, 2, 7, 8, 9, 100, 5000, 100_000))
        yield data[:count]
        data = data[count:]
