"""The broker process: start, registration in ZooKeeper, the supervisor, controlled shutdown."""
