"""What a producer was made with, in its I/O thread's terms."""

from __future__ import annotations

from typing import NamedTuple


class SenderSettings(NamedTuple):
    """Sizes in bytes, times in seconds."""

    bootstrap: str
    client_id: str
    acks: int
    idempotent: bool
    batch_bytes: int
    compression: str | None
    request_timeout_s: float
    delivery_timeout_s: float
    max_request_bytes: int
    metadata_max_age_s: float
    #: Key of this producer's transactions; empty: it writes without.
    transaction: str = ""
