"""The delays between retries. Pure: the caller passes the random number."""

from __future__ import annotations

from typing import NamedTuple


class Backoff(NamedTuple):
    """Exponential delays with jitter: ``first_ms * factor**n``, capped, then spread over +-``jitter``.

    Jitter keeps the clients of a failed leader from coming back in step. Source: Kafka's ``retry.backoff.ms``,
    ``retry.backoff.max.ms`` and its 20 % jitter (KIP-580).
    """

    first_ms: float = 25.0
    max_ms: float = 1000.0
    factor: float = 2.0
    jitter: float = 0.2

    def delay_ms(self, attempt: int, roll: float) -> float:
        """Return the milliseconds before try ``attempt`` + 1; the first try is attempt 0. ``roll`` is in [0, 1)."""
        assert attempt >= 0 and 0 <= roll < 1
        # 2**64 ms is past any cap: bounding the exponent keeps a long outage from overflowing the float.
        base = min(self.max_ms, self.first_ms * self.factor ** min(attempt, 64))
        return base * (1 - self.jitter + 2 * self.jitter * roll)
