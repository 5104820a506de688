"""The conversion of Kafka's record batches (format version 2) to Arrow columns, and back.

batch_view, compression         the header of a batch, its checksum, and the records after decompression
decode                          converts a produced batch to rows and to a batch of the log
encode, control                 convert rows of the log, and markers, to batches that Kafka's consumers read
json_rows, json_columns         convert JSON documents to the columns of a typed topic, and back
key_columns                     decodes the key columns of a typed topic from the bytes of keys

This package is pure: it does no I/O and reads no clock. The bytes come from clients that may be hostile. Every error in
them is an ``InvalidRecords``.
"""
