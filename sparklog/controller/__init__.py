"""The controller's decisions: elections, incarnations, placement, and the updates for each broker. It does no I/O."""
