"""The clients of a cluster: the producer, the consumer, the admin client, and readers of a range of offsets."""
