"""One disk: batches in segments, segments in logs, logs in a log directory; recovery, sealing, retention."""
