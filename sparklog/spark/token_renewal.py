"""The renewal of the delegation token with which the tasks of a read or write log in, while the tasks run.

A token expires after its period, and the tasks have no password to get another one. So each task has a thread that
renews the token when half of the period is over, and then repeatedly. A task that starts later than that renews the
token at once, even if the task ends before the renewal is done. The brokers store a renewal only if it extends the
token's life considerably, so the number of tasks does not matter. A token cannot be renewed beyond its maximum
lifetime.
"""

from __future__ import annotations

import logging
import random
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from sparklog.client.cluster.blocking_cluster import BlockingCluster
from sparklog.errors import BrokerError, ErrorCode, SparklogError
from sparklog.spark.options import CLIENT_ID

if TYPE_CHECKING:
    from sparklog.net.client_security import ClientSecurity

_LOG = logging.getLogger(__name__)

#: The maximum time of one attempt to renew a token.
_ATTEMPT_S = 10.0
#: The smallest and the largest part of the remaining time after which a task renews the token again. Each task draws a
#: part between them, so that tasks do not renew at the same moment.
_EARLIEST, _LATEST = 0.4, 0.5
#: The part of the period after which a failed attempt is repeated, and the longest time until then.
_REPEAT, _LONGEST_REPEAT_S = 0.05, 60.0
#: The part of the period below which a renewed token has reached the end of its maximum lifetime.
_LAST = 0.25
#: The monotonic times at which this process renews tokens next, by token id, so that one of many short tasks does it.
_next_s_of: dict[str, float] = {}
_ENDED = "the delegation token of the task has expired or was ended with its user: load the DataFrame again"
_PERMANENT = {
    ErrorCode.DELEGATION_TOKEN_NOT_FOUND,
    ErrorCode.DELEGATION_TOKEN_EXPIRED,
    ErrorCode.DELEGATION_TOKEN_REQUEST_NOT_ALLOWED,
    ErrorCode.SASL_AUTHENTICATION_FAILED,
}


@dataclass(frozen=True, slots=True)
class TokenRenewal:
    """The time from which tasks renew their token, in milliseconds since the Unix epoch, and the token's period."""

    from_ms: int
    period_ms: int


@dataclass(frozen=True, slots=True)
class LoginOfTasks:
    """The settings with which tasks log in, and the time from which they renew the settings' token (None: never)."""

    security: ClientSecurity | None
    renewal: TokenRenewal | None = None


@contextmanager
def renewing(bootstrap: str, security: ClientSecurity | None, renewal: TokenRenewal | None) -> Iterator[None]:
    """Renew the token in ``security`` until the block ends. If ``renewal`` is None, do nothing.

    Raises:
        BrokerError: SASL_AUTHENTICATION_FAILED, if the block raised it. The new message says that the token has ended.
    """
    if security is None or renewal is None:
        yield
        return
    ended = threading.Event()
    renewer = _Renewer(bootstrap, security, renewal, ended)
    threading.Thread(target=renewer.run, name="renew the delegation token", daemon=True).start()
    try:
        yield
    except BrokerError as error:
        if error.code != ErrorCode.SASL_AUTHENTICATION_FAILED:
            raise
        raise BrokerError(error.code, f"{_ENDED} ({error.detail})") from error
    finally:
        ended.set()


class _Renewer:
    """The work of the thread that renews one token for one task."""

    def __init__(self, bootstrap: str, security: ClientSecurity, renewal: TokenRenewal, ended: threading.Event) -> None:
        self._bootstrap = bootstrap
        self._security = security
        self._renewal = renewal
        self._period_s = renewal.period_ms / 1000
        self._ended = ended

    def run(self) -> None:
        wait_s: float | None = self._first_s()
        while wait_s is not None and not (wait_s > 0 and self._ended.wait(wait_s)):
            wait_s = self._renew()
            if wait_s is not None:
                _next_s_of[self._security.username] = time.monotonic() + wait_s

    def _first_s(self) -> float:
        """Return the seconds until this process renews the token, or 0 if it must do so now."""
        known_s = _next_s_of.get(self._security.username)
        if known_s is not None:
            return known_s - time.monotonic()
        left_s = self._renewal.from_ms / 1000 - time.time()
        # A clock that is wrong by hours must not delay the first renewal beyond the end of a new token.
        return min(left_s, self._period_s * _LATEST) + random.random() * self._period_s * _REPEAT if left_s > 0 else 0.0

    def _renew(self) -> float | None:
        """Renew the token. Return the seconds until the next renewal, or None if the token cannot be renewed again."""
        from sparklog.client.admin.delegation_tokens import renew_token  # Few tasks run long enough to need it.

        try:
            with BlockingCluster(
                self._bootstrap, client_id=CLIENT_ID, timeout_s=_ATTEMPT_S, security=self._security
            ) as link:
                left_s = renew_token(link, self._security.username, None).left_ms / 1000
        except SparklogError as error:
            if isinstance(error, BrokerError) and error.code in _PERMANENT:
                _LOG.warning("the delegation token of this task cannot be renewed: %s", error)
                return None
            _LOG.warning("could not renew the delegation token of this task, trying again: %s", error)
            return min(self._period_s * _REPEAT, _LONGEST_REPEAT_S)
        if left_s < self._period_s * _LAST:
            _LOG.warning("the delegation token of this task ends in %d s, at its maximum lifetime", left_s)
            return None
        return left_s * random.uniform(_EARLIEST, _LATEST)
