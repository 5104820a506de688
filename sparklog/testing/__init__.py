"""Shipped fakes: a simulated cluster in which a seed decides every delay, loss and crash.

Runs the production cores, not models of them; see ``sim_cluster.SimCluster``. Nothing here is imported by production
code.
"""
