"""The processes of a cluster on Spark: brokers, the barrier job that supervises them, the controller and ZooKeeper."""
