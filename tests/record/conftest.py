"""Properties are checked without a time limit for each example: the machine may be busy with other tests."""

from __future__ import annotations

from hypothesis import settings

settings.register_profile("without deadline", deadline=None)
settings.load_profile("without deadline")
