"""The settings of a producer in the form that its I/O thread uses."""

from __future__ import annotations

from typing import NamedTuple


class SenderSettings(NamedTuple):
    """Settings of a producer. Sizes are in bytes; times are in seconds, except ``linger_ms``."""

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
    #: The key of this producer's transactions; empty: it does not use transactions.
    transaction: str = ""
