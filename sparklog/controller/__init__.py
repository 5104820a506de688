"""The cluster's decisions, pure: elections, incarnations, placement, what each broker has to be told."""
