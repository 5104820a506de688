"""The administrative requests of Kafka's protocol: topics, settings, replicas, ACLs, users and quotas.

Each module translates one kind of request into sparklog's own requests, whose handlers check and do the work.
"""
