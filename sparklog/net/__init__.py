"""Sockets and event loops, only here: the asyncio server and client, and the blocking client."""
