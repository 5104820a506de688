"""Tests; they mirror sparklog/."""
