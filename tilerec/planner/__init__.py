"""Choosing who holds what."""
