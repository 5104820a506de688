"""One partition's replica, pure: roles, in-sync set, high watermark, waiting produces, fetch sessions.

``replica.py`` is the door; ``events.py`` and ``effects.py`` are what goes through it.
"""
