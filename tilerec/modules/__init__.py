"""Single-process modules: embedding collections, feature processors, dense layers, interactions."""

from tilerec.modules.activation import SwishLayerNorm as SwishLayerNorm
from tilerec.modules.cached_tables import cache_tables as cache_tables
from tilerec.modules.cached_tables import flush_caches as flush_caches
from tilerec.modules.cached_tables import uncache_tables as uncache_tables
from tilerec.modules.crossnet import CrossNet as CrossNet
from tilerec.modules.crossnet import LowRankCrossNet as LowRankCrossNet
from tilerec.modules.crossnet import LowRankMixtureCrossNet as LowRankMixtureCrossNet
from tilerec.modules.crossnet import VectorCrossNet as VectorCrossNet
from tilerec.modules.deepfm import DeepFM as DeepFM
from tilerec.modules.deepfm import FactorizationMachine as FactorizationMachine
from tilerec.modules.embedding import EmbeddingCollection as EmbeddingCollection
from tilerec.modules.embedding_bag import EmbeddingBagCollection as EmbeddingBagCollection
from tilerec.modules.evict import DistanceLFU_EvictionPolicy as DistanceLFU_EvictionPolicy
from tilerec.modules.evict import HashZchEvictionConfig as HashZchEvictionConfig
from tilerec.modules.evict import HashZchEvictionPolicyName as HashZchEvictionPolicyName
from tilerec.modules.evict import LFU_EvictionPolicy as LFU_EvictionPolicy
from tilerec.modules.evict import LRU_EvictionPolicy as LRU_EvictionPolicy
from tilerec.modules.evict import MCHEvictionPolicy as MCHEvictionPolicy
from tilerec.modules.feature_processed import (
    FeatureProcessedEmbeddingBagCollection as FeatureProcessedEmbeddingBagCollection,
)
from tilerec.modules.feature_processor import FeatureProcessor as FeatureProcessor
from tilerec.modules.feature_processor import FeatureProcessorsCollection as FeatureProcessorsCollection
from tilerec.modules.feature_processor import PositionWeightedModule as PositionWeightedModule
from tilerec.modules.feature_processor import (
    PositionWeightedModuleCollection as PositionWeightedModuleCollection,
)
from tilerec.modules.hash_zch import HashZchManagedCollisionModule as HashZchManagedCollisionModule
from tilerec.modules.id_counts import FeatureCounts as FeatureCounts
from tilerec.modules.id_counts import IdPlace as IdPlace
from tilerec.modules.id_counts import IdStats as IdStats
from tilerec.modules.interaction import InteractionArch as InteractionArch
from tilerec.modules.interaction import InteractionDCNArch as InteractionDCNArch
from tilerec.modules.interaction import InteractionProjectionArch as InteractionProjectionArch
from tilerec.modules.keyed import ComputeJTDictToKJT as ComputeJTDictToKJT
from tilerec.modules.keyed import ComputeKJTToJTDict as ComputeKJTToJTDict
from tilerec.modules.keyed import KTRegroupAsDict as KTRegroupAsDict
from tilerec.modules.managed_collection import ManagedCollisionCollection as ManagedCollisionCollection
from tilerec.modules.managed_collision import ManagedCollisionModule as ManagedCollisionModule
from tilerec.modules.managed_embedding import (
    ManagedCollisionEmbeddingBagCollection as ManagedCollisionEmbeddingBagCollection,
)
from tilerec.modules.managed_embedding import (
    ManagedCollisionEmbeddingCollection as ManagedCollisionEmbeddingCollection,
)
from tilerec.modules.mch import MCHManagedCollisionModule as MCHManagedCollisionModule
from tilerec.modules.mlp import MLP as MLP
from tilerec.modules.mlp import Perceptron as Perceptron
from tilerec.modules.table import Table as Table
