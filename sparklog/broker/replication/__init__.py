"""Partitions on this broker: roles, fetching from leaders, effects of the replica machine, log maintenance."""
