"""The names of the package, imported on first use: `tilerec --help` needs neither torch nor numpy.

Other packages of the library may do the same with `names_on_first_use`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
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
    "__version__": "tilerec.version",
}
"""Module of each name that `tilerec/__init__.py` lists for type checkers."""
PRESENT = "ConfigError", "InputError", "ReshardError", "TilerecError", "command_policy"
"""Names that the package imports at once."""


def names_on_first_use(
    package: str, modules: Mapping[str, str], present: Sequence[str] = ()
) -> tuple[Callable[[str], object], Callable[[], list[str]]]:  # fmt: skip
    """Return `__getattr__` and `__dir__` of a package.

    Args:
        modules: the module of each name of the package; the name may be that of the module's own submodule.
        present: further names, which the package imports at once.
    """

    def get(name: str) -> object:
        """Import a name of the package, or a submodule, on its first use."""
        if name == "__all__":
            return [*modules, *present]
        if name in modules:
            home = import_module(modules[name])
            found: object = getattr(home, name) if hasattr(home, name) else import_module(f"{home.__name__}.{name}")
            vars(sys.modules[package])[name] = found
            return found
        if not name.startswith("_") and find_spec(f"{package}.{name}") is not None:
            return import_module(f"{package}.{name}")
        raise AttributeError(f"module '{package}' has no attribute '{name}'")

    def names() -> list[str]:
        """Return the names of the package."""
        return sorted({*vars(sys.modules[package]), *modules})

    return get, names


__getattr__, __dir__ = names_on_first_use("tilerec", MODULES, PRESENT)
