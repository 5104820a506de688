"""The demonstration behind ``jobs/demo.py``: real rows in through Spark, kills on the way, the same rows out.

``run`` is the way in. It uses the log as any user would, through Spark and the admin client. The processes it kills
have to be on this machine.
"""
