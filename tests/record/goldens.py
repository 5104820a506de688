"""Golden files: bytes on disk and on the wire that must never change, as hex with 32 bytes a line."""

from __future__ import annotations

from pathlib import Path

GOLDEN = Path(__file__).parent.parent / "golden"


def golden_bytes(name: str) -> bytes:
    """Return the bytes of ``tests/golden/<name>``."""
    return bytes.fromhex((GOLDEN / name).read_text("ascii"))
