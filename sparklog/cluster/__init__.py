"""Brokers on Spark's executors: the barrier job that supervises them, the controller's loop, the embedded ZooKeeper."""
