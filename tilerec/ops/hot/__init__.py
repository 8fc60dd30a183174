"""Hot ids of a batch: replaced by the rows of their copies."""
