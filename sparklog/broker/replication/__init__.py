"""Partitions on this broker: roles, fetching from leaders, effects of the replica's state machine, log maintenance."""
