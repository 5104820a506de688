"""Arrow record batches as the log stores them: bytes, a fixed header, and a schema per topic.

Pure: no I/O, no clock.

schema, layout, schema_cast  the columns that a topic may have, and casts of a producer's columns to them
codec, header, checksum      conversion of a batch to bytes and back
validate                     a leader's checks before an append, by message and flatbuffer, required_columns
footer                       the parts that make a segment an Arrow file
keys, partitioner            key bytes, and the partition of a key
"""
