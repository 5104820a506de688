"""Connections of the wire protocol: the asyncio server and client, and the blocking client.

This package also creates the event loops.
"""
