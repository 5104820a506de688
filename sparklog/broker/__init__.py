"""The broker process: requests in, the replicas' orders carried out.

``python -m sparklog.broker --config file.json`` runs one. ``process`` starts and stops it; ``dispatch`` leads from a
request to its handler; ``partition`` joins a replica core with its log; ``fetcher`` follows other brokers.
"""
