"""The cluster's decisions: elections, incarnations, placement, and the updates for each broker. Pure."""
