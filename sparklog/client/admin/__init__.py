"""The admin client: topics, groups, reassignments, the state of the cluster."""
