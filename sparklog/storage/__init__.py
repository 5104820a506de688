"""The files of a broker: a log directory has logs, a log has segments, and a segment has batches."""
