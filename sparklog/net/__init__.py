"""Sockets and event loops, only in this package: the asyncio server and client, and the blocking client."""
