"""Recipes: functions that return the config of a complete run."""

from tilerec.recipes.data import CriteoData, MovieLensData, SyntheticData
from tilerec.recipes.files import FilesData
from tilerec.recipes.model import ConcatModel, DLRMConfig, DotConfig, DotModel, MLPConfig
from tilerec.recipes.registry import RECIPES, find_recipe, make_run
from tilerec.recipes.runs import criteo, movielens, synthetic

__all__ = [
    "RECIPES",
    "find_recipe",
    "make_run",
    "synthetic",
    "movielens",
    "criteo",
    "SyntheticData",
    "MovieLensData",
    "CriteoData",
    "FilesData",
    "DLRMConfig",
    "DotConfig",
    "DotModel",
    "MLPConfig",
    "ConcatModel",
]
