"""The admin client: management of topics, groups and reassignments, and the state of the cluster."""
