"""tilerec: train recommender models whose embedding tables do not fit on one device.

The names below are imported on first use: `tilerec --help` needs neither torch nor numpy.
"""

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
    from tilerec.spec.plan import KeyValueParams as KeyValueParams
    from tilerec.spec.plan import ShardingPlan as ShardingPlan
    from tilerec.spec.plan import ShardingType as ShardingType
    from tilerec.spec.table import DataType as DataType
    from tilerec.spec.table import EmbeddingBagConfig as EmbeddingBagConfig
    from tilerec.spec.table import EmbeddingConfig as EmbeddingConfig
    from tilerec.spec.table import PoolingType as PoolingType
    from tilerec.spec.topology import Topology as Topology

    __version__ = "read on first use"
else:
    from tilerec.lazy_names import __dir__ as __dir__
    from tilerec.lazy_names import __getattr__ as __getattr__
