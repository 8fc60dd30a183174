"""The part of the memory that the planner leaves to everything besides tables."""

RESERVED = 0.15
"""Fraction of a rank's memory, by default."""
