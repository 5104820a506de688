"""The kinds of processes that send requests. ``security.request_rules`` has the kind that each request needs.

This module is pure.
"""

from __future__ import annotations

from enum import Enum


class SenderKind(Enum):
    """The kind of process that sends a request. The values are the names of the roles in Hello."""

    CLIENT = "client"
    BROKER = "broker"
    CONTROLLER = "controller"
