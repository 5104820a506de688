"""The wire protocol without I/O: frames, messages and the two ends of a connection."""
