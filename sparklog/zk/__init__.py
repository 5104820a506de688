"""The ZooKeeper client: paths, values, the session, and typed operations. Only this package imports kazoo."""
