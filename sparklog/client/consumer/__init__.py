"""The consumer: fetching, projections, positions, and consumer groups."""
