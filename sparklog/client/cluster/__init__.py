"""The part that all clients share: connections, metadata, routing of requests to leaders, coordinators, retries."""
