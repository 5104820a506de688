"""The demonstration of ``jobs/demo.py``: it writes rows with Spark while processes are killed, and reads the same rows.

``run`` is the entry point. Like any user, it uses Spark and the admin client. The processes that it kills must be on
this machine.
"""
