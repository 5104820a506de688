"""ZooKeeper, and kazoo only here: paths, values, the session, and the operations as types."""
