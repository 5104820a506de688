"""The state machine of one replica of a partition, and the fetch sessions between followers and leaders.

The state machine does no I/O. ``replica.py`` has the state machine, ``events.py`` its inputs and ``effects.py`` its
outputs.
"""
