"""Tests of sparklog.record."""
