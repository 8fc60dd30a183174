"""Recipes: functions that return the config of a complete run."""

from tilerec.recipes.data import CriteoData, MovieLensData, SyntheticData
from tilerec.recipes.files import FilesData
from tilerec.recipes.interactions import InteractionsData
from tilerec.recipes.model import ConcatModel, DLRMConfig, DotConfig, DotModel, MLPConfig
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
    "DotConfig",
    "DotModel",
    "MLPConfig",
    "ConcatModel",
    "InteractionsData",
    "TwoTowerConfig",
    "SASRecConfig",
]
