"""Measurements: one program for each question, printing what this machine gives."""
