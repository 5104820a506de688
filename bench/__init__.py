"""Measurements: one program for each question; each prints the figures of this machine."""
