"""Recipes: functions that return the config of a complete run."""

from tilerec.recipes.data import CriteoData, MovieLensData, SyntheticData
from tilerec.recipes.files import FilesData
from tilerec.recipes.interactions import InteractionsData
from tilerec.recipes.model.dcn import DCNConfig
from tilerec.recipes.model.dlrm import DLRMConfig, DLRMDCNConfig, DLRMProjectionConfig
from tilerec.recipes.model.dot import DotConfig, DotModel
from tilerec.recipes.model.linear import LinearConfig
from tilerec.recipes.model.mlp import ConcatModel, MLPConfig
from tilerec.recipes.model.multi_task import MMoEConfig, PLEConfig, SharedBottomConfig
from tilerec.recipes.model.tables import ManagedIds
from tilerec.recipes.registry import RECIPES, find_recipe, make_run
from tilerec.recipes.retrieval_model import SASRecConfig, TwoTowerConfig
from tilerec.recipes.retrieval_runs import sasrec, two_tower
from tilerec.recipes.runs import criteo, movielens, synthetic

__all__ = [
    "RECIPES",
    "find_recipe",
    "make_run",
    "synthetic",
    "movielens",
    "criteo",
    "two_tower",
    "sasrec",
    "SyntheticData",
    "MovieLensData",
    "CriteoData",
    "FilesData",
    "DLRMConfig",
    "DLRMDCNConfig",
    "DLRMProjectionConfig",
    "DCNConfig",
    "DotConfig",
    "DotModel",
    "LinearConfig",
    "MLPConfig",
    "ConcatModel",
    "InteractionsData",
    "TwoTowerConfig",
    "SASRecConfig",
    "PLEConfig",
    "SharedBottomConfig",
    "MMoEConfig",
    "ManagedIds",
]
