"""The Kafka listener of a broker: the handlers of the requests of Kafka's protocol (``sparklog.kafka``)."""
