"""The retry policy of calls: whether and when a failed call is tried again, and which error it raises at the end.

This module is pure. The caller passes the current time, in seconds of any monotonic clock.
"""

from __future__ import annotations

from sparklog.client.cluster.backoff import Backoff
from sparklog.client.cluster.routing_core import NoResponse
from sparklog.client.errors import ClientTimeout
from sparklog.errors import BrokerError, ErrorCode

#: The grace period in which an unknown topic is retried, because the broker may not know a new topic yet.
UNKNOWN_TOPIC_GRACE_S = 2.0
#: After these errors the request certainly had no effect. After other retriable errors the request may have had an
#: effect.
_NOTHING_DONE = frozenset({ErrorCode.COORDINATOR_LOAD_IN_PROGRESS, ErrorCode.CONCURRENT_TRANSACTIONS})


class Retry:
    """The retry policy of one call: it decides after each failed attempt whether and when to retry.

    Several calls may share one time limit.
    """

    def __init__(
        self,
        *,
        now_s: float,
        timeout_s: float,
        backoff: Backoff = Backoff(),  # noqa: B008 - an immutable value
        first_contact_s: float | None = None,
    ) -> None:
        """Start the clock of the call. ``first_contact_s`` is the limit as long as no broker has ever responded."""
        self.deadline_s = now_s + timeout_s
        #: The number of attempts that failed because there was no response in time.
        self.silences = 0
        #: True if a failed attempt may have had an effect.
        self.uncertain = False
        self._began_s = now_s
        self._timeout_s = timeout_s
        self._backoff = backoff
        self._first_contact_s = min(timeout_s, first_contact_s or timeout_s)
        self._failures = 0

    def left_s(self, now_s: float) -> float:
        return max(0.0, self.deadline_s - now_s)

    def delay_s(self, what: str, error: BrokerError, *, now_s: float, roll: float, contacted: bool = True) -> float:
        """Count a failed attempt, and return the delay before the next attempt, in seconds.

        ``contacted`` is whether a broker has ever responded to this client.

        Raises:
            BrokerError: ``error`` itself, if it is not retriable, or the topic was unknown for the whole grace period.
            ClientTimeout: the time is up. The message has ``what`` and the error.
        """
        self.uncertain = self.uncertain or may_have_acted(error)
        self.silences += isinstance(error, NoResponse)
        passed_s = now_s - self._began_s
        is_unknown = error.code == ErrorCode.UNKNOWN_TOPIC_OR_PARTITION and passed_s >= UNKNOWN_TOPIC_GRACE_S
        if not error.retriable or is_unknown:
            raise error
        if not contacted and passed_s >= self._first_contact_s:
            raise ClientTimeout(f"{error.detail} (tried for {self._first_contact_s:g} s)") from error
        delay_s = self._backoff.delay_ms(self._failures, roll) / 1000
        self._failures += 1
        if delay_s >= self.left_s(now_s):
            raise ClientTimeout(f"{what}: not done within {self._timeout_s:g} s, last: {error}") from error
        return delay_s


def may_have_acted(error: BrokerError) -> bool:
    """Return whether a request that failed with a retriable error may have had an effect."""
    return error.retriable and error.code not in _NOTHING_DONE
