"""Tests, in packages that mirror sparklog/."""
