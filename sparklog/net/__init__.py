"""Sockets and event loops: the asyncio server and client, and the blocking client.

No other package uses sockets.
"""
