"""The state machine of one replica of a partition: roles, ISR, high watermark, waiting produces, fetch sessions.

The state machine does no I/O. ``replica.py`` has the state machine, ``events.py`` its inputs and ``effects.py`` its
outputs.
"""
