"""The error that all code raises if it cannot decode a Kafka frame."""

from __future__ import annotations

from sparklog.errors import SparklogError


class MalformedMessage(SparklogError):
    """The error for bytes that are not the message that their header names, and for unknown messages.

    The sender is a faulty client or an attacker. The broker closes the connection, as Kafka does.
    """
