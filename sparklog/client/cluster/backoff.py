"""The delays between retries. This module is pure: the caller passes the random number."""

from __future__ import annotations

from typing import NamedTuple


class Backoff(NamedTuple):
    """Exponential delays with jitter: ``first_ms * factor**n``, at most ``max_ms``, plus or minus up to ``jitter``.

    Because of the jitter, the clients of a failed leader do not all retry at the same time. Source: Kafka's
    ``retry.backoff.ms``, ``retry.backoff.max.ms`` and its 20 % jitter (KIP-580).
    """

    first_ms: float = 25.0
    max_ms: float = 1000.0
    factor: float = 2.0
    jitter: float = 0.2

    def delay_ms(self, attempt: int, roll: float) -> float:
        """Return the delay, in ms, between attempt number ``attempt`` (the first one is 0) and the next attempt.

        ``roll`` is a random number in [0, 1).
        """
        assert attempt >= 0 and 0 <= roll < 1
        # Limit the exponent, because the float would overflow after many attempts. 2**64 ms exceeds any maximum.
        base = min(self.max_ms, self.first_ms * self.factor ** min(attempt, 64))
        return base * (1 - self.jitter + 2 * self.jitter * roll)
