"""The replica of one partition, pure: roles, ISR, high watermark, waiting produces, fetch sessions.

``replica.py`` has the state machine. ``events.py`` and ``effects.py`` have its input and output.
"""
