"""Kafka's protocol and record format, without I/O: what a listener of that protocol reads and writes.

wire     the messages of Kafka's protocol
records  Kafka's record batches to Arrow columns, and back
"""
