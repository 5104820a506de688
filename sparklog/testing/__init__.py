"""A simulated cluster, in which a random seed decides every delay, loss and crash; tools for tests on real clusters.

The simulation runs the production code of the replicas and the controller (their *cores*, which do no I/O), not models
of them; see ``sim_cluster.SimCluster``. Production code imports nothing from this package.
"""
