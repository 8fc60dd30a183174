"""tilerec: train recommender models whose embedding tables do not fit on one device.

The names below are imported on first use: `tilerec --help` needs neither torch nor numpy.
"""

from importlib import import_module as _import_module
from importlib import metadata as _metadata
from importlib.util import find_spec as _find_spec
from typing import TYPE_CHECKING

from tilerec import command_policy as command_policy
from tilerec.errors import ConfigError as ConfigError
from tilerec.errors import InputError as InputError
from tilerec.errors import ReshardError as ReshardError
from tilerec.errors import TilerecError as TilerecError

if TYPE_CHECKING:
    from tilerec.modules.cached_tables import cache_tables as cache_tables
    from tilerec.modules.cached_tables import flush_caches as flush_caches
    from tilerec.modules.cached_tables import uncache_tables as uncache_tables
    from tilerec.modules.embedding import EmbeddingCollection as EmbeddingCollection
    from tilerec.modules.embedding_bag import EmbeddingBagCollection as EmbeddingBagCollection
    from tilerec.modules.managed_collection import ManagedCollisionCollection as ManagedCollisionCollection
    from tilerec.modules.managed_embedding import (
        ManagedCollisionEmbeddingBagCollection as ManagedCollisionEmbeddingBagCollection,
    )
    from tilerec.modules.managed_embedding import (
        ManagedCollisionEmbeddingCollection as ManagedCollisionEmbeddingCollection,
    )
    from tilerec.ops import backends as backends
    from tilerec.optim.attach import apply_optimizer_in_backward as apply_optimizer_in_backward
    from tilerec.parallel.model_parallel import DistributedModelParallel as DistributedModelParallel
    from tilerec.parallel.resharding.rebalance import rebalance as rebalance
    from tilerec.parallel.resharding.reshard import reshard as reshard
    from tilerec.parallel.shard import shard as shard
    from tilerec.parallel.two_d.collection_config import DMPCollectionConfig as DMPCollectionConfig
    from tilerec.parallel.two_d.collection_config import ShardingStrategy as ShardingStrategy
    from tilerec.parallel.two_d.dmp_collection import DMPCollection as DMPCollection
    from tilerec.planner.constraints import ParameterConstraints as ParameterConstraints
    from tilerec.planner.planner import EmbeddingShardingPlanner as EmbeddingShardingPlanner
    from tilerec.sparse.jagged_tensor import JaggedTensor as JaggedTensor
    from tilerec.sparse.keyed_jagged_tensor import KeyedJaggedTensor as KeyedJaggedTensor
    from tilerec.sparse.keyed_tensor import KeyedTensor as KeyedTensor
    from tilerec.spec.cache import CacheAlgorithm as CacheAlgorithm
    from tilerec.spec.cache import CacheParams as CacheParams
    from tilerec.spec.plan import EmbeddingComputeKernel as EmbeddingComputeKernel
    from tilerec.spec.plan import ShardingPlan as ShardingPlan
    from tilerec.spec.plan import ShardingType as ShardingType
    from tilerec.spec.table import DataType as DataType
    from tilerec.spec.table import EmbeddingBagConfig as EmbeddingBagConfig
    from tilerec.spec.table import EmbeddingConfig as EmbeddingConfig
    from tilerec.spec.table import PoolingType as PoolingType
    from tilerec.spec.topology import Topology as Topology

_MODULES = {
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
    "EmbeddingComputeKernel": "tilerec.spec.plan",
    "ShardingPlan": "tilerec.spec.plan",
    "ShardingType": "tilerec.spec.plan",
    "DataType": "tilerec.spec.table",
    "EmbeddingBagConfig": "tilerec.spec.table",
    "EmbeddingConfig": "tilerec.spec.table",
    "PoolingType": "tilerec.spec.table",
    "Topology": "tilerec.spec.topology",
}
"""Module of each name above."""


def __getattr__(name: str) -> object:
    """Import a name, or a submodule, on first use."""
    if name in _MODULES:
        home = _import_module(_MODULES[name])
        found: object = getattr(home, name) if hasattr(home, name) else _import_module(f"{home.__name__}.{name}")
        globals()[name] = found
        return found
    if not name.startswith("_") and _find_spec(f"tilerec.{name}") is not None:
        return _import_module(f"tilerec.{name}")
    raise AttributeError(f"module 'tilerec' has no attribute '{name}'")


def __dir__() -> list[str]:
    """Return the public names."""
    return sorted({*globals(), *_MODULES})


__version__ = next((found.version for found in _metadata.distributions(name="tilerec")), "0+unknown")
