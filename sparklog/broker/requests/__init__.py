"""Client and follower requests: one module for each kind, and the dispatcher that finds it."""
