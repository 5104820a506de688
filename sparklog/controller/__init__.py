"""The controller: it elects leaders, places replicas, and decides which updates brokers receive. It does no I/O."""
