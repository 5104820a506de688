"""Coordinators of transactions and consumer groups: pure state machines with events in and effects out."""
