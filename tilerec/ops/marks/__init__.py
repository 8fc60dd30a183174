"""Marks of rows, one bit per row: which rows have been written."""
