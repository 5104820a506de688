"""Connections to a cluster: metadata, routing to leaders, coordinators, retries. Shared by all clients."""
