"""The simulated cluster, in which a seed decides every delay, loss and crash, and the tools of tests on real clusters.

The simulation runs the production cores, not models of them; see ``sim_cluster.SimCluster``. Production code imports
nothing from this package.
"""
