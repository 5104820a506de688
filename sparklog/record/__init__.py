"""Arrow record batches as the log stores them: bytes, a fixed header, and a schema per topic.

This package is pure: it does no I/O and reads no clock.

schema, layout, schema_cast  the columns that a topic may have, and the cast of a producer's columns to them
codec, header, checksum      conversion of a batch to bytes and back
validate                     a leader's checks before an append; it uses message, flatbuffer, required_columns
footer                       the beginning and the end of a segment, which make it an Arrow file
format_values, parse_values  the JSON and CSV form of values, and back
keys, partitioner            the bytes of keys, and the partition of a key
"""
