"""Kafka's protocol and record format, without I/O, for the Kafka listener of a broker.

wire     the messages of Kafka's protocol
records  the conversion of Kafka's record batches to Arrow columns, and back
"""
