"""Search: the rows with the largest inner products with queries."""
