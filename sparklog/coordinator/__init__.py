"""Coordinators: who may end a transaction and how, and how far groups have read. Pure: events in, effects out."""
