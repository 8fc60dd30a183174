"""Element-wise passes of cross networks."""
