"""The settings of a producer, converted for its I/O thread."""

from __future__ import annotations

from typing import NamedTuple

from sparklog.net.client_security import ClientSecurity


class SenderSettings(NamedTuple):
    """The settings of a producer. Sizes are in bytes, and times in seconds, except ``linger_ms``."""

    bootstrap: str
    client_id: str
    acks: int
    idempotent: bool
    batch_bytes: int
    linger_ms: float
    buffer_bytes: int
    max_block_s: float
    compression: str | None
    request_timeout_s: float
    delivery_timeout_s: float
    max_request_bytes: int
    metadata_max_age_s: float
    #: The key of this producer's transactions; empty if the producer does not use transactions.
    transaction: str = ""
    security: ClientSecurity = ClientSecurity()
