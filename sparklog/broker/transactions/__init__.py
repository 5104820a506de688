"""Transaction coordinators on this broker, and the markers that end transactions."""
