"""A model on many ranks: `shard` in place, or `DistributedModelParallel` around it."""
