"""The life of a broker process, from its start and registration in ZooKeeper to its controlled shutdown."""
