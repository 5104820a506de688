"""The format in which a log stores Arrow record batches: encoded bytes, a header of fixed size, and a schema per topic.

This package is pure: it does no I/O and reads no clock.

schema, layout, schema_cast  the columns that a topic may have, and the cast of a producer's columns to them
codec, header, checksum      conversion of a batch to bytes and back
validate                     a leader's checks before an append; it uses message, flatbuffer, required_columns
footer                       the first and the last bytes of a segment's data file, which make it an Arrow file
format_values, parse_values  the JSON and CSV form of values, and back
keys, partitioner            the bytes of keys, and the partition of a key
"""
