"""The partitions that a broker hosts: their replication from leaders, and the maintenance of their logs."""
