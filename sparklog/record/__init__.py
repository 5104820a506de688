"""Arrow record batches as the log sees them: bytes, a fixed header, and a schema per topic. Pure: no I/O, no clock.

schema, layout, fit      which columns a topic may have, and making a producer's columns fit them
codec, header, checksum  a batch to bytes and back
validate                 what a leader checks before it appends, over message and flatbuffer (hand-read metadata), nulls
footer                   what makes a segment an Arrow file
keys, partitioner        key bytes, and the partition they belong to
"""
