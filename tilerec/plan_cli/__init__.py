"""`tilerec plan`: make, show, explain, compare and vary sharding plans."""
