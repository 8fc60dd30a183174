"""Model configs of the recipes, one kind of a run file each (`tilerec/train/kinds.py`)."""

from tilerec.recipes.model.dcn import DCNConfig
from tilerec.recipes.model.dlrm import DLRMConfig, DLRMDCNConfig, DLRMProjectionConfig
from tilerec.recipes.model.dot import DotConfig, DotModel, dot_logits
from tilerec.recipes.model.linear import LinearConfig
from tilerec.recipes.model.mlp import ConcatModel, MLPConfig
from tilerec.recipes.model.multi_task import MMoEConfig, PLEConfig, SharedBottomConfig
from tilerec.recipes.model.tables import ManagedIds, TablesConfig

__all__ = [
    "ConcatModel",
    "DCNConfig",
    "DLRMConfig",
    "DLRMDCNConfig",
    "DLRMProjectionConfig",
    "DotConfig",
    "DotModel",
    "LinearConfig",
    "MLPConfig",
    "MMoEConfig",
    "ManagedIds",
    "PLEConfig",
    "SharedBottomConfig",
    "TablesConfig",
    "dot_logits",
]
