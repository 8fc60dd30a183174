"""The names of the package, imported on first use: `tilerec --help` needs neither torch nor numpy."""

from __future__ import annotations

import sys
from importlib import import_module
from importlib.util import find_spec

MODULES = {
    "cache_tables": "tilerec.modules.cached_tables",
    "flush_caches": "tilerec.modules.cached_tables",
    "uncache_tables": "tilerec.modules.cached_tables",
    "EmbeddingCollection": "tilerec.modules.embedding",
    "EmbeddingBagCollection": "tilerec.modules.embedding_bag",
    "ManagedCollisionCollection": "tilerec.modules.managed_collection",
    "ManagedCollisionEmbeddingBagCollection": "tilerec.modules.managed_embedding",
    "ManagedCollisionEmbeddingCollection": "tilerec.modules.managed_embedding",
    "backends": "tilerec.ops",
    "apply_optimizer_in_backward": "tilerec.optim.attach",
    "DistributedModelParallel": "tilerec.parallel.model_parallel",
    "rebalance": "tilerec.parallel.resharding.rebalance",
    "reshard": "tilerec.parallel.resharding.reshard",
    "shard": "tilerec.parallel.shard",
    "DMPCollectionConfig": "tilerec.parallel.two_d.collection_config",
    "ShardingStrategy": "tilerec.parallel.two_d.collection_config",
    "DMPCollection": "tilerec.parallel.two_d.dmp_collection",
    "ParameterConstraints": "tilerec.planner.constraints",
    "EmbeddingShardingPlanner": "tilerec.planner.planner",
    "JaggedTensor": "tilerec.sparse.jagged_tensor",
    "KeyedJaggedTensor": "tilerec.sparse.keyed_jagged_tensor",
    "KeyedTensor": "tilerec.sparse.keyed_tensor",
    "CacheAlgorithm": "tilerec.spec.cache",
    "CacheParams": "tilerec.spec.cache",
    "KeyValueParams": "tilerec.spec.plan",
    "EmbeddingComputeKernel": "tilerec.spec.plan",
    "ShardingPlan": "tilerec.spec.plan",
    "ShardingType": "tilerec.spec.plan",
    "DataType": "tilerec.spec.table",
    "EmbeddingBagConfig": "tilerec.spec.table",
    "EmbeddingConfig": "tilerec.spec.table",
    "PoolingType": "tilerec.spec.table",
    "Topology": "tilerec.spec.topology",
}
"""Module of each name that `tilerec/__init__.py` lists for type checkers."""


def __getattr__(name: str) -> object:
    """Import a name of the package, or a submodule, on its first use."""
    if name in MODULES:
        home = import_module(MODULES[name])
        found: object = getattr(home, name) if hasattr(home, name) else import_module(f"{home.__name__}.{name}")
        vars(sys.modules["tilerec"])[name] = found
        return found
    if not name.startswith("_") and find_spec(f"tilerec.{name}") is not None:
        return import_module(f"tilerec.{name}")
    raise AttributeError(f"module 'tilerec' has no attribute '{name}'")


def __dir__() -> list[str]:
    """Return the names of the package."""
    return sorted({*vars(sys.modules["tilerec"]), *MODULES})
