"""What only a client can run into: time that is up, and a buffer that stays full. Both survive pickling."""

from __future__ import annotations

from sparklog.errors import SparklogError


class ClientTimeout(SparklogError, TimeoutError):
    """What was asked was not done in the time allowed; the message names the last reason seen.

    The request may still take effect: a write that timed out may or may not be in the log.
    """


class BufferFull(ClientTimeout):
    """The producer's buffer had no room in the time allowed: brokers take less than is being written."""


class ProducerClosed(SparklogError):
    """The producer was closed and takes no more records."""
