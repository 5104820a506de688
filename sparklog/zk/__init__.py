"""ZooKeeper: paths, values, the session, and the operations as types. Only this package imports kazoo."""
