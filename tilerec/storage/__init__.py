"""Memory of table rows: device storage, caches over host memory, optimizer state."""
