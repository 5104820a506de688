"""The broker process: it handles requests and performs the replicas' effects.

``python -m sparklog.broker --config file.json`` runs one. ``process`` starts and stops it; ``dispatch`` finds the
handler of a request; ``partition`` joins a replica's state machine with its log; ``fetcher`` fetches from other
brokers.
"""
