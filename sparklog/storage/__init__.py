"""The storage of one disk: batches in segments, segments in logs, logs in a log directory."""
