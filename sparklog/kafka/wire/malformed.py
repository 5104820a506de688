"""The one error of all code that decodes a Kafka frame."""

from __future__ import annotations

from sparklog.errors import SparklogError


class MalformedMessage(SparklogError):
    """Bytes that are not the message that their header names, or a message that this package does not know.

    The sender is a client with a fault or an attacker. A broker closes the connection, as Kafka does.
    """
