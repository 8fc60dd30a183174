"""Retrieval and next-item models: losses, exact search, scores, exported indexes."""
