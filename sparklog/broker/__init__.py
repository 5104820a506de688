"""The broker process: it handles requests and performs the effects of its replicas' state machines.

``python -m sparklog.broker --config file.json`` runs a broker process. ``process`` starts and stops it; ``dispatch``
finds the handler of a request; ``partition`` joins a replica's state machine with its log; ``fetcher`` fetches from
other brokers.
"""
