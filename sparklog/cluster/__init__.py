"""Brokers on Spark's executors: barrier job, supervision and adoption, the controller's loop, embedded ZooKeeper."""
