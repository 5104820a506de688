"""The demonstration of ``jobs/demo.py``: it writes real rows through Spark during kills, and reads the same rows.

``run`` is the entry point. It uses the log as any user does, through Spark and the admin client. The processes that it
kills must be on this machine.
"""
