"""Fuzzing of the server's side of each mechanism, and of the validator of tokens."""

from __future__ import annotations

import base64
import json
import random
import time
from collections.abc import Iterator
from typing import Any

import jwt

from sparklog.errors import BrokerError, ErrorCode
from sparklog.model import USER, Principal
from tests.broker.fuzz_logins.correct_logins import Good
from tests.broker.fuzz_logins.mutations import VALUES, maybe, mutated
from tests.broker.test_jwt_validator import AUDIENCE, ISSUER, SIGNERS, claims


def _signed(header: bytes, payload: bytes, algorithm: str, key: Any) -> str:
    said = b".".join(base64.urlsafe_b64encode(part).rstrip(b"=") for part in (header, payload))
    signature = jwt.get_algorithm_by_name(algorithm).sign(said, key)
    return f"{said.decode()}.{base64.urlsafe_b64encode(signature).rstrip(b'=').decode()}"


class MechanismTarget:
    """The mechanisms and the validator. They raise only BrokerError, and only proofs and valid tokens log in."""

    def __init__(self, good: Good) -> None:
        self._good = good

    def case(self, dice: random.Random) -> Iterator[str]:
        yield self._exchange(dice) if dice.random() < 0.5 else self._token(dice)

    def _exchange(self, dice: random.Random) -> str:
        mechanism, _, messages, _ = dice.choice(self._good.logins)
        server = self._good.begin(mechanism)
        sent = b""
        try:
            for data in [*messages, b"\x01"][: dice.choice((1, 2, 3))]:
                said = maybe(data, dice, 0.5)
                sent += said
                step = server.step(said)
                assert len(step.data) <= 4096
                if step.principal is not None:
                    self._good.check_proved(step.principal, sent)
                    return f"{mechanism} logged in"
        except BrokerError as error:
            return f"{mechanism} {error.code.name}"
        return "not complete"

    def _token(self, dice: random.Random) -> str:
        kind = dice.randrange(4)
        if kind == 0:
            text = mutated(dice.choice(self._good.tokens).encode(), dice).decode("latin-1")
            return self._judge(text, "anna")
        if kind == 1:
            return self._judge(maybe(dice.choice(self._good.forged).encode(), dice).decode("latin-1"), None)
        algorithm = dice.choice(("ES256", "EdDSA"))
        header: dict[str, Any] = {"alg": algorithm, "typ": "JWT", "kid": algorithm}
        payload = claims()
        for _ in range(dice.choice((0, 1, 1, 2))):
            payload[dice.choice(("iss", "aud", "sub", "exp", "iat", "nbf", "jti", "x"))] = dice.choice(VALUES)
        if dice.random() < 0.3:
            header[dice.choice(("alg", "kid", "typ", "crit", "b64", "x"))] = dice.choice(VALUES)
        data = json.dumps(payload).encode()
        if kind == 2:
            text = _signed(maybe(json.dumps(header).encode(), dice, 0.1), data, algorithm, SIGNERS[algorithm])
            return self._judge(text, payload.get("sub"), payload)
        broken = mutated(data, dice)
        return self._judge(_signed(json.dumps(header).encode(), broken, algorithm, SIGNERS[algorithm]), ...)

    def _judge(self, text: str, name: Any, payload: dict[str, Any] | None = None) -> str:
        """Validate a token, which may give ``name`` only; None for no name, and ... for any."""
        try:
            valid = self._good.validator.validate(text)
        except BrokerError as error:
            assert error.code is ErrorCode.SASL_AUTHENTICATION_FAILED and len(str(error)) < 300
            return "token refused"
        assert name is ... or (isinstance(name, str) and valid.principal == Principal(USER, name)), (valid, name)
        if payload is not None:
            assert payload["iss"] == ISSUER
            assert payload["aud"] == AUDIENCE or AUDIENCE in payload["aud"]
            assert payload["exp"] > time.time() - 40
        return "token accepted"
