"""Distributed training of a model: `shard` changes it in place, `DistributedModelParallel` wraps it."""

from tilerec.parallel.check_replicas import check_replicas as check_replicas
from tilerec.parallel.compiled_model import compile_model as compile_model
from tilerec.parallel.data_parallel import DataParallelWrapper as DataParallelWrapper
from tilerec.parallel.data_parallel import DefaultDataParallelWrapper as DefaultDataParallelWrapper
from tilerec.parallel.env import ShardingEnv as ShardingEnv
from tilerec.parallel.full_state import full_state_dict as full_state_dict
from tilerec.parallel.model_parallel import DistributedModelParallel as DistributedModelParallel
from tilerec.parallel.plan_of import plan_of as plan_of
from tilerec.parallel.resharding.measured_load import FeatureLoad as FeatureLoad
from tilerec.parallel.resharding.measured_load import Load as Load
from tilerec.parallel.resharding.measured_load import count_hot_ids as count_hot_ids
from tilerec.parallel.resharding.measured_load import load_of as load_of
from tilerec.parallel.resharding.move_report import Resharded as Resharded
from tilerec.parallel.resharding.rebalance import rebalance as rebalance
from tilerec.parallel.resharding.rebalance_decision import Rebalanced as Rebalanced
from tilerec.parallel.resharding.reshard import reshard as reshard
from tilerec.parallel.resharding.resize_ids import resize_ids as resize_ids
from tilerec.parallel.shard import shard as shard
from tilerec.parallel.traffic import traffic as traffic
from tilerec.parallel.two_d.collection_config import DMPCollectionConfig as DMPCollectionConfig
from tilerec.parallel.two_d.collection_config import ShardingStrategy as ShardingStrategy
from tilerec.parallel.two_d.dmp_collection import DMPCollection as DMPCollection
from tilerec.parallel.uneven_batches import Turn as Turn
from tilerec.parallel.uneven_batches import even_batches as even_batches
from tilerec.sharders.fused_params import EmbOptimType as EmbOptimType
from tilerec.sharders.managed_sharders import (
    ManagedCollisionCollectionSharder as ManagedCollisionCollectionSharder,
)
from tilerec.sharders.managed_sharders import (
    ManagedCollisionEmbeddingBagCollectionSharder as ManagedCollisionEmbeddingBagCollectionSharder,
)
from tilerec.sharders.managed_sharders import (
    ManagedCollisionEmbeddingCollectionSharder as ManagedCollisionEmbeddingCollectionSharder,
)
from tilerec.sharders.qcomms import CommOp as CommOp
from tilerec.sharders.qcomms import CommType as CommType
from tilerec.sharders.qcomms import QCommsConfig as QCommsConfig
from tilerec.sharders.qcomms import get_qcomm_codecs as get_qcomm_codecs
from tilerec.sharders.qcomms import get_qcomm_codecs_registry as get_qcomm_codecs_registry
from tilerec.sharders.table_sharders import EmbeddingBagCollectionSharder as EmbeddingBagCollectionSharder
from tilerec.sharders.table_sharders import EmbeddingCollectionSharder as EmbeddingCollectionSharder
from tilerec.sharders.table_sharders import ModuleSharder as ModuleSharder
from tilerec.sharders.table_sharders import get_default_sharders as get_default_sharders
