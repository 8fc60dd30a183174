"""Distinct ids of a batch, rows copied to all their occurrences, and gradients summed over them."""
